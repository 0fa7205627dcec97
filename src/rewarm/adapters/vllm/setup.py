"""What the scheduler's side of the connector is made of, from a server's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewarm.adapters.vllm import describe
from rewarm.adapters.vllm.groups import group_names, windows
from rewarm.errors import AdapterError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rewarm.config import KvConfig
    from rewarm.kv.announcer import EventMaker
    from rewarm.metrics import Counters
    from rewarm.volume.tiered import AnyVolume


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """What a scheduler's side is made of."""

    kv: KvConfig
    volume: AnyVolume
    counters: Counters
    identity: str
    """Canonical JSON of what all ranks share."""
    holders: list[int]
    """Ranks that store a part of each chunk."""
    block_tokens: int
    chunk_tokens: int
    hash_tokens: int
    """Tokens that one entry of Request.block_hashes stands for."""
    step_tokens: int
    """Tokens that the server computes in one step at most."""
    prefill_limit: int
    """Of them, what one prompt may take; 0: all."""
    shares_blocks: bool
    """Whether the server finds a finished load of one request for the next (its own prefix caching)."""
    hold_blocks: int = 0
    """Blocks that finished requests may keep until their last chunks are staged."""
    lora_salt: Callable[[str], bytes] = describe.lora_salt
    windows: tuple[int, ...] = (0,)
    """For each KV cache group, tokens before the end of a prefix that it needs; 0: all."""
    events: EventMaker | None = None
    """Makes the server's KV events; None: nobody asked for them."""


def scheduler_setup(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv: KvConfig,
    volume: AnyVolume,
    counters: Counters,
    *,
    version: str,
) -> tuple[SchedulerSetup, list[str]]:
    """The setup that follows from a server's version and configuration, and what a person should know about it.

    Raises:
        AdapterError, UsageError: This server cannot be served as it is configured.
    """
    chunk_tokens = describe.chunk_tokens(config, kv_cache_config, kv.chunk_tokens)
    block_tokens = describe.block_tokens(config, kv_cache_config)
    hash_tokens = describe.hash_tokens(config, kv_cache_config)
    if chunk_tokens % hash_tokens:
        raise AdapterError(f"a chunk of {chunk_tokens} tokens does not end where vLLM hashes ({hash_tokens} tokens)")
    identity, notes = describe.shared_identity(
        config,
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        salt=kv.salt,
        groups=group_names(kv_cache_config),
    )
    setup = SchedulerSetup(
        kv=kv,
        volume=volume,
        counters=counters,
        identity=identity,
        holders=describe.holder_ranks(config),
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        hash_tokens=hash_tokens,
        step_tokens=describe.step_tokens(config),
        prefill_limit=describe.prefill_limit(config),
        shares_blocks=bool(config.cache_config.enable_prefix_caching),
        hold_blocks=describe.hold_blocks(kv_cache_config, version),
        windows=windows(kv_cache_config),
        events=describe.event_maker(config, kv_cache_config, chunk_tokens) if kv.policy != "never" else None,
    )
    return setup, notes
