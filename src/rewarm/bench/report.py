"""The figures of a bench run: ``rewarm.bench/1``.

::

    {"schema": "rewarm.bench/1", "command": "...", "started": "2026-12-01T12:00:00+00:00", "seconds": 312.0,
     "figures": [{"name", "value", "unit", "floor", "peer", "goal", "holds", ...}],
     "environment": {...}, "notes": ["..."]}

``value``, ``floor`` and ``peer`` are medians in ``unit``. ``floor_ratio`` and ``peer_ratio`` are medians of the ratios
of each round, which is not the ratio of the medians. ``holds`` is null where no goal stands for the figure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rewarm.bench.stats import Spread, paired_differences, paired_ratios, spread

SCHEMA = "rewarm.bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity beside its floor and its peer."""

    name: str
    """Dotted: what was done, to what, how; ``kv.read.1MiB.x4``. Part of the interface, as goals.toml names it."""
    value: float
    unit: str
    spread: Spread
    """Of the value over the rounds."""
    engine: str = ""
    """What moved the bytes: io_uring, threads or pure."""
    floor: float | None = None
    floor_ratio: Spread | None = None
    floor_difference: Spread | None = None
    peer: float | None = None
    peer_ratio: Spread | None = None
    goal: str | None = None
    """The goal in words, from goals.toml."""
    holds: bool | None = None
    note: str = ""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """The values behind the medians: ``value``, ``floor`` and ``peer``, one a round."""


def measured(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    floors: Sequence[float] = (),
    peers: Sequence[float] = (),
    peer_ratio: Spread | None = None,
    engine: str = "",
    note: str = "",
) -> Figure:
    """The figure of N rounds; ``floors`` and ``peers`` hold the same rounds or are empty.

    ``peer_ratio`` is given where the peer had a floor of its own in each round, which then cancels out.
    """
    rounds = {"value": list(values), "floor": list(floors), "peer": list(peers)}
    return Figure(
        name=name,
        value=spread(values).median,
        unit=unit,
        spread=spread(values),
        engine=engine,
        floor=spread(floors).median if floors else None,
        floor_ratio=paired_ratios(values, floors) if floors and all(floors) else None,
        floor_difference=paired_differences(values, floors) if floors else None,
        peer=spread(peers).median if peers else None,
        peer_ratio=peer_ratio or (paired_ratios(values, peers) if peers and min(*values, *peers) > 0 else None),
        note=note,
        rounds={side: series for side, series in rounds.items() if series},
    )


@dataclass(slots=True, kw_only=True)
class Report:
    """All figures of a run, and the conditions they were taken under."""

    command: str
    started: str
    """ISO 8601, UTC."""
    seconds: float
    figures: list[Figure]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def shortfalls(self) -> list[Figure]:
        """Figures whose goal does not hold."""
        return [figure for figure in self.figures if figure.holds is False]

    def to_json(self) -> str:
        """The document of the module's docstring, ending in a newline."""
        document = {"schema": SCHEMA, **asdict(self)}
        document["figures"] = [_rounded(asdict(figure)) for figure in self.figures]
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def with_goal(figure: Figure, goal: str, *, holds: bool) -> Figure:
    """The figure, judged."""
    return replace(figure, goal=goal, holds=holds)


def _rounded(node: Any) -> Any:
    """Floats of a JSON tree to six significant digits: more would be noise, and the files are kept."""
    if isinstance(node, dict):
        return {key: _rounded(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_rounded(value) for value in node]
    return float(f"{node:.6g}") if isinstance(node, float) else node
