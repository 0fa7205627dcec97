"""Groups of requests on a server like an H200, with a disk, a slower one, or memory: named, to be followed over time.

Its rates are those measured there (docs/guides/vllm.md): 16,384 tokens of 64 layers, 4.295 GB, compute in 1.9 s. The
smaller model has a quarter of the weights and half of the KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rewarm.bench.policy.replay import replay_policy
from rewarm.bench.policy.server import Clock, Outcome, Server
from rewarm.bench.policy.world import Machine, Prompt

LARGE = Machine(
    root_bytes_a_s=(2.3e9,),
    shares=(1.0,),
    base_s=0.02,
    token_s=8.5e-5,
    pair_s=8.5e-5 / 24576,
    chunk_tokens=256,
    chunk_bytes=67_108_864,
    step_tokens=8192,
    load_overhead_s=0.01,
    steps_in_flight=2,
    launch_s=0.003,
    ring_chunks=8,
    decode_tokens=16,
)
SMALL = replace(LARGE, base_s=0.012, token_s=2.2e-5, pair_s=1.7e-9, chunk_tokens=512)
STORAGE = {"disk": 2.3e9, "slow_disk": 1.87e9, "tmpfs": 40e9}
"""Bytes a second: loading a context by itself is a tie with computing, a fifth slower, and eighteen times faster."""
GAPS_MS = (0, 1, 5, 20)
"""From one arrival to the next."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A group of requests on a machine, and what became of it under ``auto`` and under ``never``."""

    name: str
    storage: str
    auto_s: float
    """Until the last prompt was there."""
    compute_s: float
    floor_s: float
    """What both lanes need at least for all, without a gap."""
    num_loaded: int
    num_requests: int


def scenes() -> Iterator[Scene]:
    """All of them."""
    for storage, bytes_a_s in STORAGE.items():
        large, small = (replace(machine, root_bytes_a_s=(bytes_a_s,)) for machine in (LARGE, SMALL))
        yield _play(f"{storage}.32b.1x16384", storage, large, 1, 16384, 0)
        for gap_ms in GAPS_MS:
            yield _play(f"{storage}.32b.4x16384.{gap_ms}ms", storage, large, 4, 16384, gap_ms)
        limited = replace(large, prefill_limit=8128)
        yield _play(f"{storage}.32b.4x16384.20ms_limit", storage, limited, 4, 16384, 20)
        for name, machine in (("32b", large), ("8b", small)):
            for gap_ms in (0, 1):
                yield _play(f"{storage}.{name}.16x8192.{gap_ms}ms", storage, machine, 16, 8192, gap_ms)


def _play(name: str, storage: str, machine: Machine, count: int, num_tokens: int, gap_ms: int) -> Scene:
    num_chunks = num_tokens // machine.chunk_tokens
    prompts = [Prompt(f"p{number:02}", number * gap_ms / 1000, num_tokens, num_chunks) for number in range(count)]
    auto, never = (serve(machine, policy, prompts) for policy in ("auto", "never"))
    alone_s = serve(machine, "never", prompts[:1]).makespan_s(prompts[:1])
    load_s = num_chunks * machine.chunk_bytes / machine.root_bytes_a_s[0]
    num_loaded = sum(decision.num_load_tokens > 0 for decision in auto.decisions)
    floor_s = count / (1 / alone_s + 1 / load_s)
    return Scene(name, storage, auto.makespan_s(prompts), never.makespan_s(prompts), floor_s, num_loaded, count)


def serve(machine: Machine, policy: str, prompts: list[Prompt]) -> Outcome:
    """Prompts on a machine under a policy that knows its rates."""
    clock = Clock()
    clock.now_s = prompts[0].arrival_s
    return Server(machine, replay_policy(machine, policy, clock), clock).run(prompts)
