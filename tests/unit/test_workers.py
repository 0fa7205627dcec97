"""How many workers files in memory get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rewarm.engine.workers import MOST_IN_MEMORY, num_workers_for

SHM = Path("/dev/shm")


def file_system(path: Path) -> str:
    """Of the longest mount point that the path lies below."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    return max((m for m in mounts if path.resolve().is_relative_to(m[1])), key=lambda m: len(m[1]))[2]


@pytest.mark.skipif(not SHM.is_dir() or file_system(SHM) != "tmpfs", reason="no tmpfs on /dev/shm here")
def test_files_in_memory_get_a_worker_a_core(tmp_path: Path) -> None:
    cores = min(len(os.sched_getaffinity(0)), MOST_IN_MEMORY)
    assert num_workers_for([str(SHM)]) == cores
    assert num_workers_for([str(SHM), "/proc"]) == 0
    assert num_workers_for(["/proc"] * 8) == 0
    assert num_workers_for(["/proc"] * 9) == 64


@pytest.mark.parametrize("roots", [[], ["/nowhere/at/all"], ["/proc"]])
def test_anything_else_is_left_to_the_engine(roots: list[str]) -> None:
    assert num_workers_for(roots) == 0
