"""The published results that a report shows beside its own; the figures and their source stand in published.toml."""

from __future__ import annotations

import functools
import sys
from importlib import resources
from typing import Any


@functools.cache
def published() -> dict[str, Any]:
    """The tables of published.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = resources.files("rewarm.trial").joinpath("published.toml").read_text(encoding="utf-8")
    document: dict[str, Any] = tomllib.loads(text)
    return document
