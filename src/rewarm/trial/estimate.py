"""How long the rest will take: what each kind of step took so far, and a guess for those not seen yet."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rewarm.trial.schedule import CANARY, FILL, RECOMPUTE, REFERENCE, Step

_GUESS_S = {"start": 60.0, "warm": 10.0, "drain": 3.0, "stop": 8.0, "drop": 0.5, "throttle": 0.1, "choose": 8.0}
_COMPUTED_S, _LOADED_S = 20.0, 2.0


class Estimate:
    """Learns from each step that ends."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._left = list(steps)
        self._seen: dict[tuple[str, bool], list[float]] = {}

    def ended(self, step: Step, took_s: float) -> None:
        """The next step is done."""
        self._seen.setdefault(_kind(step), []).append(took_s)
        self._left.pop(0)

    def left_s(self) -> float:
        """Seconds until the last step ends."""
        return sum(self._of(step) for step in self._left)

    def _of(self, step: Step) -> float:
        seen = self._seen.get(_kind(step))
        if seen:
            return fmean(seen)
        guess = _COMPUTED_S if _is_computed(step) else _LOADED_S
        return _GUESS_S.get(step.kind, guess)


def _kind(step: Step) -> tuple[str, bool]:
    return step.kind, _is_computed(step)


def _is_computed(step: Step) -> bool:
    return step.kind == "block" and (step.arm == RECOMPUTE or step.phase in (FILL, REFERENCE, CANARY))
