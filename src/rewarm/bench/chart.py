"""A bench's rates as a picture: one group of bars a figure, the floor as a line across each group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rewarm.bench.canvas import canvas_type, check_svg
from rewarm.bench.report import Figure, Report
from rewarm.engine import ENGINE_KINDS
from rewarm.errors import UsageError

_OURS, _OTHERS = "#0b6e4f", ("#5fb08f", "#a9d6c3")
_PEER, _WITNESS, _FLOOR = "#8a8a8a", "#c9c9c9", "#c2410c"


def write_chart(report: Report, path: Path) -> None:
    """Draw the rates of a report as SVG.

    Raises:
        UnsupportedError: matplotlib is not installed.
        UsageError: The report has no rates, or the path does not end in .svg.
    """
    check_svg(path)
    groups = _groups(report.figures)
    if not groups:
        raise UsageError("nothing to draw: the report has no rates", hint="leave --chart out")
    canvas_class = canvas_type()
    canvas = canvas_class(figsize=(max(6.0, 1.1 * len(groups)), 4.6), layout="constrained")
    axes = canvas.add_subplot()
    labelled: set[str] = set()

    def label_once(text: str) -> str:
        fresh = text not in labelled
        labelled.add(text)
        return text if fresh else "_" + text

    for position, group in enumerate(groups):
        bars = _bars(group)
        width = 0.8 / len(bars)
        for number, (label, color, rate, low, high) in enumerate(bars):
            left = position - 0.4 + (number + 0.5) * width
            axes.bar(left, rate, width * 0.92, color=color, label=label_once(label))
            if high > low:
                axes.plot((left, left), (low, high), color="#202020", linewidth=0.8)
        if group[0].floor is not None:
            span = (position - 0.42, position + 0.42)
            axes.plot(span, (group[0].floor,) * 2, color=_FLOOR, linewidth=1.8, label=label_once("floor"))
    axes.set_xticks(range(len(groups)), [group[0].name.removeprefix("kv.").replace(".", "\n") for group in groups])
    axes.set_ylabel("GiB/s")
    axes.set_title("Bars: medians, thin lines min to max of the rounds; higher is better", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    canvas.savefig(path, format="svg")


def _groups(figures: Sequence[Figure]) -> list[list[Figure]]:
    """Rates by figure name without the engine, the engine that ``auto`` chose first."""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.unit == "GiB/s":
            groups.setdefault(figure.name.partition("@")[0], []).append(figure)
    return list(groups.values())


def _bars(group: Sequence[Figure]) -> list[tuple[str, str, float, float, float]]:
    """(label, colour, median, least, greatest) of each bar of a group."""
    bars = []
    for number, figure in enumerate(group):
        if figure.engine in ENGINE_KINDS:
            label, color = f"rewarm {figure.engine}", _OTHERS[(number - 1) % len(_OTHERS)] if number else _OURS
        else:
            label, color = figure.engine.replace("_", " "), _WITNESS
        bars.append((label, color, figure.value, figure.spread.least, figure.spread.greatest))
    peers = group[0].rounds.get("peer")
    if group[0].peer is not None and peers:
        bars.append(("vLLM fs tier", _PEER, group[0].peer, min(peers), max(peers)))
    return bars
