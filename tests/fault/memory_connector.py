"""The least a connector can be: KV blocks in a dictionary, loaded between steps, right or wrong as asked.

It stands in for a connector that serves wrong bytes or reports failures, so that the campaign's own eyes can be tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

STORED: dict[bytes, list[torch.Tensor]] = {}


@dataclass
class _Meta(KVConnectorMetadata):
    loads: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    stores: list[tuple[int, bytes]] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """``lie``: "no", "flip" (one wrong bit in the second block), "fail" (the second block is reported as failed)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.lie = self._kv_transfer_config.kv_connector_extra_config["lie"]
        self.block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.caches: list[torch.Tensor] = []
        self.requests: dict[str, Any] = {}
        self.loads: dict[str, list[tuple[int, bytes]]] = {}
        self.loaded: set[str] = set()
        self.failed: set[int] = set()
        self.refused: set[bytes] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = num_computed_tokens // self.block_tokens
        hashes = [bytes(h) for h in request.block_hashes[first : (request.num_tokens - 1) // self.block_tokens]]
        hits = 0
        while hits < len(hashes) and hashes[hits] in STORED and hashes[hits] not in self.refused:
            hits += 1
        return hits * self.block_tokens, hits > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = request
        if num_external_tokens:
            ids = blocks.get_block_ids()[0][: num_external_tokens // self.block_tokens]
            self.loads[request.request_id] = list(zip(ids, map(bytes, request.block_hashes), strict=False))
            if self.lie == "fail" and len(ids) > 1:
                self.refused.add(bytes(request.block_hashes[1]))

    def build_connector_meta(self, scheduler_output: Any) -> _Meta:
        meta = _Meta(self.loads)
        self.loads = {}
        for new in scheduler_output.scheduled_new_reqs:
            meta.stores += zip(new.block_ids[0], map(bytes, self.requests[new.req_id].block_hashes), strict=False)
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, pairs in self._get_connector_metadata().loads.items():
            for i, (block_id, block_hash) in enumerate(pairs):
                if self.lie == "fail" and i == 1:
                    self.failed.add(block_id)
                    continue
                for cache, page in zip(self.caches, STORED[block_hash], strict=True):
                    cache[block_id] = page
                if self.lie == "flip" and i == 1:
                    self.caches[-1][block_id].view(torch.int32)[0, 0, 0] ^= 1
            self.loaded.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for block_id, block_hash in self._get_connector_metadata().stores:
            STORED.setdefault(block_hash, [cache[block_id].clone() for cache in self.caches])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        loaded, self.loaded = self.loaded, set()
        return None, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self.requests.pop(request.request_id, None)
        return False, None
