"""vLLM's KV cache groups: layers that share block ids. Most models have one; those that mix sliding windows with full
attention have several, which take their blocks from the same memory, each block holding one group's layers.

A group with a window keeps the blocks of its last tokens only. Its block table has the null block where the window has
passed, and a prefix needs of it the chunks before its end only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rewarm.adapters.vllm.versions import can_fail_requests
from rewarm.errors import AdapterError
from rewarm.kv.chunks import ChunkLoad

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK = 0
"""Stands in vLLM's block tables where a window has passed: shared by all requests, and never to be touched."""
_SLIDING = "SlidingWindowSpec"
_SERVED_SPECS = ("FullAttentionSpec", "UniformTypeKVCacheSpecs", _SLIDING)
"""Each layer's KV cache spec is one of these or derives from one."""
_OTHER_SPECS = ("RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec", "SlidingWindowMLASpec")
"""Derived from a served one, but their blocks do not hold each token's KV once and for good."""


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse by name the layers and groups that this adapter, or this vLLM, cannot serve safely.

    Raises:
        AdapterError: Says what it is and what can be done instead.
    """
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        for name, spec in layer_specs(group):
            names = [kind.__name__ for kind in type(spec).__mro__]
            if not any(kind in names for kind in _SERVED_SPECS) or any(kind in names for kind in _OTHER_SPECS):
                raise AdapterError(
                    f"{name} keeps its KV as {names[0]}, which is not served yet: only full attention, MLA and "
                    "sliding windows are",
                    hint=(f"{_ONE_GROUP}; otherwise " if names[0] in _PROMOTED else "") + _WITHOUT,
                )
    if not groups:
        raise AdapterError("this model has no KV cache groups", hint=_WITHOUT)
    if len({group.kv_cache_spec.block_size for group in groups}) > 1:
        _refuse(kv_cache_config, "they have blocks of different numbers of tokens, which is not served yet")
    if loads_whole(windows(kv_cache_config)) and not can_fail_requests():
        _refuse(kv_cache_config, "this vLLM cannot be told that a request of theirs failed to load; 0.30 can")


_ONE_GROUP = "--disable-hybrid-kv-cache-manager makes full attention of layers with a window, at the price of memory"
_PROMOTED = ("SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
"""Not served, but full attention once that is set, where the model has full attention beside them."""
_WITHOUT = "run this model without --kv-transfer-config"


def _refuse(kv_cache_config: KVCacheConfig, reason: str) -> None:
    groups = kv_cache_config.kv_cache_groups
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    if len(groups) > 1:
        what, hint = f"this model has {len(groups)} KV cache groups ({kinds}): {reason}", _ONE_GROUP
    else:
        what, hint = f"all layers of this model have a sliding window ({kinds}): {reason}", "use vLLM 0.30 or later"
    raise AdapterError(what, hint=f"{hint}; otherwise {_WITHOUT}")


def windows(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """For each KV cache group, tokens before the end of a prefix that attention still reads there; 0: all of them."""
    return tuple(_window(group) for group in kv_cache_config.kv_cache_groups)


def _window(group: Any) -> int:
    specs = [spec for _, spec in layer_specs(group)]
    if not any(_SLIDING in (kind.__name__ for kind in type(spec).__mro__) for spec in specs):
        return 0
    return max(1, *(int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0)) for spec in specs))


def loads_whole(windows: Sequence[int]) -> bool:
    """Whether a load is of use as a whole only: part of what lies in windows, or in some of several groups, is no
    prefix.
    """
    return len(windows) > 1 or any(windows)


def group_names(kv_cache_config: KVCacheConfig) -> list[list[str]]:
    """Which layers share blocks, and with what window; empty where all do and have none."""
    if not loads_whole(windows(kv_cache_config)):
        return []
    return [
        [f"window {window}" if window else "all", sha256("\n".join(group.layer_names).encode()).hexdigest()[:32]]
        for group, window in zip(kv_cache_config.kv_cache_groups, windows(kv_cache_config), strict=True)
    ]


def layer_specs(group: Any) -> list[tuple[str, Any]]:
    """Name and KV cache spec of each layer of a group."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.items()) if inner else [(name, group.kv_cache_spec) for name in group.layer_names]


def chunk_load(
    chunk: bytes, block_ids: Sequence[int], first_block: int, end_block: int, begin_block: int
) -> ChunkLoad | None:
    """What to load of a chunk into the blocks of a request: those from ``begin_block`` on that no window has passed.

    Args:
        chunk: Its name.
        block_ids: All blocks of the request in the chunk's group.
        first_block: Where in them the chunk begins.
        end_block: Where it ends.
        begin_block: Those before are resident.
    """
    begin = max(first_block, begin_block)
    while begin < end_block and block_ids[begin] == NULL_BLOCK:
        begin += 1
    ids = block_ids[begin:end_block]
    return ChunkLoad(chunk, array("q", ids), begin - first_block) if ids else None


def held_blocks(output: SchedulerOutput, request_id: str) -> tuple[list[int], ...]:
    """Blocks that a request holds in this step, of each group. What a window has passed is vLLM's again, so that
    blocks which were told of once say nothing there. From 0.30 on.
    """
    held: tuple[list[int], ...] | None = output.kv_connector_block_state.get_block_ids(request_id)
    return held or ()
