"""Figures as rows for a terminal and for Markdown: the ratio first."""

from __future__ import annotations

from collections.abc import Sequence

from rewarm.bench.report import Figure

HEADERS = ("of the floor", "figure", "engine", "value", "floor", "fs tier", "over fs tier", "min-max", "goal", "")


def rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """One row of HEADERS a figure."""
    return [_row(figure) for figure in figures]


def filled(figures: Sequence[Figure]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows without the columns that no figure has anything in."""
    made = rows(figures)
    kept = [column for column in range(len(HEADERS)) if any(row[column] not in {"", "-"} for row in made)]
    return tuple(HEADERS[column] for column in kept), [tuple(row[column] for column in kept) for row in made]


def _row(figure: Figure) -> tuple[str, ...]:
    least, greatest = figure.spread.least, figure.spread.greatest
    return (
        f"{figure.floor_ratio.median:.2f}x" if figure.floor_ratio else "-",
        figure.name,
        figure.engine or "-",
        f"{number(figure.value)} {figure.unit}".rstrip(),
        number(figure.floor) if figure.floor is not None else "-",
        number(figure.peer) if figure.peer is not None else "-",
        f"{figure.peer_ratio.median:.2f}x" if figure.peer_ratio else "-",
        f"{number(least)}-{number(greatest)}" if figure.spread.count > 1 else "-",
        figure.goal or "-",
        {None: "", True: "holds", False: "SHORT"}[figure.holds],
    )


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"
