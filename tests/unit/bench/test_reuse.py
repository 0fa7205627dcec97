"""Reuse traces and what is made of them: files, generators, replays against hand-made cases and against brute force."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from rewarm.bench.report import SCHEMA
from rewarm.bench.reuse.generate import RECIPES, generate
from rewarm.bench.reuse.replay import (
    Asked,
    LeastRecentlyUsed,
    StoreRule,
    VolumeOrder,
    asked_of_tier,
    optimum,
    replay,
)
from rewarm.bench.reuse.run import Plan, open_trace, run
from rewarm.bench.reuse.tiers import RULES, replay_tiers
from rewarm.bench.reuse.trace import BLOCK_TOKENS, Trace, TraceRequest, read_trace, write_trace
from rewarm.errors import DamageError, StorageError, UsageError

# Files


def test_a_line_as_mooncake_publishes_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(
        '{"timestamp": 30535, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]}\n\n'
        '{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353], "more": 1}\n'
    )
    trace = read_trace(path)
    assert (trace.name, trace.seconds, trace.input_tokens) == ("two", pytest.approx(3.053), 2124)
    assert [request.input_blocks for request in trace.requests] == [(46, 47), (46, 47)], "the last block is not full"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 1, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": 2000, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": -1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["x"]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [9223372036854775808]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [true]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [], "output_hash_ids": [-1]}',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": Infinity, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": true, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": "1", "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": %s, "input_length": 1, "output_length": 1, "hash_ids": []}' % ("9" * 400),
        '{"timestamp": 1, "input_length": Infinity, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1e30, "hash_ids": []}',
        "[" * 100_000,
        '"%s"' % ("x" * 1_000_000),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": []}}\n{line}\n')
    with pytest.raises(DamageError, match=r"bad\.jsonl:2") as caught:
        read_trace(path)
    assert caught.value.hint
    assert len(caught.value.message) < 1000
    with pytest.raises(StorageError):
        read_trace(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("kind", RECIPES)
def test_a_generated_trace_reads_back_as_it_was(tmp_path: Path, kind: str) -> None:
    trace = generate(kind, scale=0.02)
    assert trace.requests
    assert trace == generate(kind, scale=0.02)
    assert trace != generate(kind, seed=2, scale=0.02)
    write_trace(trace, tmp_path / f"{kind}.jsonl")
    read = read_trace(tmp_path / f"{kind}.jsonl")
    assert [(one.input_blocks, one.output_blocks) for one in read.requests] == [
        (one.input_blocks, one.output_blocks) for one in trace.requests
    ]


def test_a_generated_chat_has_the_published_proportions() -> None:
    """Turns, prompt length and how soon a context comes back, as the generator's docstring says."""
    trace = generate("chat", scale=0.1)
    assert 6000 < trace.input_tokens / len(trace.requests) < 13_000
    last: dict[int, float] = {}
    gaps = []
    for request in trace.requests:
        gaps += [request.time_s - last[block] for block in request.input_blocks if block in last]
        last |= dict.fromkeys((*request.input_blocks, *request.output_blocks), request.time_s)
    assert 0.7 < sum(gap < 600 for gap in gaps) / len(gaps) < 0.95


def test_a_generated_context_grows_and_shares_its_beginning() -> None:
    trace = generate("agents", scale=0.05)
    assert max(request.input_tokens for request in trace.requests) <= 131_072 + 30_000
    beginnings = {request.input_blocks[:16] for request in trace.requests}
    assert len(beginnings) <= 4
    for request in trace.requests:
        assert len(request.input_blocks) == request.input_tokens // BLOCK_TOKENS
        total = request.input_tokens + request.output_tokens
        assert len(request.input_blocks) + len(request.output_blocks) == total // BLOCK_TOKENS


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="poems"):
        generate("poems")
    with pytest.raises(UsageError, match="poems"):
        run(Plan(traces=("poems",)), command="")


# Replays


def requests(*contexts: tuple[int, ...]) -> list[Asked]:
    made = [TraceRequest(float(n), BLOCK_TOKENS * len(ids), 0, ids) for n, ids in enumerate(contexts)]
    return asked_of_tier(Trace("t", made), memory_blocks=0)


def test_a_prefix_counts_up_to_the_first_gap() -> None:
    tally = replay(requests((1, 2, 3), (1, 2, 4), (5, 2, 3)), LeastRecentlyUsed(), 100)
    assert (tally.hit_blocks, tally.asked_blocks, tally.stored_blocks) == (2, 9, 5)
    assert tally.token_rate == tally.byte_rate == pytest.approx(2 / 9)


def test_what_the_servers_memory_has_is_not_asked_of_the_tier() -> None:
    trace = Trace("t", [TraceRequest(float(n), 3 * BLOCK_TOKENS, 0, (1, 2, n)) for n in range(10, 14)])
    asked = asked_of_tier(trace, memory_blocks=3)
    assert [one.resident for one in asked] == [(), (1, 2), (1, 2), (1, 2)]
    tally = replay(asked, LeastRecentlyUsed(), 100)
    assert (tally.hit_blocks, tally.asked_blocks, tally.stored_blocks) == (0, 6, 6)


def test_the_last_blocks_of_a_context_go_first() -> None:
    for order in (LeastRecentlyUsed(), VolumeOrder()):
        tally = replay(requests((1, 2, 3, 4), (9,), (1, 2, 3, 4)), order, 4)
        assert tally.hit_blocks == 3


@cache
def _best(trace: tuple[tuple[int, ...], ...], kept: frozenset[int], capacity: int) -> int:
    """Most hits that any choice of what to keep can have."""
    if not trace:
        return 0
    ids = trace[0]
    hits = next((n for n, block in enumerate(ids) if block not in kept), len(ids))
    pool = kept | set(ids)
    choices = combinations(sorted(pool), min(capacity, len(pool)))
    return hits + max(_best(trace[1:], frozenset(choice), capacity) for choice in choices)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_beats_the_optimum(seed: int) -> None:
    chance = random.Random(seed)
    beginnings = [(1, 2), (1, 3), (4,)]
    contexts = tuple(chance.choice(beginnings) + ((chance.randrange(5, 8),) * (seed % 2)) for _ in range(7))
    unique = tuple(tuple(hash(ids[: n + 1]) for n in range(len(ids))) for ids in contexts)  # ids name prefixes
    for capacity in (1, 2, 3):
        best = optimum(requests(*unique), capacity).hit_blocks
        assert best == _best(unique, frozenset(), capacity)
        for order in (LeastRecentlyUsed(), VolumeOrder()) if seed % 2 else ():
            names = {block: n for n, block in enumerate(sorted({b for ids in unique for b in ids}))}
            small = requests(*(tuple(names[block] for block in ids) for ids in unique))
            assert replay(small, order, capacity).hit_blocks <= best


def test_store_rules() -> None:
    trace = requests((1, 2), (1, 2), (1, 2), (3,))
    always = replay(trace, VolumeOrder(), 100)
    on_reuse = replay(trace, VolumeOrder(), 100, rule=StoreRule(name="on_reuse"))
    long_ones = replay(trace, VolumeOrder(), 100, rule=StoreRule(name="prompts_over_tokens", min_tokens=1024))
    budget = replay(trace, VolumeOrder(), 100, rule=StoreRule(blocks_per_day=1))
    assert (always.stored_blocks, always.hit_blocks) == (3, 4)
    assert (on_reuse.stored_blocks, on_reuse.hit_blocks) == (2, 2)
    assert (long_ones.stored_blocks, long_ones.hit_blocks) == (2, 4)
    assert (budget.stored_blocks, budget.hit_blocks) == (1, 2)


def test_the_order_is_better_than_fixed_shares_and_close_to_lru_or_above() -> None:
    """What the guide says of chats and documents, on small traces."""
    plan = Plan(traces=("chat", "documents"), scale=0.15, shares=(0.1,), memory_bytes=4 << 30)
    values = {figure.name: figure.value for figure in run(plan, command="").figures}
    for kind in ("chat", "documents"):
        rates = {
            name: values[f"eviction.token_hits.{kind}.10pct@{name}"] for name in ("optimum", "rewarm", "lru", "s3fifo")
        }
        assert rates["optimum"] >= max(rates.values())
        assert rates["rewarm"] >= 0.93 * max(rates["lru"], rates["s3fifo"]), kind
        written = {r: values[f"eviction.written_gb_per_day.{kind}@{r}"] for r in ("always", "on_reuse")}
        assert written["on_reuse"] < written["always"]


def test_the_report_is_of_the_schema() -> None:
    report = run(Plan(traces=("chat",), scale=0.02, shares=(0.2,)), command="rewarm bench eviction")
    document = json.loads(report.to_json())
    assert document["schema"] == SCHEMA
    assert {figure["engine"] for figure in document["figures"]} >= {"optimum", "rewarm", "lru", "on_reuse"}


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1001.0, 1e-12])
@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_a_scale_that_makes_no_trace_is_refused(kind: str, scale: float) -> None:
    with pytest.raises(UsageError) as caught:
        generate(kind, scale=scale)
    assert caught.value.hint


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="not a regular file"):
            open_trace(str(path), seed=1, scale=1.0)
    for name in ("poems", "x" * 5000, "a\0b"):
        with pytest.raises((UsageError, StorageError)) as caught:
            open_trace(name, seed=1, scale=1.0)
        assert len(caught.value.message) < 1000


@pytest.mark.parametrize("lengths", [(511, 511), (0, 0)])
def test_prompts_that_are_shorter_than_a_record_are_refused(tmp_path: Path, lengths: tuple[int, int]) -> None:
    path = tmp_path / "short.jsonl"
    trace = Trace("short", [TraceRequest(float(number), length, 5, ()) for number, length in enumerate(lengths)])
    write_trace(trace, path)
    with pytest.raises(UsageError, match="512 tokens or more"):
        open_trace(str(path), seed=1, scale=1.0)
    with path.open("a") as file:
        file.write('{"timestamp": 9000, "input_length": 512, "output_length": 1, "hash_ids": [7]}\n')
    report = run(Plan(traces=(str(path),), memory_bytes=1 << 30, shares=(0.5,)), command="")
    assert {figure.value for figure in report.figures if figure.name.startswith("eviction.token_hits")} == {0.0}


def asks(*prompts: Sequence[int]) -> list[Asked]:
    """Requests for these blocks, of a server without a memory of its own."""
    return [Asked(time_s=0.0, wanted=p, resident=(), made=(), input_tokens=len(p) * BLOCK_TOKENS) for p in prompts]


@pytest.mark.parametrize(
    ("rule", "expected"), [("when_stored", (3, 0, 1, 0)), ("first_load", (2, 1, 1, 1)), ("second_load", (1, 2, 1, 1))]
)
def test_a_block_is_copied_into_the_host_tier_when_the_rule_says(rule: str, expected: tuple[int, ...]) -> None:
    tally = replay_tiers(asks([1], [1], [1], [1]), 9, 9, copied_at=RULES[rule])
    assert (tally.from_host, tally.from_flash, tally.copied, tally.copy_reads) == expected
    assert tally.host_rate == pytest.approx(expected[0] / 3)
    assert tally.read_rate == pytest.approx((expected[1] + expected[3]) / 3)


def test_a_host_tier_holds_no_more_than_it_may() -> None:
    prompts = [prompt for number in range(20) for prompt in [[2 * number, 2 * number + 1]] * 3]
    assert replay_tiers(asks(*prompts), 100, 40, copied_at=1).from_host == 20 * 2
    again = [*prompts, *prompts]
    assert replay_tiers(asks(*again), 100, 40, copied_at=1).from_host == 20 * 2 * (1 + 3)
    small = replay_tiers(asks(*again), 100, 4, copied_at=1)
    assert small.from_host < 20 * 2 * (1 + 3)
    assert small.from_host + small.from_flash == 20 * 2 * (2 + 3), "flash has all of it"
