"""A small random model of each kind on a real vLLM server on CPU: the same tokens from the volume as computed.

Wide random weights: KV that is wrong, or in the wrong place, shows as other tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import vllm_server as vs
from vllm_server import CHUNK_TOKENS, Server, count_records, needs_vllm, prompt_of

from rewarm.testing.tiny_model import ensure_tiny_model

pytestmark = [pytest.mark.server, pytest.mark.deep, needs_vllm]

PROMPT_TOKENS = 2048
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
CORES = sorted(os.sched_getaffinity(0))
FP8 = ("--kv-cache-dtype", "fp8_e5m2")
TWO_RANKS = ("--tensor-parallel-size", "2")
KINDS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "a window in all layers": ("sliding", (), 1),
    "a window beside full attention": ("interleaved", (), 4),
    "the same on two ranks": ("interleaved", TWO_RANKS, 2 * 4),
    "the same, made one group": ("interleaved", ("--disable-hybrid-kv-cache-manager",), 1),
    "KV cache in fp8": ("full", FP8, 1),
}
"""What it is -> the tiny model, vLLM's flags, and records of each chunk: of each KV cache group and rank."""


def _bind(num_ranks: int) -> dict[str, str]:
    """A core for each rank: without it vLLM wants a NUMA node for each."""
    if num_ranks > len(CORES):
        pytest.skip("each rank needs a core")
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:num_ranks]))} if num_ranks > 1 else {}


def _skip_without_fp8(flags: tuple[str, ...]) -> None:
    import torch

    if flags == FP8 and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps a KV cache in fp8 on CPUs with AVX-512 only")


@pytest.mark.parametrize("name", KINDS)
def test_what_is_loaded_gives_the_tokens_that_computing_gives(name: str, tmp_path: Path) -> None:
    kind, flags, num_records = KINDS[name]
    _skip_without_fp8(flags)
    model = ensure_tiny_model(tmp_path / "model", kind)
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    transfer = vs.transfer_config(root, "--chunk-tokens", str(CHUNK_TOKENS))
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(2)]
    half = prompts[0][: PROMPT_TOKENS // 2] + prompt_of(7, PROMPT_TOKENS)[PROMPT_TOKENS // 2 :]
    bind = _bind(2 if flags == TWO_RANKS else 1)
    with Server(model, tmp_path / "server.log", *flags, transfer=transfer, environment=bind) as server:
        computed = [server.ask(p, salt=f"only {n}").tokens for n, p in enumerate((*prompts, half))]
        assert len(set(computed)) == 3
        assert [server.ask(prompt).tokens for prompt in prompts] == computed[:2]
        assert server.metric("rewarm_kv_hit_tokens_total") == 0
        server.wait_for_records(root, 5 * NUM_CHUNKS * num_records)
        server.reset_prefix_cache()
        assert [server.ask(prompt).tokens for prompt in prompts] == computed[:2]
        assert server.metric("rewarm_kv_hit_tokens_total") == 2 * PROMPT_TOKENS
        server.reset_prefix_cache()
        assert server.ask(half).tokens == computed[2]
        assert server.metric("rewarm_kv_hit_tokens_total") == 2 * PROMPT_TOKENS + PROMPT_TOKENS // 2
        assert server.metric("rewarm_damaged_records_total") == 0
        for record in root.glob("*/??/*.rec"):
            with record.open("r+b") as file:
                file.seek(4096 + record.stat().st_size // 2)
                file.write(b"damaged")
        server.reset_prefix_cache()
        assert [server.ask(prompt).tokens for prompt in prompts] == computed[:2]
        assert server.metric("rewarm_kv_loads_total", outcome="damaged") > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mla_is_stored_once_for_all_ranks_and_loaded_by_each(num_ranks: int, tmp_path: Path) -> None:
    """vLLM's kernels for MLA on CPU do not agree with each other: after the same prompt, one for the prompt and one for
    generated tokens give other tokens. So the prompt that is loaded ends with a token that was generated before, and
    both runs go through the kernel for generated tokens from there on.
    """
    bind = _bind(num_ranks)
    model = ensure_tiny_model(tmp_path / "model", "latent")
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    transfer = vs.transfer_config(root, "--chunk-tokens", str(CHUNK_TOKENS))
    flags = ("--tensor-parallel-size", str(num_ranks))
    with Server(model, tmp_path / "server.log", *flags, transfer=transfer, environment=bind) as server:
        for number in range(2):
            prompt = prompt_of(number, PROMPT_TOKENS - 1)
            first, *rest = server.ask(prompt, 17).tokens
            server.wait_for_records(root, NUM_CHUNKS * (number + 1))
            assert list(server.ask([*prompt, first], 16).tokens) == rest
            assert server.metric("rewarm_kv_hit_tokens_total") == PROMPT_TOKENS * (number + 1)
        assert server.metric("rewarm_kv_loads_total", outcome="hit") == 2 * NUM_CHUNKS * num_ranks
    assert count_records(root) == 2 * NUM_CHUNKS


ON_GPU: dict[str, tuple[str, tuple[str, ...]]] = {
    "full attention": ("full", ()),
    "KV cache in fp8": ("full", ("--kv-cache-dtype", "fp8")),
    "MLA": ("latent", ()),
    "window beside full attention, one group": ("interleaved", ("--disable-hybrid-kv-cache-manager",)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_the_same_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Needs an NVIDIA GPU for which vLLM has MLA and fp8, Hopper or later. Through one kernel, as above."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no NVIDIA GPU of Hopper or later")
    kind, flags = ON_GPU[name]
    model = ensure_tiny_model(tmp_path / "model", kind)
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    transfer = vs.transfer_config(root, "--chunk-tokens", str(CHUNK_TOKENS))
    flags += ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.2")
    seed = {"PYTHONHASHSEED": "0"}
    with Server(model, tmp_path / "server.log", *flags, transfer=transfer, environment=seed) as server:
        for number in range(2):
            prompt = prompt_of(number, PROMPT_TOKENS - 1)
            first, *rest = server.ask(prompt, 17).tokens
            server.wait_for_records(root, NUM_CHUNKS * (number + 1))
            server.reset_prefix_cache()
            assert list(server.ask([*prompt, first], 16).tokens) == rest
            assert server.metric("rewarm_kv_hit_tokens_total") == PROMPT_TOKENS * (number + 1)
