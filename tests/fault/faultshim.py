"""Builds and commands faultshim.c: the library that, preloaded, makes one file operation of a process go wrong."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
from enum import IntEnum, IntFlag
from itertools import takewhile
from pathlib import Path

SOURCE = Path(__file__).with_name("faultshim.c")
PATH_MAX = 4096
LOG_LINES = 512
LOG_CHARS = 96


class Op(IntFlag):
    """Kinds of file operation, as in faultshim.c."""

    OPEN = 1
    READ = 2
    WRITE = 4
    ALLOCATE = 8
    RENAME = 16
    UNLINK = 32
    MKDIR = 64
    SYNC = 128
    TRUNCATE = 256
    STAT = 512
    STORE = OPEN | WRITE | ALLOCATE | RENAME | MKDIR | SYNC | TRUNCATE
    CHANGE = STORE | UNLINK
    ANY = 1023


class Action(IntEnum):
    """What befalls the operation, as in faultshim.c."""

    COUNT = 0
    FAIL = 1
    KILL_BEFORE = 2
    KILL_AFTER = 3
    KILL_MID = 4
    SHORT = 5
    END = 6
    FLIP = 7
    DROP = 8
    STALE = 9
    HANG = 10


class _Control(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("armed", "mask", "nth", "times", "action")),
        ("error", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("random", "seen", "fired", "hanging", "release", "spare")),
        ("prefix", ctypes.c_char * PATH_MAX),
        ("infix", ctypes.c_char * 256),
        ("log", (ctypes.c_char * LOG_CHARS) * LOG_LINES),
    ]


def missing() -> str:
    """Why the shim cannot be built here; empty where it can."""
    return "" if shutil.which("gcc") else "no gcc on PATH: file operations cannot be made to fail below the C library"


def missing_for_rings() -> str:
    """Why operations in a ring of io_uring cannot be struck here, where others can; empty where they can."""
    major, minor = (int("".join(takewhile(str.isdigit, part))) for part in platform.release().split(".")[:2])
    return "" if (major, minor) >= (6, 10) else "Linux before 6.10: an entry of io_uring cannot end as it is told to"


def build(folder: Path) -> Path:
    """Compile the shim into a folder; returns the library."""
    library = folder / "faultshim.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", str(SOURCE), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return library


def preload(library: Path, control: Path, environment: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that runs under the shim."""
    env = dict(os.environ if environment is None else environment)
    env["LD_PRELOAD"] = " ".join(filter(None, [str(library), env.get("LD_PRELOAD", "")]))
    env["FAULTSHIM_CONTROL"] = str(control)
    return env


class Shim:
    """The orders of one process (or a forked child), in a file that both sides map."""

    def __init__(self, control: Path) -> None:
        if not control.exists():
            control.write_bytes(bytes(ctypes.sizeof(_Control)))
        self.path = control
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._map)

    @staticmethod
    def attach(control: Path) -> None:
        """In a forked child of a preloaded process: obey another control file from now on."""
        library = ctypes.CDLL(None)
        if library.faultshim_attach(os.fsencode(control)):
            raise AssertionError(f"the shim does not take {control}")

    def arm(
        self, action: Action, ops: Op, prefix: str, *, nth: int = 1, times: int = 1, error: int = 0, random: int = 0,
        infix: str = "",
    ) -> None:  # fmt: skip
        """From now on act on the nth to (nth+times-1)th counted operation; times=0: on all from the nth."""
        c = self._control
        c.armed = 0
        c.mask, c.nth, c.times, c.action, c.error = int(ops), nth, times, int(action), error
        c.random = random & 0x7FFFFFFF
        c.prefix, c.infix = os.fsencode(prefix), infix.encode()
        c.seen = c.fired = c.release = 0
        c.armed = 1

    def disarm(self) -> None:
        """Let everything through; HANG lets go."""
        self._control.armed = 0
        self._control.release = 1

    @property
    def seen(self) -> int:
        """Operations counted since arm()."""
        return int(self._control.seen)

    @property
    def fired(self) -> int:
        """Operations acted on since arm()."""
        return int(self._control.fired)

    @property
    def hanging(self) -> int:
        """Threads that HANG holds at this moment."""
        return int(self._control.hanging)

    def log(self) -> list[str]:
        """The counted operations, oldest first, up to the last 512."""
        seen = self.seen
        lines = [self._control.log[i % LOG_LINES].value.decode(errors="replace") for i in range(seen)]
        return lines[-LOG_LINES:]
