"""Hit rates over the capacity as a picture: one panel a trace, one line an order."""

from __future__ import annotations

import re
from pathlib import Path

from rewarm.bench.canvas import canvas_type, check_svg
from rewarm.bench.report import Report

_LINES = {
    "optimum": ("offline optimum (Belady)", "#c2410c", "--"),
    "rewarm": ("rewarm", "#0b6e4f", "-"),
    "lru": ("LRU", "#5a5a5a", "-"),
    "s3fifo": ("S3-FIFO, small queue a tenth (before)", "#9a9a9a", "-"),
    "whole_prefix": ("rewarm, a use counts for the whole prefix", "#5fb08f", ":"),
}
_NAME = re.compile(r"eviction\.token_hits\.(?P<trace>.+)\.(?P<percent>[0-9.]+)pct@(?P<order>\w+)")


def write_chart(report: Report, path: Path) -> None:
    """Draw the token hit rates of a report as SVG.

    Raises:
        UnsupportedError: matplotlib is not installed.
        UsageError: The path does not end in .svg.
    """
    check_svg(path)
    canvas_class = canvas_type()
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for figure in report.figures:
        if found := _NAME.fullmatch(figure.name):
            lines = panels.setdefault(found["trace"], {})
            lines.setdefault(found["order"], []).append((float(found["percent"]), figure.value))
    canvas = canvas_class(figsize=(3.2 * len(panels), 3.6), layout="constrained")
    for number, (trace, lines) in enumerate(panels.items(), 1):
        axes = canvas.add_subplot(1, len(panels), number)
        for order, points in lines.items():
            label, color, style = _LINES[order]
            axes.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=3, label=label)
        axes.set_xscale("log")
        ticks = [percent for percent, _ in next(iter(lines.values()))]
        axes.set_xticks(ticks, [f"{percent:g} %" for percent in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(trace, fontsize=10)
        axes.set_xlabel("volume, of the trace's bytes", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if number == 1:
            axes.set_ylabel("tokens loaded, % of those asked", fontsize=9)
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    canvas.savefig(path, format="svg")
