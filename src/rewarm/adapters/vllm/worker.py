"""One rank's side of the connector: from vLLM's KV cache tensors and configuration to a rank of rewarm.kv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rewarm.adapters.vllm import describe
from rewarm.kv.planes import find_planes
from rewarm.kv.rank import RankSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rewarm.config import KvConfig
    from rewarm.metrics import Counters


def open_rank(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv: KvConfig,
    counters: Counters,
    kv_caches: Mapping[str, Any],
) -> RankSide:
    """What a rank keeps open.

    Args:
        config: The server's configuration, as this rank has it.
        kv_cache_config: The server's KV cache.
        kv: Rewarm's configuration.
        counters: Where this rank counts.
        kv_caches: What vLLM registers: layer name to tensor or tensors.
    Raises:
        AdapterError: A KV cache layout that cannot be served.
        StorageError, UsageError: The volume cannot be opened.
    """
    planes = find_planes(kv_caches, int(kv_cache_config.num_blocks))
    chunk_tokens = describe.chunk_tokens(config, kv_cache_config, kv.chunk_tokens)
    chunk_blocks = chunk_tokens // describe.block_tokens(config, kv_cache_config)
    rank = int(config.parallel_config.rank)
    holder = describe.holder_rank(config, rank)
    num_chunks = int(config.scheduler_config.max_num_batched_tokens) // chunk_tokens + 2
    return RankSide(
        planes,
        chunk_blocks,
        kv,
        counters,
        rank=holder,
        may_store=rank == holder,
        step_bytes=num_chunks * planes.block_bytes * chunk_blocks,
    )
