"""Two ranks on CPU: a record a rank; a server with one rank on the same directory finds nothing and is not harmed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import vllm_server as vs
from vllm_server import Server, count_records, needs_vllm, prompt_of

from rewarm.testing.tiny_model import ensure_tiny_model

pytestmark = [
    pytest.mark.server,
    pytest.mark.deep,
    needs_vllm,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]

PROMPT_TOKENS = 2048
TWO_RANKS = ("--tensor-parallel-size", "2")
CORES = sorted(os.sched_getaffinity(0))


def test_two_ranks_recover_and_one_rank_finds_nothing_of_theirs(tmp_path: Path) -> None:
    model = ensure_tiny_model(tmp_path / "model")
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    transfer = vs.transfer_config(root, "--chunk-tokens", "256")
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(2)]
    num_chunks = len(prompts) * PROMPT_TOKENS // 256

    def server(name: str, *flags: str) -> Server:
        # Without it vLLM wants a NUMA node a rank.
        bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2]))} if flags else {}
        return Server(model, tmp_path / f"{name}.log", *flags, transfer=transfer, environment=bind)

    with server("fill", *TWO_RANKS) as filling:
        computed = [filling.ask(prompt) for prompt in prompts]
        filling.wait_for_records(root, 2 * num_chunks)
    vs.drop_page_cache(root)
    with server("recover", *TWO_RANKS) as recovering:
        loaded = [recovering.ask(prompt) for prompt in prompts]
        assert [answer.tokens for answer in loaded] == [answer.tokens for answer in computed]
        assert recovering.metric("rewarm_kv_hit_tokens_total") == len(prompts) * PROMPT_TOKENS
        assert recovering.metric("rewarm_kv_loads_total", outcome="hit") == 2 * num_chunks
    assert count_records(root) == 2 * num_chunks
    print(f"TTFT computed {computed[1].ttft_s:.3f} s, from the volume {loaded[1].ttft_s:.3f} s")
    with server("one") as single:
        alone = single.ask(prompts[0])
        single.wait_for_records(root, 2 * num_chunks + num_chunks // 2)
        assert single.metric("rewarm_kv_hit_tokens_total") == 0
        single.reset_prefix_cache()
        assert single.ask(prompts[0]).tokens == alone.tokens
        assert single.metric("rewarm_kv_hit_tokens_total") == PROMPT_TOKENS
