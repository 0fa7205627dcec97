"""A server in miniature: vLLM's real scheduler and KV cache manager, a connector's two real halves, and a model that
writes bytes derived from each KV block's key where attention would write keys and values.

The model also reads: before it "computes" the tokens of a step, it compares every block that the scheduler counts as
computed with the bytes that its key demands. That is what attention would read, so one differing byte here is one wrong
byte served, whichever part was at fault.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from derived import POISON, derived_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_TOKENS = 16
CHUNK_BLOCKS = 4
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
NUM_LAYERS = 3
NUM_KV_HEADS = 2
HEAD_SIZE = 18
"""An odd size on purpose: a chunk's payload then ends inside a page, so that records have padding to damage."""

MAX_STEPS = 2_000
"""Steps after which a request that does not end counts as hung; each idle step yields to the workers."""


def write_tiny_model(folder: Path, tag: str = "") -> Path:
    """A model folder with just what vLLM's configuration and a weights fingerprint read: config.json and one tensor.

    Another tag makes other weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_act": "silu",
        "hidden_size": NUM_KV_HEADS * HEAD_SIZE, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_KV_HEADS, "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_SIZE,
        "vocab_size": 512, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + tag.encode().ljust(16))
    return folder


@dataclass
class Served:
    """What a request got."""

    num_prompt_blocks: int
    good_blocks: int = 0
    """Blocks that the scheduler counted as computed when it first ran the model: loaded, or cached on the device."""
    wrong_blocks: int = 0
    """Of those, blocks with a byte that their key does not demand."""
    failed_blocks: int = 0
    """Blocks that the worker reported as failed to load."""


@dataclass
class _Live:
    request: Any
    served: Served
    ran: bool = False


def make_vllm_config(model: Path, extra_config: dict[str, Any], num_blocks: int, **connector: Any) -> Any:
    """VllmConfig of one rank on CPU with a connector found by module path."""
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.config.device import DeviceConfig

    model_config = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=4096)
    cache_config = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    scheduler_config = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=8192, max_model_len=4096, enable_chunked_prefill=True,
        is_encoder_decoder=False, async_scheduling=False,
    )  # fmt: skip
    transfer = KVTransferConfig(
        kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra_config, **connector
    )
    return VllmConfig(
        model_config=model_config, cache_config=cache_config, scheduler_config=scheduler_config,
        kv_transfer_config=transfer, device_config=DeviceConfig("cpu"),
    )  # fmt: skip


def make_kv_cache_config(num_blocks: int, windows: Sequence[int] = (0,)) -> Any:
    """NUM_LAYERS layers for each of ``windows``, in groups that share their memory; window 0: full attention."""
    from vllm.v1 import kv_cache_interface as interface

    num_layers = NUM_LAYERS * len(windows)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(num_layers)]
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}
    groups = []
    for number, window in enumerate(windows):
        spec = (
            interface.SlidingWindowSpec(sliding_window=window, **shape)
            if window
            else interface.FullAttentionSpec(**shape)
        )
        groups.append(interface.KVCacheGroupSpec(names[number :: len(windows)], spec))
    page_bytes = groups[0].kv_cache_spec.page_size_bytes
    # Before 0.26 a tensor knew neither its offset nor its stride.
    place = (0, page_bytes)[: len(fields(interface.KVCacheTensor)) - 2]
    tensors = [
        interface.KVCacheTensor(num_blocks * page_bytes, [group.layer_names[i] for group in groups], *place)
        for i in range(NUM_LAYERS)
    ]
    return interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


class MiniServer:
    """One server: scheduler half and worker half of a connector around a KV cache on the CPU."""

    def __init__(self, vllm_config: Any, num_blocks: int, model: str = "", windows: Sequence[int] = (0,)) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.forward_context import get_forward_context, set_forward_context
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.model = model
        self.windows = tuple(windows)
        self.kv_cache_config = make_kv_cache_config(num_blocks, windows)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = Scheduler(
            vllm_config=vllm_config, kv_cache_config=self.kv_cache_config, log_stats=False, block_size=BLOCK_TOKENS,
            structured_output_manager=StructuredOutputManager(vllm_config),
        )  # fmt: skip
        self.worker = KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=self.kv_cache_config
        )
        page = (num_blocks, NUM_KV_HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
        caches = [torch.zeros(page, dtype=torch.float32) for _ in range(NUM_LAYERS)]
        groups = self.kv_cache_config.kv_cache_groups
        self.kv_caches = {group.layer_names[i]: cache for group in groups for i, cache in enumerate(caches)}
        flat = [cache.view(num_blocks, -1).view(torch.int32) for cache in caches]
        self._words = [words.numpy().view(np.uint32) for words in flat]
        self.page_words = self._words[0].shape[1]
        self.worker.register_kv_caches(self.kv_caches)
        with set_forward_context(None, vllm_config):
            self._forward_context = get_forward_context()
        self._live: dict[str, _Live] = {}
        self._count = 0

    # The model

    def poison(self) -> None:
        """Fill the whole KV cache with a pattern that no key demands, so that what is right there was loaded."""
        for words in self._words:
            words.fill(POISON)

    def poisoned_blocks(self) -> list[int]:
        """Blocks that still hold nothing but poison."""
        clean = np.ones(len(self._words[0]), dtype=bool)
        for words in self._words:
            clean &= (words == POISON).all(axis=1)
        return [int(b) for b in np.flatnonzero(clean)]

    def block_is_right(self, block_id: int, block_hash: bytes, group: int = 0) -> bool:
        """Whether a block of the KV cache holds the bytes that its key demands, in every layer of its group."""
        want = self._derived(block_hash, group)
        return all(np.array_equal(words[block_id], want[i]) for i, words in enumerate(self._words))

    def _derived(self, block_hash: bytes, group: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return derived_block(
            block_hash + bytes([group] if group else []), self.page_words * NUM_LAYERS, self.model
        ).reshape(NUM_LAYERS, -1)

    def _compute(self, live: _Live, computed: int, scheduled: int) -> None:
        """Read what the scheduler counts as computed, then write the blocks that these tokens complete."""
        request, served = live.request, live.served
        hashes = request.block_hashes
        first_new = computed // BLOCK_TOKENS
        if not live.ran:
            live.ran = True
            served.good_blocks = first_new
        for group, block_ids in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
            window = self.windows[group]
            first_read = max(0, computed - window + 1) // BLOCK_TOKENS if window else 0
            read = range(first_read, min(first_new, len(hashes)))
            wrong = sum(not self.block_is_right(block_ids[i], hashes[i], group) for i in read)
            served.wrong_blocks = max(served.wrong_blocks, wrong)
            for i in range(first_new, min((computed + scheduled) // BLOCK_TOKENS, len(hashes))):
                assert block_ids[i], "the null block is to be written"
                want = self._derived(hashes[i], group)
                for layer, words in enumerate(self._words):
                    words[block_ids[i]] = want[layer]

    # Steps of the engine core and the model runner

    def make_request(self, prompt: list[int], request_id: str = "", output_tokens: int = 1) -> Any:
        """A request with the hashes of its blocks."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return Request(request_id, list(prompt), params, None, block_hasher=self._hasher)

    def add(self, prompt: list[int], request_id: str | None = None, output_tokens: int = 1) -> str:
        """Queue a request; returns its id."""
        self._count += 1
        request_id = request_id or f"r{self._count}"
        request = self.make_request(prompt, request_id, output_tokens)
        self._live[request_id] = _Live(request, Served(num_prompt_blocks=len(prompt) // BLOCK_TOKENS))
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """A client that went away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> int:
        """One step of the engine core; returns the tokens that were scheduled in it."""
        from vllm.v1.outputs import ModelRunnerOutput

        out = self.scheduler.schedule()
        self.worker.handle_preemptions(out.kv_connector_metadata)
        self.worker.bind_connector_metadata(out.kv_connector_metadata)
        loads_first = getattr(out, "has_sync_kv_loads", True)  # before 0.30 loads always start first
        if loads_first:
            self.worker.start_load_kv(self._forward_context)
        sampled = self._forward(out)
        if not loads_first:
            self.worker.start_load_kv(self._forward_context)
        self.worker.wait_for_save()
        moved = self._transfer_output(out)
        self.worker.clear_connector_metadata()
        req_ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids=req_ids, req_id_to_index={r: i for i, r in enumerate(req_ids)},
            sampled_token_ids=[sampled[r] for r in req_ids], kv_connector_output=moved,
        )  # fmt: skip
        self.scheduler.update_from_output(out, result)
        return int(out.total_num_scheduled_tokens)

    def _forward(self, out: Any) -> dict[str, list[int]]:
        computed = {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        if out.total_num_scheduled_tokens:
            for name in self.kv_caches:
                self.worker.wait_for_layer_load(name)
        for request_id, scheduled in out.num_scheduled_tokens.items():
            live = self._live[request_id]
            self._compute(live, computed[request_id], scheduled)
            done = computed[request_id] + scheduled >= live.request.num_tokens
            sampled[request_id] = [7] if done else []
        if out.total_num_scheduled_tokens:
            for name, cache in self.kv_caches.items():
                self.worker.save_kv_layer(name, cache, None)
        return sampled

    def _transfer_output(self, out: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.v1.outputs import KVConnectorOutput

        worker = self.worker
        if hasattr(KVConnectorBase_V1, "get_transfer_results"):
            results = worker.get_transfer_results(out.finished_req_ids)
            finished = {"finished_sending": results.finished_sending, "finished_recving": results.finished_recving}
            finished["failed_recving"] = results.failed_recving
        else:
            sent, received = worker.get_finished(out.finished_req_ids)
            finished = {"finished_sending": sent, "finished_recving": received}
        failed = worker.get_block_ids_with_load_errors()
        for live in self._live.values():
            if failed and not live.ran:
                mine = {
                    i for ids in self.scheduler.kv_cache_manager.get_block_ids(live.request.request_id) for i in ids
                }
                live.served.failed_blocks += len(mine & failed)
        return KVConnectorOutput(
            **finished, invalid_block_ids=failed,
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )  # fmt: skip

    def run(self, prompts: list[list[int]], *, until: Callable[[], bool] | None = None) -> list[Served]:
        """Serve prompts together, one output token each; then step until ``until`` is true (stores written, say)."""
        ids = [self.add(prompt) for prompt in prompts]
        self.drain(lambda: not self.scheduler.has_unfinished_requests() and (until is None or until()), "the requests")
        return [self._live.pop(request_id).served for request_id in ids]

    def drain(self, done: Callable[[], bool], what: str) -> None:
        """Step until ``done``; a server whose engine core has nothing to run steps on while transfers are open."""
        for _ in range(MAX_STEPS):
            if done():
                return
            if not self.step():
                time.sleep(0.0005)
        raise AssertionError(f"waited {MAX_STEPS} steps for {what}")

    def forget_device_cache(self) -> None:
        """Empty vLLM's own prefix cache and poison the memory: what is found after this comes from storage.

        Steps on while a connector keeps blocks of finished requests.
        """
        if not self.scheduler.has_unfinished_requests():
            self.drain(lambda: not self.scheduler.requests, "the blocks that are held for stores")
        assert self.scheduler.reset_prefix_cache(), "requests still hold blocks"
        self.poison()

    def close(self) -> None:
        """Stop both halves."""
        self.worker.shutdown()
        self.scheduler.shutdown()
