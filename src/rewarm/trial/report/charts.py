"""The charts of a report, as SVG text that is the same for the same events."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from rewarm.trial.blocks import Block, of
from rewarm.trial.gates import NAMES
from rewarm.trial.schedule import FS, FS_LIMITED, NOISE, RECOMPUTE, RECOVER, RESTART, REWARM

COLORS = {RECOMPUTE: "#777777", FS: "#0072b2", FS_LIMITED: "#56b4e9", REWARM: "#d55e00"}
"""Apart for colour-blind readers too; the order of the legend is the order here."""

_STYLE = {
    "svg.fonttype": "none",  # text stays text: small, sharp, and the page's own font
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
}
_BIN_S = 0.1


def _svg(name: str, draw: Callable[[Figure], None], height: float = 3.6) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Without the XML head, and as wide as its place on the page.
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def ttft_distribution(blocks: Sequence[Block]) -> str:
    """Share of requests answered within a time, one curve an arm."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for arm, color in COLORS.items():
            ttft_s = [request.ttft_s for block in of(blocks, RECOVER, arm) for request in block.requests]
            if ttft_s:
                axes.ecdf(ttft_s, label=NAMES[arm], color=color, linewidth=2)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="time to first token, s (log)", ylabel="share of requests", ylim=(0, 1.02))
        if axes.lines:
            axes.legend(loc="lower right")

    return _svg("ttft", draw)


def gate_intervals(gates: Sequence[Mapping[str, Any]]) -> str:
    """Each measured gate: its ratio with the interval, relative to the threshold; nothing when none was measured."""
    measured = [gate for gate in gates if gate["point"]]
    if not measured:
        return ""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, gate in enumerate(measured):
            flip = gate["name"] == "g3_throughput"
            low, high = gate["low"] or gate["point"], gate["high"] or gate["point"]
            ends = [value / gate["limit"] for value in (low, gate["point"], high)]
            low, point, high = (1 / ends[2], 1 / ends[1], 1 / ends[0]) if flip else ends
            color = {"pass": "#1a7f37", "fail": "#b42318"}.get(gate["outcome"], "#9a6700")
            axes.plot([low, high], [row, row], color=color, linewidth=3, solid_capstyle="butt")
            axes.plot([point], [row], "o", color=color, markersize=8)
        axes.axvline(1, color="#222222", linewidth=1.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in _MARKS else ""))
        axes.set_yticks(range(len(measured)), [gate["name"] for gate in measured])
        axes.set_ylim(len(measured) - 0.5, -0.5)
        axes.set_xlabel("ratio relative to the threshold (log): left of 1 meets it")

    return _svg("gates", draw, height=1.2 + 0.5 * len(measured))


_MARKS = (0.2, 0.5, 0.8, 1.2, 1.5, 2, 5)


def read_timeline(blocks: Sequence[Block]) -> str:
    """Bytes a second read by each arm's server, block after block; time between blocks is left out."""
    phases = (RESTART, NOISE, RECOVER)
    shown = [block for block in blocks if block.phase in phases and block.arm != RECOMPUTE and block.samples]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        seen: set[str] = set()
        at_s = 0.0
        for block in shown:
            edges, rates = _rates(block)
            label = "" if block.arm in seen else NAMES[block.arm]
            seen.add(block.arm)
            axes.stairs(rates, [at_s + edge for edge in edges], fill=True, color=COLORS[block.arm], label=label)
            at_s = at_s + edges[-1] + _BIN_S
        axes.set(xlabel="seconds within blocks, in the order in which they ran", ylabel="read, GB/s")
        axes.set_ylim(bottom=0)
        if shown:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)

    return _svg("timeline", draw)


def _rates(block: Block) -> tuple[list[float], list[float]]:
    """Bin edges in seconds and the GB/s in each, up to the last byte read."""
    last = max(
        (at for (at, n), (_, before) in zip(block.samples[1:], block.samples, strict=False) if n > before), default=0
    )
    bins = int(last / _BIN_S) + 1
    read = [0.0] * bins
    for (_, before), (at, now) in zip(block.samples, block.samples[1:], strict=False):
        read[min(int(at / _BIN_S), bins - 1)] += now - before
    return [index * _BIN_S for index in range(bins + 1)], [each / _BIN_S / 1e9 for each in read]
