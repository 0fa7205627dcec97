from __future__ import annotations

import math
import random

import pytest

from rewarm.trial.stats import Outcome, Ratio, judge, more_mismatches, noise, paired_ratio, pairs_needed


def test_the_interval_of_few_pairs_is_students_t_on_logarithms() -> None:
    # Logarithms -0.1, 0, 0.1: mean 0, deviation 0.1; t(0.975, 2) = 4.302653 (tables), half width 0.248414.
    ratio = paired_ratio([math.exp(-0.1), 1.0, math.exp(0.1)], [1.0, 1.0, 1.0], 0.95)
    assert ratio.point == pytest.approx(1.0)
    assert math.log(ratio.high) == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert math.log(ratio.low) == pytest.approx(-math.log(ratio.high))


def test_many_pairs_are_bootstrapped_and_agree_with_the_normal_interval() -> None:
    draw = random.Random(4)
    logs = [draw.gauss(-0.3, 0.1) for _ in range(200)]
    ratio = paired_ratio([math.exp(each) for each in logs], [1.0] * 200, 0.95)
    assert math.log(ratio.high / ratio.low) == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(200), rel=0.15)
    assert ratio.low < math.exp(-0.3) < ratio.high


def test_the_same_pairs_give_the_same_interval() -> None:
    candidate = [0.7 + 0.01 * index for index in range(20)]
    assert paired_ratio(candidate, [1.0] * 20, 0.95) == paired_ratio(candidate, [1.0] * 20, 0.95)


def test_one_pair_has_a_point_and_no_bounds() -> None:
    ratio = paired_ratio([1.0], [2.0], 0.95)
    assert (ratio.point, ratio.low, ratio.high) == (0.5, 0.0, math.inf)


def test_equal_pairs_have_a_width_of_0() -> None:
    ratio = paired_ratio([1.0, 2.0], [2.0, 4.0], 0.95)
    assert ratio.low == ratio.high == ratio.point == 0.5


@pytest.mark.parametrize(("candidate", "baseline"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_what_is_no_pair_is_refused(candidate: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio(candidate, baseline, 0.95)


def of(low: float, point: float, high: float) -> Ratio:
    return Ratio(point, low, high, 8, 0.1)


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [
        (of(0.60, 0.70, 0.78), Outcome.PASS),
        (of(0.60, 0.70, 0.80), Outcome.INCONCLUSIVE),  # beyond 0.75 * 1.05
        (of(0.74, 0.76, 0.78), Outcome.INCONCLUSIVE),
        (of(0.76, 0.80, 0.84), Outcome.FAIL),
    ],
)
def test_at_most(ratio: Ratio, outcome: Outcome) -> None:
    assert judge(ratio, 0.75, 0.05, at_most=True) is outcome


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [
        (of(1.25, 1.35, 1.45), Outcome.PASS),
        (of(1.20, 1.35, 1.50), Outcome.INCONCLUSIVE),
        (of(1.10, 1.20, 1.30), Outcome.INCONCLUSIVE),
        (of(1.10, 1.15, 1.20), Outcome.FAIL),
    ],
)
def test_at_least(ratio: Ratio, outcome: Outcome) -> None:
    assert judge(ratio, 1.29, 0.05, at_most=False) is outcome


def test_pairs_needed_makes_the_interval_just_short_enough() -> None:
    ratio = Ratio(0.70, 0.60, 0.82, 8, 0.2)
    needed = pairs_needed(ratio, 0.75, 0.05, 0.95, at_most=True)
    assert needed is not None
    # log(0.7875 / 0.70) = 0.1178; 1.98 * 0.2 / sqrt(n) < 0.1178 for n = 14 with Student's t.
    assert needed == 14


def test_no_number_of_pairs_settles_a_point_on_the_threshold() -> None:
    assert pairs_needed(of(0.7, 0.75, 0.8), 0.75, 1e-18, 0.95, at_most=True) is None
    assert pairs_needed(Ratio(0.7, 0, math.inf, 1, math.nan), 0.75, 0.05, 0.95, at_most=True) is None


def test_noise_is_that_of_one_pair() -> None:
    assert noise([1.0, 1.0], [math.exp(0.1), math.exp(-0.1)]) == pytest.approx(0.1)


def test_mismatches_against_noise() -> None:
    assert more_mismatches(0, 100, 0, 10) == 1.0
    assert more_mismatches(5, 5, 0, 5) == pytest.approx(1 / math.comb(10, 5))
