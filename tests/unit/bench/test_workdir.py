from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rewarm.bench.workdir import PREFIX, work_directory
from rewarm.errors import StorageError, VolumeFull


def _left(root: Path) -> list[str]:
    return [path.name for path in root.iterdir()]


def test_it_is_gone_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with work_directory(tmp_path, need_bytes=1, less="ask for less") as directory:
            (directory / "deep" / "er").mkdir(parents=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert _left(tmp_path) == []


def test_what_a_killed_bench_left_is_removed_and_a_running_ones_is_kept(tmp_path: Path) -> None:
    abandoned = tmp_path / (PREFIX + "abandoned")
    abandoned.mkdir()
    (abandoned / "lock").touch()
    with (
        work_directory(tmp_path, need_bytes=1, less="ask for less") as first,
        work_directory(tmp_path, need_bytes=1, less="ask for less") as second,
    ):
        assert sorted(_left(tmp_path)) == sorted([first.name, second.name])
    assert _left(tmp_path) == []


def test_too_little_room_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(VolumeFull), work_directory(tmp_path, need_bytes=1 << 60, less="ask for less"):
        pass
    assert _left(tmp_path) == []


def test_a_root_that_is_no_directory(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="is not a directory"),
        work_directory(tmp_path / "no", need_bytes=1, less="ask for less"),
    ):
        pass


_TERMINATED = """
import os, signal, sys
from pathlib import Path
from rewarm.bench.workdir import work_directory
with work_directory(Path(sys.argv[1]), need_bytes=1, less="ask for less"):
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_cleans_up(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _TERMINATED, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    assert _left(tmp_path) == []
