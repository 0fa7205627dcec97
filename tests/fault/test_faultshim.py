"""The shim strikes the operation it was told to, and no other: each action seen from a program of its own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import faultshim
import pytest
from faultshim import Action, Op, Shim

from rewarm.engine import ENGINE_KINDS, probe_engines

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(bool(faultshim.missing()), reason=faultshim.missing())

STORE = """
import errno, os, sys
folder = sys.argv[1]
try:
    fd = os.open(folder + "/tmp-1", os.O_CREAT | os.O_WRONLY, 0o600)
    os.posix_fallocate(fd, 0, 8192)
    view = memoryview(b"a" * 8192)
    while view:
        view = view[os.pwrite(fd, view, 8192 - len(view)):]
    os.fsync(fd)
    os.close(fd)
    os.rename(folder + "/tmp-1", folder + "/whole")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
READ = """
import errno, os, sys
fd = os.open(sys.argv[1] + "/whole", os.O_RDONLY)
try:
    data = bytearray(b"-" * 8192)
    n = os.preadv(fd, [data], 0)
    print(n, sum(bin(byte ^ ord("a")).count("1") for byte in data[:n]))
except OSError as error:
    print(errno.errorcode[error.errno])
"""
READ_BY_ENGINE = """
import errno, sys
from rewarm.engine import EngineConfig, alloc_aligned, open_engine
from rewarm.engine.base import Read
memory = alloc_aligned(8192)
memory.view[:] = b"-" * 8192
engine = open_engine(EngineConfig(kind=sys.argv[2]))
completion = engine.submit([Read(sys.argv[1] + "/whole", 0, memory.address, 8192)])
assert completion.wait(30)
[result] = completion.results()
wrong = sum(bin(byte ^ ord("a")).count("1") for byte in memory.view)
print(errno.errorcode[result] if result else wrong)
engine.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faultshim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    (tmp_path / "root").mkdir()
    return Shim(tmp_path / "control")


def run(code: str, library: Path, shim: Shim, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(folder / "root"), *more]
    return subprocess.run(
        command, env=faultshim.preload(library, shim.path), capture_output=True, text=True, timeout=60, check=False
    )


def test_counting_changes_nothing(library: Path, shim: Shim, tmp_path: Path) -> None:
    shim.arm(Action.COUNT, Op.CHANGE, str(tmp_path / "root"))
    assert run(STORE, library, shim, tmp_path).stdout == ""
    assert [line.split()[0] for line in shim.log()] == ["create", "fallocate", "write", "fsync", "rename"]
    assert shim.fired == 0
    assert (tmp_path / "root" / "whole").read_bytes() == b"a" * 8192


@pytest.mark.parametrize("step", range(1, 6))
def test_an_error_at_each_step(library: Path, shim: Shim, tmp_path: Path, step: int) -> None:
    shim.arm(Action.FAIL, Op.CHANGE, str(tmp_path / "root"), nth=step, error=errno.ENOSPC)
    assert run(STORE, library, shim, tmp_path).stdout == "ENOSPC\n"
    assert (shim.seen, shim.fired) == (step, 1)
    assert not (tmp_path / "root" / "whole").exists()


@pytest.mark.parametrize(
    ("action", "left"), [(Action.KILL_BEFORE, 0), (Action.KILL_MID, 4096), (Action.KILL_AFTER, 8192)]
)
def test_a_kill_before_amid_and_after_a_write(
    library: Path, shim: Shim, tmp_path: Path, action: Action, left: int
) -> None:
    shim.arm(action, Op.WRITE, str(tmp_path / "root"))
    assert run(STORE, library, shim, tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / "root" / "tmp-1").read_bytes() == b"a" * left + bytes(8192 - left)


@pytest.mark.parametrize(
    ("action", "content"),
    [(Action.SHORT, b"a" * 8192), (Action.DROP, bytes(8192)), (Action.FLIP, b"a" * 5 + b"c" + b"a" * 8186)],
)
def test_writes_that_fall_short_or_lie(
    library: Path, shim: Shim, tmp_path: Path, action: Action, content: bytes
) -> None:
    shim.arm(action, Op.WRITE, str(tmp_path / "root"), random=41)
    assert run(STORE, library, shim, tmp_path).stdout == ""
    assert shim.fired == 1
    assert (tmp_path / "root" / "whole").read_bytes() == content


@pytest.mark.parametrize(
    ("action", "said"),
    [(Action.COUNT, "8192 0"), (Action.SHORT, "4096 0"), (Action.END, "0 0"), (Action.FLIP, "8192 1"),
     (Action.STALE, "8192 24576"), (Action.FAIL, "EIO")],
)  # fmt: skip
def test_reads_that_fall_short_or_lie(library: Path, shim: Shim, tmp_path: Path, action: Action, said: str) -> None:
    (tmp_path / "root" / "whole").write_bytes(b"a" * 8192)
    shim.arm(action, Op.READ, str(tmp_path / "root"), error=errno.EIO)
    assert run(READ, library, shim, tmp_path).stdout == f"{said}\n"


@pytest.mark.parametrize("kind", ENGINE_KINDS)
@pytest.mark.parametrize(
    ("action", "said", "seen"),
    [(Action.COUNT, "0", 1), (Action.SHORT, "0", 2), (Action.END, "ENODATA", 1), (Action.FLIP, "1", 1),
     (Action.STALE, "24576", 1), (Action.FAIL, "EIO", 1)],
)  # fmt: skip
def test_reads_of_every_engine(
    library: Path, shim: Shim, tmp_path: Path, kind: str, action: Action, said: str, seen: int
) -> None:
    """Where the engine looks, so does the shim: a ring's entries too."""
    if reason := probe_engines()[kind] or (kind == "io_uring" and faultshim.missing_for_rings()):
        pytest.skip(reason)
    (tmp_path / "root" / "whole").write_bytes(b"a" * 8192)
    shim.arm(action, Op.READ, str(tmp_path / "root"), error=errno.EIO)
    done = run(READ_BY_ENGINE, library, shim, tmp_path, kind)
    assert done.stdout == f"{said}\n", done.stderr
    assert (shim.seen, shim.fired) == (seen, int(action is not Action.COUNT))


def test_a_name_outside_is_left_alone(library: Path, shim: Shim, tmp_path: Path) -> None:
    shim.arm(Action.FAIL, Op.ANY, str(tmp_path / "elsewhere"), error=errno.EIO)
    assert run(STORE, library, shim, tmp_path).stdout == ""
    assert shim.seen == 0


def test_a_hang_holds_until_it_is_let_go(library: Path, shim: Shim, tmp_path: Path) -> None:
    shim.arm(Action.HANG, Op.STAT, str(tmp_path / "root"))
    code = "import os, sys; print(os.path.isdir(sys.argv[1]))"
    held: list[int] = []

    def let_go() -> None:
        while not shim.hanging:
            os.sched_yield()
        held.append(shim.hanging)
        shim.disarm()

    watcher = threading.Thread(target=let_go)
    watcher.start()
    assert run(code, library, shim, tmp_path).stdout == "True\n"
    watcher.join()
    assert held == [1]
    assert shim.hanging == 0
