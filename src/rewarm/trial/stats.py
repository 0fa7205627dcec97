"""Statistics of paired blocks: ratios with intervals, the three outcomes, and how many pairs would settle a question.

The unit is a block, never a request: requests of one block share a queue. A pair is one block of each arm with the same
prompts, near in time; its ratio is candidate over baseline. The estimate is the geometric mean of the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import stats

FEW_PAIRS = 12
"""Up to here the interval is Student's t on the logarithms; above it is a BCa bootstrap over pairs."""

MAX_PAIRS_NEEDED = 10_000


class Outcome(str, Enum):
    """Of a gate, and of the whole."""

    PASS = "pass"  # noqa: S105 - the word of a verdict
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of paired ratios and its interval."""

    point: float
    low: float
    high: float
    num_pairs: int
    log_deviation: float
    """Standard deviation of the logarithms; NaN for fewer than two pairs."""


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float], confidence: float) -> Ratio:
    """Candidate over baseline, pair by pair.

    Args:
        candidate: One positive number a pair.
        baseline: As many, in the same order.
        confidence: Of the interval, like 0.95.
    Raises:
        ValueError: No pairs, unequal numbers of them, or a number that is not above 0.
    """
    if not candidate or len(candidate) != len(baseline) or min(*candidate, *baseline) <= 0:
        raise ValueError("a paired ratio needs equally many numbers above 0")
    logs = np.log(np.asarray(candidate, float)) - np.log(np.asarray(baseline, float))
    point = float(np.exp(logs.mean()))
    if len(logs) < 2:
        return Ratio(point, 0.0, math.inf, len(logs), math.nan)
    deviation = float(logs.std(ddof=1))
    if deviation < 1e-12:
        low = high = point
    elif len(logs) <= FEW_PAIRS:
        half = float(stats.t.ppf((1 + confidence) / 2, len(logs) - 1)) * deviation / math.sqrt(len(logs))
        low, high = point * math.exp(-half), point * math.exp(half)
    else:
        interval = stats.bootstrap(
            (logs,), np.mean, confidence_level=confidence, method="BCa", n_resamples=9999, random_state=1
        ).confidence_interval
        low, high = math.exp(interval.low), math.exp(interval.high)
    return Ratio(point, float(low), float(high), len(logs), deviation)


def judge(ratio: Ratio, threshold: float, delta: float, *, at_most: bool) -> Outcome:
    """Whether a ratio meets a threshold.

    Args:
        ratio: What was measured.
        threshold: The ratio must be at most or at least this.
        delta: How far beyond the threshold the interval may reach for a pass, as a share of it.
        at_most: True: small ratios are good.
    """
    if at_most:
        if ratio.point <= threshold and ratio.high < threshold * (1 + delta):
            return Outcome.PASS
        return Outcome.FAIL if ratio.low > threshold else Outcome.INCONCLUSIVE
    if ratio.point >= threshold and ratio.low > threshold * (1 - delta):
        return Outcome.PASS
    return Outcome.FAIL if ratio.high < threshold else Outcome.INCONCLUSIVE


def pairs_needed(ratio: Ratio, threshold: float, delta: float, confidence: float, *, at_most: bool) -> int | None:
    """Pairs that would settle it if the point and the spread stayed as they are; None: no number of them will do.

    A point that meets the threshold needs an interval short enough for a pass, another one for a fail.
    """
    good = ratio.point <= threshold if at_most else ratio.point >= threshold
    beyond = threshold * (1 + delta if at_most else 1 - delta)
    room = abs(math.log(beyond if good else threshold) - math.log(ratio.point))
    if math.isnan(ratio.log_deviation) or room <= 0:
        return None
    for pairs in range(2, MAX_PAIRS_NEEDED + 1):
        if stats.t.ppf((1 + confidence) / 2, pairs - 1) * ratio.log_deviation / math.sqrt(pairs) < room:
            return pairs
    return None


def noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Root mean square of the logarithms of an arm's ratios against itself: the noise of one pair."""
    logs = np.log(np.asarray(second, float)) - np.log(np.asarray(first, float))
    return float(np.sqrt(np.mean(logs**2)))


def more_mismatches(found: int, of: int, noise_found: int, noise_of: int) -> float:
    """Probability of at least so many mismatches if the noise had as many (Fisher, one-sided)."""
    table = [[found, of - found], [noise_found, noise_of - noise_found]]
    return float(stats.fisher_exact(table, alternative="greater").pvalue)
