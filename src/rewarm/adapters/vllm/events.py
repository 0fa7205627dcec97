"""vLLM's KV events about chunks: the same fields, block by block, as those that vLLM sends for its own blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from vllm.v1.request import Request

MEDIUM = "STORAGE"
"""What vLLM calls its own storage tiers since 0.28; older releases have no name for it that routers know."""
_GROUP = 0
"""Number of the one KV cache group that is served."""


class BlockEvents:
    """An EventMaker of vLLM's events."""

    def __init__(self, *, chunk_tokens: int, hash_tokens: int, spec: Any) -> None:
        """
        Args:
            chunk_tokens: Tokens a chunk.
            hash_tokens: Tokens that one entry of Request.block_hashes stands for.
            spec: Of the KV cache group.
        """
        self._chunk_tokens = chunk_tokens
        self._hash_tokens = hash_tokens
        self._chunk_hashes = chunk_tokens // hash_tokens
        self._of_group = _group_fields(spec)

    def hashes(self, request: Request, index: int) -> list[bytes]:
        """See EventMaker."""
        first = index * self._chunk_hashes
        return [bytes(block_hash) for block_hash in request.block_hashes[first : first + self._chunk_hashes]]

    def stored(self, request: Request, index: int) -> BlockStored:
        """See EventMaker."""
        start = index * self._chunk_tokens
        parent = request.block_hashes[index * self._chunk_hashes - 1] if index else None
        lora = request.lora_request
        return BlockStored(
            block_hashes=_as_sent(self.hashes(request, index)),
            parent_block_hash=None if parent is None else _as_sent([parent])[0],
            token_ids=list(request.all_token_ids[start : start + self._chunk_tokens]),
            block_size=self._hash_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
            extra_keys=self._extra_keys(request, start),
            **self._of_group,
        )

    def removed(self, hashes: list[bytes]) -> BlockRemoved:
        """See EventMaker."""
        return BlockRemoved(block_hashes=_as_sent(hashes), medium=MEDIUM, group_idx=_GROUP)

    def _extra_keys(self, request: Request, start: int) -> Any:
        """What else than tokens went into each block's hash, as vLLM's own events tell it."""
        keys, at_input = [], 0
        for begin in range(start, start + self._chunk_tokens, self._hash_tokens):
            end = begin + self._hash_tokens
            of_block, at_input = kv_cache_utils.generate_block_hash_extra_keys(request, begin, end, at_input)
            keys.append(of_block)
        as_sent = getattr(kv_cache_utils, "to_event_extra_keys", None)  # from 0.32 on events spell them otherwise
        return as_sent(keys) if as_sent is not None else keys


def _as_sent(hashes: list[bytes]) -> list[Any]:
    """Bytes, or numbers where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES asks for those."""
    return [kv_cache_utils.maybe_convert_block_hash(block_hash) for block_hash in hashes]


def _group_fields(spec: Any) -> dict[str, Any]:
    """What tells a router of which kind of group a block is, as far as this release's events have it."""
    fields: dict[str, Any] = {"group_idx": _GROUP}
    if "kv_cache_spec_kind" in BlockStored.__struct_fields__:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

        fields["kv_cache_spec_kind"] = get_kv_cache_spec_kind(spec).value
        fields["kv_cache_spec_sliding_window"] = get_kv_cache_spec_sliding_window(spec)
    return fields
