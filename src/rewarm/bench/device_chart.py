"""The waterfall of loads as a picture: one bar a step, the link's floor as a line across each load."""

from __future__ import annotations

from pathlib import Path

from rewarm.bench.canvas import canvas_type, check_svg
from rewarm.bench.report import Figure, Report

_WHOLE, _PART, _FLOOR = "#0b6e4f", "#a9d6c3", "#c2410c"
_BETWEEN = {"last_read": "first_read"}
"""A part's bar begins where this one ends; others begin with the load."""
_WORDS = {
    "returned": "the call returned",
    "last_read": "chunks read and checked, first to last",
    "in_place": "last chunk in place",
    "queueing": "queueing copies, in all",
}


def write_chart(report: Report, path: Path) -> None:
    """Draw the times of a report as SVG.

    Raises:
        UnsupportedError: matplotlib is not installed.
        UsageError: The path does not end in .svg.
    """
    check_svg(path)
    canvas_class = canvas_type()
    bars = [bar for figure in report.figures if (bar := _bar(figure, report.figures))]
    canvas = canvas_class(figsize=(8.0, 1.2 + 0.3 * len(bars)), layout="constrained")
    axes = canvas.add_subplot()
    for position, (_, begin, figure) in enumerate(bars):
        is_part = figure.name.count(".") > "kv.device.load.x1".count(".")
        axes.barh(position, figure.value - begin, 0.7, left=begin, color=_PART if is_part else _WHOLE)
        axes.plot((figure.spread.least, figure.spread.greatest), (position,) * 2, color="#202020", linewidth=0.8)
        if figure.floor is not None:
            label = "_" if position else "link: a plain copy of as many bytes"
            span = (position - 0.5, position + 0.5)
            axes.plot((figure.floor,) * 2, span, color=_FLOOR, linewidth=1.8, label=label)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms; bars: medians, thin lines: min to max of the rounds; lower is better", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(loc="outside lower center", frameon=False, fontsize=9)
    canvas.savefig(path, format="svg")


def _bar(figure: Figure, figures: list[Figure]) -> tuple[str, float, Figure] | None:
    """(label, where it begins, figure); None: no time of its own."""
    name = figure.name.removeprefix("kv.device.")
    load, _, part = name.rpartition(".")
    if figure.unit != "ms" or part in _BETWEEN.values():
        return None
    begin = next((other.value for other in figures if other.name == f"kv.device.{load}.{_BETWEEN.get(part)}"), 0.0)
    words = f"request {part}" if part.isdigit() else _WORDS.get(part)
    return f"{load}: {words}" if words else name, begin, figure
