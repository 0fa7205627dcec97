"""The shape of the source: sizes, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "rewarm"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# A module imports from its own layer and from those before it (docs/design.md, section 1).
LAYERS = (
    ("errors", "units", "inputs", "config", "metrics"),
    ("engine",),
    ("volume",),
    ("kv",),
    ("adapters",),
    ("platform",),
    ("bench", "trial"),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ANYTHING = {"testing"}
"""Public suites may import what they test; nothing else may import them, but trial and bench, for the tiny model."""


def python_files() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")])


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and second part of every rewarm.X import, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "rewarm" and len(parts) > 1:
                yield node.lineno, parts[1]


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_native_files_stay_small() -> None:
    for path in [*(ROOT / "native").rglob("*.c"), *(ROOT / "native").rglob("*.h")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES, path


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    layer = layer_of(path)
    if layer in ANYTHING or layer == "__init__":
        return
    for line, name in imported_names(path):
        if name.startswith("__"):
            continue
        allowed = name in LEVEL and (LEVEL[name] < LEVEL[layer] or name == layer or LEVEL[name] == LEVEL[layer] == 0)
        allowed |= name in ANYTHING and layer in {"bench", "trial", "cli"}
        assert allowed, f"line {line}: {layer} must not import {name}"


def test_every_layer_has_its_place() -> None:
    unplaced = {layer_of(path) for path in SOURCE.rglob("*.py")} - set(LEVEL) - ANYTHING - {"__init__", "__main__"}
    assert not unplaced, "add it to LAYERS above, and to docs/design.md"


def test_the_core_imports_without_any_optional_package() -> None:
    """A server's API process imports the adapter: nothing heavy may come with it."""
    code = (
        "import importlib, pkgutil, sys\n"
        "import rewarm.config, rewarm.errors, rewarm.metrics, rewarm.units, rewarm.engine, rewarm.volume, rewarm.kv\n"
        "import rewarm.adapters\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich', 'click', 'httpx', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SPEAK_TO_PEOPLE = (
    "cli",
    "bench",
    "trial",
    "adapters",
    "config.py",
    "inputs.py",
    "units.py",
    "volume/evict.py",
    "volume/pins.py",
)


@pytest.mark.parametrize("where", SPEAK_TO_PEOPLE)
def test_an_error_of_use_names_the_next_step(where: str) -> None:
    """Where a person reads it; an error of a call between modules has nobody to tell it to."""
    place = SOURCE / where
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UsageError":
                hints = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
                assert hints, f"{path}:{node.lineno}: no hint"
                assert not (isinstance(hints[0], ast.Constant) and not hints[0].value), f"{path}:{node.lineno}: empty"
