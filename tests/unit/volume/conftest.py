"""What every test of the volume starts from; helpers are in tests/support/volumes.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from volumes import MIB, Bench, mounted

from rewarm.volume import create_volume


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A fresh volume of 64 MiB on one root."""
    path = str(tmp_path / "volume")
    create_volume([path], capacity_bytes=64 * MIB)
    return path


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Opens volumes with the best engine that is built and closes all of it at the end."""
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options; skips where that is not allowed."""
    undo = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(undo)}"
        unmount = mounted(place, options)
        if unmount is None:
            pytest.skip("mounting a tmpfs needs root")
        undo.append(unmount)
        return place

    yield mount
    for unmount in undo:
        unmount()
