"""How waiting requests are spread over the two lanes: storage, which loads KV, and compute, which makes it.

A pure function of predicted seconds. A request whose prefix is loaded still computes what follows, after the load; all
else may go on at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_PLANNED = 16
"""Waiting requests that are looked at, the oldest first: the others' turn comes when these are under way."""
MAX_TRIED = 5
"""So many requests are spread in every way there is: 32 at most."""
TIE = 0.03
"""Loading goes before computing that is no more than this faster ..."""
LOAD_ALL = 1.1
"""... where it ends no later than this times the best choice: it leaves the device to
others, and many are served sooner."""
MIN_GAIN = 0.02
"""A split has to end this much sooner: predictions are no better."""

_Parts = list[tuple[float, float]]
"""(seconds of loading, seconds of computing) of each request."""


@dataclass(frozen=True, slots=True)
class Job:
    """A waiting request, as a planner sees it."""

    load_s: float
    """To load all of its prefix that is stored."""
    compute_s: float
    """To compute everything that is not resident."""
    tail_s: float
    """To compute what is left when the prefix was loaded."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What both lanes have to do before and besides the waiting requests."""

    storage_s: float
    """Loads that are under way."""
    compute_s: float
    """All computing, what follows on those loads among it."""
    latency_s: float
    """From the last byte of a load until its request can go on; others load meanwhile."""
    rests_end_s: float
    """When what follows on those loads would be computed if nothing else were: each waits for its load."""

    def end_s(self, parts: Iterable[tuple[float, float]]) -> float:
        """When all is done, if requests load and then compute for these (seconds, seconds), in their order."""
        storage_s, compute_s, rests_end_s = self.storage_s, self.compute_s, self.rests_end_s
        for load_s, left_s in parts:
            compute_s += left_s
            if load_s:
                storage_s += load_s
                rests_end_s = max(storage_s + self.latency_s, rests_end_s) + left_s
        return max(compute_s, rests_end_s)


def spread(jobs: Sequence[Job], lanes: Lanes, split: Callable[[int, float], tuple[float, float, float]]) -> list[float]:
    """Choose what each request loads so that the last of them has its KV soonest.

    Of a few requests every choice is tried. Of many, what saves most computing per second of loading goes to storage
    first; the best cut through that order is kept, and single requests change lanes while that helps. At last one
    request may be split.

    Args:
        jobs: N requests in the order in which the server asks for them, and in which storage reads.
        lanes: What else there is to do.
        split: (job, seconds of loading) to (share, seconds of loading, seconds of computing) of the nearest part of
            its prefix that can be loaded in that time.
    Returns:
        N shares: 1 loads all that is stored, 0 loads nothing, what lies between loads that part of the prefix.
    """
    whole = [(job.load_s, job.tail_s) for job in jobs]
    nothing = [(0.0, job.compute_s) for job in jobs]
    if len(jobs) <= MAX_TRIED:
        choices = itertools.product(*zip(nothing, whole, strict=True))
        chosen = list(min(choices, key=lanes.end_s))
    else:
        chosen = _exchange(_cut(jobs, whole, nothing, lanes), whole, nothing, lanes)
    best_s = lanes.end_s(chosen)
    all_s = lanes.end_s(whole)
    if all_s <= min(best_s * LOAD_ALL, lanes.end_s(nothing) * (1 + TIE)):
        return [1.0] * len(jobs)
    shares = [1.0 if part is all_of_it else 0.0 for part, all_of_it in zip(chosen, whole, strict=True)]
    gained_s = best_s * (1 - MIN_GAIN)
    for index in range(len(jobs)):
        # Its load may take as long as the compute lane has other things to do.
        others = [*chosen[:index], *chosen[index + 1 :]]
        free_s = lanes.end_s(others) - lanes.storage_s - sum(load_s for load_s, _ in others)
        share, *part = split(index, free_s)
        if 0 < share < 1:
            end_s = lanes.end_s([*chosen[:index], (part[0], part[1]), *chosen[index + 1 :]])
            if end_s < gained_s:
                gained_s, split_index, split_share = end_s, index, share
    if gained_s < best_s * (1 - MIN_GAIN):
        shares[split_index] = split_share
    return shares


def _cut(jobs: Sequence[Job], whole: _Parts, nothing: _Parts, lanes: Lanes) -> _Parts:
    """The best of the choices that load what gains most."""
    parts = best = nothing
    best_s = lanes.end_s(nothing)
    for index in sorted(range(len(jobs)), key=lambda i: _value(jobs[i]), reverse=True):
        parts = [*parts[:index], whole[index], *parts[index + 1 :]]
        end_s = lanes.end_s(parts)
        if end_s < best_s:
            best, best_s = parts, end_s
    return best


def _exchange(best: _Parts, whole: _Parts, nothing: _Parts, lanes: Lanes) -> _Parts:
    """Move single requests to the other lane while the end comes sooner."""
    best_s = lanes.end_s(best)
    for index in range(len(best)):
        other = nothing[index] if best[index] is whole[index] else whole[index]
        tried = [*best[:index], other, *best[index + 1 :]]
        end_s = lanes.end_s(tried)
        if end_s < best_s:
            best, best_s = tried, end_s
    return best


def lane_ends_s(busy_s: float, jobs: Sequence[tuple[float, float]]) -> list[float]:
    """When each job is computed, if a server takes the oldest that is ready whenever it has none.

    Args:
        busy_s: When it has none for the first time.
        jobs: N times (seconds until ready, seconds to compute), the oldest first.
    """
    ends = [0.0] * len(jobs)
    left = list(range(len(jobs)))
    now_s = busy_s
    while left:
        index = next((i for i in left if jobs[i][0] <= now_s), None)
        if index is None:
            index = min(left, key=lambda i: jobs[i][0])
        left.remove(index)
        ready_s, own_s = jobs[index]
        ends[index] = now_s = max(now_s, ready_s) + own_s
    return ends


def _value(job: Job) -> float:
    """Seconds of computing that a second of loading saves."""
    return (job.compute_s - job.tail_s) / job.load_s if job.load_s > 0 else float("inf")
