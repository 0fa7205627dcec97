"""What every chart of a bench needs first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rewarm.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_svg(path: Path) -> None:
    """UsageError where the path does not end in .svg."""
    if path.suffix != ".svg":
        raise UsageError(f"{path} does not end in .svg", hint="name a file like chart.svg")


def canvas_type() -> type[Figure]:
    """What to draw on; UnsupportedError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise UnsupportedError("a chart needs matplotlib", hint="pip install 'rewarm[trial]'") from missing
    return Figure
