"""What a wheel carries, built from the source archive: with the C library, and where there is no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("scikit_build_core", reason="the build backend is not installed in this environment")


def build(hook: str, source: Path, target: Path, settings: dict[str, str]) -> Path:
    """Run a hook of the build backend, as pip does; returns what it made."""
    target.mkdir()
    code = f"from scikit_build_core.build import {hook}; print({hook}({str(target)!r}, {settings!r}))"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "SKBUILD"))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("build_sdist", ROOT, folder / "archive", {})) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = folder.glob("rewarm-*")
    return unpacked


@pytest.mark.parametrize("has_compiler", [False, True], ids=["pure", "native"])
def test_both_kinds_of_wheel_carry_all_that_is_not_code(has_compiler: bool, source: Path, tmp_path: Path) -> None:
    if has_compiler and not all(map(shutil.which, ("gcc", "cmake"))):
        pytest.skip("gcc and cmake are not both there")
    settings = {} if has_compiler else {"wheel.cmake": "false"}
    with zipfile.ZipFile(build("build_wheel", source, tmp_path / "wheel", settings)) as wheel:
        names = set(wheel.namelist())
        goals = wheel.read("rewarm/bench/goals.toml")
    package = ROOT / "src" / "rewarm"
    assert goals == (package / "bench" / "goals.toml").read_bytes() == (source / "bench" / "goals.toml").read_bytes()
    assert b"kv.read.1MiB.x1" in goals
    data = {path for path in package.rglob("*") if path.suffix not in {".py", ".pyc", ".so"} and path.is_file()}
    assert {str(path.relative_to(package.parent)) for path in data} <= names
    assert any(name.endswith("librewarm_io.so") for name in names) is has_compiler
