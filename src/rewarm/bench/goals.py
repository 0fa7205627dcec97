"""Goals of the benches: goals.toml beside this file, one table a bench and figure name.

::

    [kv."kv.read.1MiB.x1"]
    floor_ratio_at_least = 0.95
    why = "One cold request of 256 MiB ..."

Bounds: ``at_least`` and ``at_most`` on the value, ``floor_ratio_at_least``, ``floor_ratio_at_most``,
``above_floor_at_most``, ``peer_ratio_at_least`` on the medians over rounds. All bounds of a table must hold;
``or_share_of_floor_at_most`` is a second way to keep ``at_most``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarm.bench.report import Figure, with_goal
from rewarm.errors import RewarmError, UsageError
from rewarm.inputs import read_input
from rewarm.units import MIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GOALS_FILE = Path(__file__).with_name("goals.toml")
"""The project's own; ``bench/goals.toml`` of a clone is a link to it."""

MAX_BYTES = MIB

BENCHES = ("kv", "device", "scale", "policy")
"""Kinds of bench that goals may stand for; what one of them does not measure is not missed in the other."""

Goals = Mapping[str, Mapping[str, Any]]
"""Figure name to its bounds."""

_BOUNDS = (
    "at_least",
    "at_most",
    "or_share_of_floor_at_most",
    "floor_ratio_at_least",
    "floor_ratio_at_most",
    "above_floor_at_most",
    "peer_ratio_at_least",
)


def read_goals(path: Path, bench: str) -> Goals:
    """Goals of one bench; a file may have none for it.

    Args:
        path: The file; all of it is checked.
        bench: One of BENCHES.
    Raises:
        UsageError: Not readable, not TOML, or a bench or a bound of a name that does not exist.
    """
    try:
        document: dict[str, Any] = tomllib.loads(read_input(str(path), MAX_BYTES).decode())
    except (RewarmError, ValueError, RecursionError) as problem:
        raise UsageError(
            f"cannot read the goals in {path}: {problem}",
            hint="TOML like rewarm/bench/goals.toml; or leave --goals out",
        ) from problem
    for name, goals in document.items():
        if name not in BENCHES or not isinstance(goals, dict):
            raise UsageError(f"{path}: {name} is no bench with goals", hint=f"benches: {', '.join(BENCHES)}")
        for figure, table in goals.items():
            unknown = set(table) - {*_BOUNDS, "why"} if isinstance(table, dict) else {"a value outside of a table"}
            if unknown:
                bounds = f"bounds: {', '.join(_BOUNDS)}"
                raise UsageError(f"{path}: {figure} has {', '.join(sorted(unknown))}", hint=bounds)
    found: Goals = document.get(bench, {})
    return found


def judge(figures: list[Figure], goals: Goals) -> list[Figure]:
    """The figures, each with its goal and whether it holds, in the same order."""
    return [_judge_one(figure, goals.get(figure.name)) for figure in figures]


def unmeasured(figures: list[Figure], goals: Goals) -> list[str]:
    """Names of goals that no figure answers."""
    return sorted(set(goals) - {figure.name for figure in figures})


def _judge_one(figure: Figure, table: Mapping[str, Any] | None) -> Figure:
    if table is None:
        return figure
    words: list[str] = []
    verdicts: list[bool] = []

    def bound(key: str, found: float | None, text: str, *, least: bool) -> bool | None:
        if key not in table:
            return None
        words.append(f"{'>=' if least else '<='} {table[key]:g}{text}")
        return found is not None and (found >= table[key] if least else found <= table[key])

    def add(verdict: bool | None) -> None:
        if verdict is not None:
            verdicts.append(verdict)

    add(bound("at_least", figure.value, f" {figure.unit}", least=True))
    at_most = bound("at_most", figure.value, f" {figure.unit}", least=False)
    share = figure.value / figure.floor if figure.floor else None
    or_share = bound("or_share_of_floor_at_most", share, " of the floor", least=False)
    add(at_most if or_share is None else bool(at_most) or or_share)
    ratio = figure.floor_ratio.median if figure.floor_ratio else None
    add(bound("floor_ratio_at_least", ratio, " of the floor", least=True))
    add(bound("floor_ratio_at_most", ratio, " of the floor", least=False))
    above = figure.floor_difference.median if figure.floor_difference else None
    add(bound("above_floor_at_most", above, f" {figure.unit} above the floor", least=False))
    peer = figure.peer_ratio.median if figure.peer_ratio else None
    add(bound("peer_ratio_at_least", peer, " of the peer", least=True))
    joint = " or " if or_share is not None else " and "
    return with_goal(figure, joint.join(words), holds=all(verdicts))
