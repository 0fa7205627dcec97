"""How many tokens make a chunk, what reports add up to, and what chunks and records are called."""

from __future__ import annotations

import pytest

from rewarm.engine.base import Flow
from rewarm.errors import UsageError
from rewarm.kv.chunks import DEVICE_TARGET_BYTES, HOST_TARGET_BYTES, StepReport, choose_chunk_tokens
from rewarm.kv.keys import chunk_id, group_chunk, shard_key
from rewarm.units import MIB
from rewarm.volume import Outcome


@pytest.mark.parametrize(
    ("block_bytes", "block_tokens", "target", "tokens"),
    [
        (2 * MIB, 128, HOST_TARGET_BYTES, 256),
        (4 * MIB, 16, HOST_TARGET_BYTES, 16),
        (4 * MIB, 16, DEVICE_TARGET_BYTES, 64),
        (3 * MIB, 16, HOST_TARGET_BYTES, 32),
        (9 * MIB, 64, HOST_TARGET_BYTES, 64),
    ],
)
def test_a_chunk_is_the_smallest_power_of_two_of_blocks_that_is_large_enough(
    block_bytes: int, block_tokens: int, target: int, tokens: int
) -> None:
    assert choose_chunk_tokens(block_bytes, block_tokens, target_bytes=target) == tokens


def test_an_asked_chunk_fits_the_block_or_is_refused_with_what_would() -> None:
    def choose(asked: int) -> int:
        return choose_chunk_tokens(2 * MIB, 128, target_bytes=HOST_TARGET_BYTES, asked_tokens=asked)

    assert choose(512) == 512
    with pytest.raises(UsageError, match="not a multiple") as caught:
        choose(300)
    assert "256 or 384" in caught.value.hint
    with pytest.raises(UsageError, match="more than"):
        choose(128 * 1024)


def test_reports_of_ranks_add_up_and_the_worst_outcome_counts() -> None:
    first = StepReport(layouts={0: ("a", 1)}, stored={b"x": 1}, failed={b"f": Outcome.MISS})
    first.add(StepReport(layouts={1: ("b", 2)}, stored={b"x": 1}, put_off={b"y": 1}, failed={b"f": Outcome.IO_ERROR}))
    assert first.layouts == {0: ("a", 1), 1: ("b", 2)}
    assert first.stored == {b"x": 2}
    assert first.put_off == {b"y": 1}
    assert first.failed == {b"f": Outcome.IO_ERROR}


def test_progress_of_ranks_adds_up_and_the_shortest_prefix_counts() -> None:
    first = StepReport(step=3, told_at=7.5, placed={"a": 2}, short={"a": 5}, delivered={"0": Flow(10, 0.5)})
    second = StepReport(step=3, told_at=7.0, placed={"a": 1, "b": 1}, short={"a": 4, "b": 0})
    second.delivered = {"0": Flow(20, 0.25), "1": Flow(1, 1.0)}
    first.add(second)
    assert (first.step, first.num_ranks, first.told_at) == (3, 2, 7.0)
    assert first.placed == {"a": 3, "b": 1}
    assert first.short == {"a": 4, "b": 0}
    assert first.delivered == {"0": Flow(30, 0.75), "1": Flow(1, 1.0)}


def test_keys_tell_hashes_salts_and_ranks_apart_and_are_the_same_everywhere() -> None:
    names = {
        chunk_id(b"\x01" * 32),
        chunk_id(b"\x01" * 32, b"salt"),
        chunk_id(1),
        chunk_id("1"),
        chunk_id(-1),
        shard_key(chunk_id(1), 0),
        shard_key(chunk_id(1), 1),
        shard_key(group_chunk(chunk_id(1), 1), 0),
        shard_key(group_chunk(chunk_id(1), 2), 0),
    }
    assert len(names) == 9
    assert all(len(name) == 32 for name in names)
    # What lies on volumes is called so: a change here makes every stored chunk unreachable.
    chunk = chunk_id(b"block", b"salt")
    assert chunk.hex() == "afe7e60757a52d272e80d26adca1d1b3c443986227b60c01beb6b4fb2c43da46"
    assert group_chunk(chunk, 0) == chunk
    assert group_chunk(chunk, 1).hex() == "95c4abc5147826f8a111aa44e6d92318fc2c7cb03a28ba5423df39ae3792c7da"
    assert shard_key(chunk, 3).hex() == "665cf123a240742a3667848afb78ab5495405468da9e3f6e56fbe5da733a0db7"
