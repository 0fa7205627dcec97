"""Turns taken alternately, so that what the machine does meanwhile meets every side alike.

Each turn stands between two turns of the base (the floor): base, A, base, B, base. Its partner is the mean of the two.
A shared device changes its rate from one second to the next, so a turn counts only if its two base turns agree within
``STEADY``; else it is repeated, at most ``TRIES`` times. The rule looks at the base alone and is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rewarm.bench.arms import Turn

STEADY = 1.15
"""Greatest ratio of the two base turns. 1.15 keeps most turns on a VM whose disk halves its rate for seconds."""
TRIES = 4

Take = Callable[[], Turn]


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn and the base turns before and after it."""

    turn: Turn
    before: Turn
    after: Turn

    @property
    def steady(self) -> bool:
        """Whether the base turns agree."""
        slow, fast = sorted((self.before.seconds, self.after.seconds))
        return fast <= STEADY * slow

    @property
    def base_gib_s(self) -> float:
        """Mean rate of the base turns."""
        return (self.before.gib_s + self.after.gib_s) / 2

    @property
    def base_seconds(self) -> float:
        """Mean time of the base turns."""
        return (self.before.seconds + self.after.seconds) / 2

    @property
    def base_cpu_s_per_gb(self) -> float:
        """Mean CPU time of the base turns for 10^9 bytes."""
        return (self.before.cpu_s_per_gb + self.after.cpu_s_per_gb) / 2

    @property
    def rate_ratio(self) -> float:
        """Rate over the base's."""
        return self.turn.gib_s / self.base_gib_s


@dataclass(slots=True)
class Rounds:
    """R rounds: one Pair a side in each."""

    pairs: list[dict[str, Pair]] = field(default_factory=list)
    repeated: int = 0
    """Turns taken again because their base turns disagreed."""
    unsteady: int = 0
    """Turns kept although they did, after ``TRIES``."""

    def of(self, side: str) -> list[Pair]:
        """A side's pairs, round by round."""
        return [pairs[side] for pairs in self.pairs]


def alternate(
    base: Take, sides: Mapping[str, Take], *, rounds: int, step: Callable[[str], None] = lambda _: None
) -> Rounds:
    """Take every side's turn in each round, the order shifted by one from round to round.

    Args:
        base: Takes a turn of the base.
        sides: Name to what takes its turn.
        rounds: R, at least 1.
        step: Called with the side's name after each turn that is kept.
    """
    taken = Rounds()
    before = base()
    for number in range(rounds):
        pairs: dict[str, Pair] = {}
        for name in _rotated(list(sides), number):
            for attempt in range(1, TRIES + 1):
                pair = Pair(sides[name](), before, base())
                before = pair.after
                if pair.steady or attempt == TRIES:
                    break
                taken.repeated += 1
            taken.unsteady += not pair.steady
            pairs[name] = pair
            step(name)
        taken.pairs.append(pairs)
    return taken


def _rotated(names: Sequence[str], by: int) -> Sequence[str]:
    cut = by % len(names) if names else 0
    return [*names[cut:], *names[:cut]]
