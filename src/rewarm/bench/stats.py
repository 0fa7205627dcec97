"""Medians and paired ratios of measurements that were taken in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of N values."""

    median: float
    least: float
    greatest: float
    count: int


def spread(values: Iterable[float]) -> Spread:
    """Spread of at least one value."""
    ordered = sorted(values)
    return Spread(median(ordered), ordered[0], ordered[-1], len(ordered))


def paired_ratios(values: Sequence[float], against: Sequence[float]) -> Spread:
    """Spread of ``values[i] / against[i]``: the pair of each round, so that what both suffered from cancels out."""
    return spread(value / base for value, base in zip(values, against, strict=True))


def paired_differences(values: Sequence[float], against: Sequence[float]) -> Spread:
    """Spread of ``values[i] - against[i]``."""
    return spread(value - base for value, base in zip(values, against, strict=True))


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of N values lie: the nearest rank, no interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
