"""What vLLM's configuration says about the bytes of a KV record: translation into an identity, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rewarm.adapters.vllm.groups import check_groups, layer_specs, loads_whole, windows
from rewarm.adapters.vllm.versions import drains_finished_requests
from rewarm.errors import AdapterError, UsageError
from rewarm.kv.chunks import DEVICE_TARGET_BYTES, HOST_TARGET_BYTES, choose_chunk_tokens
from rewarm.kv.fingerprint import Fingerprint, run_nonce, unknown_contents, weights_fingerprint
from rewarm.kv.identity import KvIdentity, canonical_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rewarm.kv.announcer import EventMaker

HELD_SHARE = 4
"""Finished requests keep at most one of so many blocks: what runs must not wait for the disk."""
LAYOUT_VERSION = 1
"""Of what a record holds of vLLM's blocks; changes when the adapter maps them otherwise."""

_SECRET_HASHES = ("xxhash", "xxhash_cbor")
"""Not collision resistant: vLLM draws their seed anew for every process, in all versions."""
_ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "rotary_pct",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
"""RoPE kinds whose angles depend on the longest context that the server was started for."""


def check_served(config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Refuse by name what this adapter cannot serve, before the first request.

    Raises:
        AdapterError: Says what it is and what can be done instead.
    """
    transfer = config.kv_transfer_config
    if getattr(transfer, "kv_load_failure_policy", None) != "recompute":
        raise AdapterError(
            "kv_load_failure_policy is not recompute: a record that turns out damaged would fail its request",
            hint='put "kv_load_failure_policy": "recompute" into --kv-transfer-config, as rewarm vllm config does',
        )
    if kv_cache_config is None:
        raise AdapterError("this vLLM tells its connectors nothing of the KV cache", hint="use vLLM 0.20.1 or later")
    check_groups(kv_cache_config)
    seed_of_hashes(config)


def seed_of_hashes(config: VllmConfig) -> str:
    """What vLLM's block hashes start from, in readable form.

    Raises:
        AdapterError: It is drawn anew for every process, so nothing stored would ever be found again.
    """
    from vllm.v1.core import kv_cache_utils

    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return "PYTHONHASHSEED " + sha256(seed.encode()).hexdigest()[:16]
    algorithm = _text(config.cache_config.prefix_caching_hash_algo)
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    if default is None or algorithm in _SECRET_HASHES:
        what = f"with {algorithm} " if default is not None else ""
        raise AdapterError(
            f"this vLLM {what}names its KV blocks anew at every start, so that nothing stored would be found again",
            hint="set PYTHONHASHSEED=0 in the environment of every server that shares the volume",
        )
    return str(default)


def shared_identity(
    config: VllmConfig, *, chunk_tokens: int, block_tokens: int, salt: str, groups: Sequence[Sequence[str]] = ()
) -> tuple[str, list[str]]:
    """The part of the identity that all ranks share, and what a person should know about it.

    Args:
        config: The server's configuration.
        chunk_tokens: Tokens a chunk.
        block_tokens: Tokens a block.
        salt: What keeps tenants apart.
        groups: What group_names() says.
    Returns:
        Canonical JSON, and a line for each content that could not be told (its records end with this run).
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    weights = _weights(model, _text(config.load_config.load_format))
    draft, draft_weights = _draft(config)
    notes = [print_.reason for print_ in (weights, draft_weights) if print_ is not None and print_.reason]
    run = ""
    if getattr(cache, "calculate_kv_scales", False):
        run = run_nonce()
        notes.append("calculate_kv_scales takes the scales of the KV cache from the first requests")
    identity = KvIdentity(
        server={"kind": "vllm", "layout_version": LAYOUT_VERSION},
        model={
            "weights": weights.to_json(),
            "revision": _text(model.revision or ""),
            "architectures": list(getattr(model.hf_config, "architectures", None) or []),
            "dtype": _dtype(model.dtype),
            "quantization": _text(model.quantization or ""),
            "overrides": _overrides(getattr(model, "hf_overrides", None)),
            "sliding_window": "disabled" if getattr(model, "disable_sliding_window", False) else "as configured",
        },
        draft=draft,
        rope=_rope(model),
        kv={
            "dtype": _text(cache.cache_dtype),
            "scales": "calculated" if run else "of the model",
            "unquantized_layers": [str(layer) for layer in getattr(cache, "kv_cache_dtype_skip_layers", None) or []],
            "fast_prefill": bool(getattr(cache, "kv_sharing_fast_prefill", False)),
            "block_tokens": block_tokens,
            "chunk_tokens": chunk_tokens,
            **({"groups": [list(names) for names in groups]} if groups else {}),
        },
        topology={name: getattr(parallel, f"{field}_parallel_size", 1) for name, field in _TOPOLOGY.items()},
        hashing={"algorithm": _text(cache.prefix_caching_hash_algo), "seed": seed_of_hashes(config)},
        salt=sha256(salt.encode()).hexdigest() if salt else "",
        run=run,
    )
    return canonical_json(identity.to_json()), notes


_TOPOLOGY = {"tp": "tensor", "pp": "pipeline", "dcp": "decode_context", "pcp": "prefill_context"}


def block_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one block id stands for: context parallelism spreads a block over ranks."""
    parallel = config.parallel_config
    spread = getattr(parallel, "decode_context_parallel_size", 1) * getattr(
        parallel, "prefill_context_parallel_size", 1
    )
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size) * spread


def hash_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one entry of ``Request.block_hashes`` stands for."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or block_tokens(config, kv_cache_config))


def nominal_block_bytes(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """About the bytes of one KV block of a rank: the same number on all, since the chunk size follows from it."""
    # Groups lie in the same memory; some have a layer less than others.
    group = max(kv_cache_config.kv_cache_groups, key=lambda group: len(group.layer_names))
    group_bytes = sum(int(spec.page_size_bytes) for _, spec in layer_specs(group))
    num_stages = config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return group_bytes
    # The stages hold different numbers of layers; the mean is the same seen from each.
    num_layers = config.model_config.get_total_num_hidden_layers()
    return group_bytes // max(1, len(group.layer_names)) * -(-int(num_layers) // int(num_stages))


def holder_rank(config: VllmConfig, rank: int) -> int:
    """Whose name the bytes of ``rank`` are stored in: its own, but the first of its stage where TP only copies."""
    parallel = config.parallel_config
    context = getattr(parallel, "decode_context_parallel_size", 1) * getattr(
        parallel, "prefill_context_parallel_size", 1
    )
    if getattr(config.model_config, "use_mla", False) and context == 1:
        return rank - rank % int(parallel.tensor_parallel_size)
    return rank


def holder_ranks(config: VllmConfig) -> list[int]:
    """Every rank that stores a part of each chunk."""
    return sorted({holder_rank(config, rank) for rank in range(int(config.parallel_config.world_size))})


def step_tokens(config: VllmConfig) -> int:
    """Tokens that one step computes at most."""
    return int(config.scheduler_config.max_num_batched_tokens)


def hold_blocks(kv_cache_config: KVCacheConfig, version: str) -> int:
    """Blocks that finished requests may keep until their last chunks are staged; 0: this vLLM frees them at once, or
    a window may have passed some of them.
    """
    may_hold = drains_finished_requests(version) and not any(windows(kv_cache_config))
    return int(kv_cache_config.num_blocks) // HELD_SHARE if may_hold else 0


def prefill_limit(config: VllmConfig) -> int:
    """Of them, what one prompt may take; 0: all."""
    return int(getattr(config.scheduler_config, "long_prefill_token_threshold", 0) or 0)


def chunk_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig, asked_tokens: int) -> int:
    """Tokens a chunk: the same number on every rank and on the scheduler's side.

    Raises:
        UsageError: The asked number does not fit this server.
    """
    on_host = _text(config.device_config.device_type) == "cpu"
    one_block = block_tokens(config, kv_cache_config)
    chunk_tokens = choose_chunk_tokens(
        nominal_block_bytes(config, kv_cache_config),
        one_block,
        target_bytes=HOST_TARGET_BYTES if on_host else DEVICE_TARGET_BYTES,
        asked_tokens=asked_tokens,
    )
    # A chunk longer than a window would never be there as a whole while tokens are generated one by one.
    most_tokens = min([max(window + 1, one_block) for window in windows(kv_cache_config) if window] or [chunk_tokens])
    if asked_tokens > most_tokens:
        raise UsageError(
            f"chunk_tokens {asked_tokens} is more than this model's sliding window of {most_tokens} tokens",
            hint="use fewer tokens a chunk, or leave chunk_tokens out",
        )
    while chunk_tokens > most_tokens:
        chunk_tokens //= 2
    return chunk_tokens


def event_maker(config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int) -> EventMaker | None:
    """What makes this server's KV events; None where it sends none."""
    events = getattr(config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events or loads_whole(windows(kv_cache_config)):
        return None
    from rewarm.adapters.vllm.events import BlockEvents

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return BlockEvents(chunk_tokens=chunk_tokens, hash_tokens=hash_tokens(config, kv_cache_config), spec=spec)


def lora_salt(lora_path: str) -> bytes:
    """What tells two LoRA adapters apart by their contents; unknown contents: never the same twice."""
    fingerprint = weights_fingerprint(lora_path)
    return f"lora {fingerprint.kind} {fingerprint.digest}".encode()


def _weights(model: Any, load_format: str) -> Fingerprint:
    if load_format == "dummy":
        import torch

        # vLLM draws dummy weights from a constant seed; what else they depend on is the shape and the generator.
        parts = [_config_json(model.hf_config), str(model.dtype), torch.__version__, str(model.seed)]
        return Fingerprint("dummy", sha256("\n".join(parts).encode()).hexdigest())
    source = getattr(model, "model_weights", "") or model.model
    return weights_fingerprint(str(source), model.revision)


def _draft(config: VllmConfig) -> tuple[dict[str, Any], Fingerprint | None]:
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None:
        return {}, None
    weights = _weights(draft, _text(config.load_config.load_format))
    return {"method": _text(speculative.method), "weights": weights.to_json(), "dtype": _dtype(draft.dtype)}, weights


def _rope(model: Any) -> dict[str, Any]:
    text_config = getattr(model, "hf_text_config", None) or model.hf_config
    rope: dict[str, Any] = {}
    for key in _ROPE_KEYS:
        value = getattr(text_config, key, None)
        if isinstance(value, Mapping):
            rope.update({str(k): _plain(v) for k, v in value.items() if v is not None})
        elif value is not None:
            rope[key] = _plain(value)
    kind = rope.pop("type", None) or rope.pop("rope_type", "default")
    rope.pop("rope_type", None)
    if kind != "default":
        rope["rope_type"] = kind
    if kind in _LENGTH_DEPENDENT_ROPE:
        rope["max_model_len"] = int(model.max_model_len)
    return rope


def _overrides(overrides: Mapping[str, Any] | Callable[..., Any] | None) -> Any:
    if not overrides:
        return {}
    if isinstance(overrides, Mapping):
        return {str(key): _plain(value) for key, value in overrides.items()}
    return unknown_contents("hf_overrides is a function").to_json()


def _config_json(hf_config: Any) -> str:
    return json.dumps(hf_config.to_dict(), sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    """``value`` as JSON has it, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
