"""How waiting requests are spread over storage and compute."""

from __future__ import annotations

import itertools
import random

import pytest

from rewarm.kv.plan import LOAD_ALL, MAX_TRIED, TIE, Job, Lanes, lane_ends_s, spread

IDLE = Lanes(0.0, 0.0, 0.0, 0.0)


def no_split(_index: int, _seconds: float) -> tuple[float, float, float]:
    return 0.0, 0.0, 0.0


def linear_split(jobs: list[Job], steps: int = 64):  # type: ignore[no-untyped-def]
    def split(index: int, seconds: float) -> tuple[float, float, float]:
        job = jobs[index]
        share = min(1.0, max(0.0, int(seconds / job.load_s * steps) / steps))
        return share, share * job.load_s, job.compute_s + share * (job.tail_s - job.compute_s)

    return split


def test_one_request_takes_the_faster_lane() -> None:
    assert spread([Job(1.0, 2.0, 0.1)], IDLE, no_split) == [1.0]
    assert spread([Job(2.0, 2.0, 0.1)], IDLE, no_split) == [0.0]
    assert spread([], IDLE, no_split) == []


def test_what_the_lanes_have_to_do_counts() -> None:
    job = [Job(1.0, 2.0, 0.1)]
    assert spread(job, Lanes(2.0, 0.0, 0.0, 2.0), no_split) == [0.0]
    assert spread([Job(2.0, 1.0, 0.1)], Lanes(0.0, 3.0, 0.0, 0.0), no_split) == [1.0]


def test_four_equal_ones_use_both_lanes() -> None:
    jobs = [Job(2.3, 1.89, 0.03)] * 4
    shares = spread(jobs, IDLE, no_split)
    assert sum(shares) == 2
    end_s = IDLE.end_s([(2.3, 0.03) if share else (0.0, 1.89) for share in shares])
    assert end_s < 0.7 * 4 * 1.89


def test_a_request_is_split_where_that_ends_sooner() -> None:
    jobs = [Job(3.0, 2.0, 0.0)] * 2
    nothing, part = sorted(spread(jobs, IDLE, linear_split(jobs)))
    assert nothing == 0
    assert part == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize("seed", range(30))
def test_few_are_spread_as_well_as_can_be_and_many_nearly(seed: int) -> None:
    rng = random.Random(seed)
    for count in (MAX_TRIED, MAX_TRIED + 3):
        jobs = [Job(rng.uniform(0.1, 3), compute := rng.uniform(0.2, 3), compute * rng.random()) for _ in range(count)]
        lanes = Lanes(rng.random(), 1 + rng.random(), 0.01, rng.random())

        def end_s(shares: list[float], jobs: list[Job] = jobs, lanes: Lanes = lanes) -> float:
            return lanes.end_s(
                [(j.load_s, j.tail_s) if share else (0.0, j.compute_s) for j, share in zip(jobs, shares, strict=True)]
            )

        best = min(end_s(list(shares)) for shares in itertools.product((0.0, 1.0), repeat=count))
        chosen = end_s(spread(jobs, lanes, no_split))
        if chosen == end_s([1.0] * count):
            assert chosen <= best * LOAD_ALL
            assert chosen <= end_s([0.0] * count) * (1 + TIE)
        else:
            assert chosen <= best * (1.0 + 1e-9 if count <= MAX_TRIED else 1.12)
        assert chosen <= min(end_s([0.0] * count), end_s([1.0] * count))


def test_a_lane_takes_the_oldest_that_is_ready() -> None:
    assert lane_ends_s(1.0, [(0.0, 1.0), (0.0, 1.0)]) == [2.0, 3.0]
    assert lane_ends_s(0.0, [(5.0, 1.0), (0.0, 2.0), (1.0, 2.0)]) == [6.0, 2.0, 4.0]
    assert lane_ends_s(0.0, []) == []
