"""One line in the server's log for a load that took too long, with where its time went."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rewarm.kv.chunks import LoadTimes
from rewarm.kv.policy import Decision
from rewarm.metrics import LOAD_PARTS
from rewarm.units import format_size

logger = logging.getLogger("vllm.rewarm")

SLOW_S = 1.0
"""A load below is never slow: what it costs is seen in the metrics."""
SLOW_RATIO = 2.0
"""Twice as long as predicted: predictions are some percent off, half at worst."""
SAY_EVERY_S = 10.0


def is_slow(decision: Decision) -> bool:
    """Whether a load that has ended took twice its prediction, or longer than computing was to take; over a second."""
    load_s, compute_s = decision.load_s, decision.predicted_compute_s
    if load_s is None or load_s <= SLOW_S:
        return False
    is_late = decision.predicted_load_s is not None and load_s > SLOW_RATIO * decision.predicted_load_s
    return is_late or (compute_s is not None and load_s > compute_s)


class SlowLoads:
    """Says so, but no more often than each SAY_EVERY_S."""

    def __init__(self, root_name: Callable[[str], str], clock: Callable[[], float]) -> None:
        """
        Args:
            root_name: What to call a root, from its root_id.
            clock: Seconds, never backwards.
        """
        self._root_name = root_name
        self._clock = clock
        self._said_at = float("-inf")
        self._num_unsaid = 0

    def ended(self, decision: Decision, times: LoadTimes) -> bool:
        """A load has ended; returns whether it was slow."""
        if not is_slow(decision):
            return False
        now = self._clock()
        if now - self._said_at < SAY_EVERY_S:
            self._num_unsaid += 1
            return True
        more = f"; {self._num_unsaid} more since the last such line" if self._num_unsaid else ""
        self._said_at, self._num_unsaid = now, 0
        logger.info("Rewarm: %s%s", describe(decision, times, self._root_name), more)
        return True


def describe(decision: Decision, times: LoadTimes, root_name: Callable[[str], str]) -> str:
    """All that is known of a slow load, in one line."""
    places = ", ".join(
        f"{root_name(root_id)} ({format_size(num_bytes)})" for root_id, num_bytes in sorted(times.root_bytes.items())
    )
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in zip(LOAD_PARTS, times.parts, strict=True))
    return (
        f"slow load of request {decision.request_id}: {decision.load_s:.3f} s for {decision.num_load_tokens} tokens, "
        f"{format_size(sum(times.root_bytes.values()))} from {places or 'no root'}; seconds: "
        f"admission {decision.waited_s:.3f}, {parts}; predicted: load {_seconds(decision.predicted_load_s)}, "
        f"compute {_seconds(decision.predicted_compute_s)}"
    )


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
