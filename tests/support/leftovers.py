"""What servers of this test run leave where temporary files lie; what others on this machine have there counts not."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LOOK_S = 0.2
_STEADY = ("torchinductor_", "pytest-of-")
"""Caches and folders of the tests, which are meant to stay."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Leftovers:
    """Looks from now on which new entries the descendants of this process map, open, bind or are told of."""

    def __init__(self) -> None:
        self._before = _entries()
        self._own: set[Path] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def seen(self) -> set[Path]:
        """Entries of the descendants, so far."""
        return set(self._own)

    def left(self) -> list[Path]:
        """Entries that a descendant had, that are still there, and that no living process uses; ends the looking."""
        self._ended.set()
        self._thread.join()
        there = {entry for entry in self._own if os.path.lexists(entry)}
        return sorted(there - _used(there, _processes()))

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            new = _entries() - self._before - self._own
            if new:
                self._own |= _used(new, _descendants(os.getpid()))


def _entries() -> set[Path]:
    """Everything in the temporary directory and in shared memory."""
    folders = {Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")}
    return {entry for folder in folders for entry in folder.iterdir() if not entry.name.startswith(_STEADY)}


def _processes() -> list[int]:
    return [int(process.name) for process in Path("/proc").glob("[0-9]*")]


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for one in _processes():
        with suppress(OSError):
            stat = Path(f"/proc/{one}/stat").read_text(errors="replace")
            parents[one] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _used(entries: set[Path], pids: Iterable[int]) -> set[Path]:
    """Those of the entries that one of the processes has mapped, open or bound, or in its environment."""
    bound = _sockets()
    used: set[Path] = set()
    for process in (Path(f"/proc/{pid}") for pid in pids):
        words: list[str] = []
        with suppress(OSError):
            words.append((process / "maps").read_text(errors="replace"))
        with suppress(OSError):
            words.append((process / "environ").read_bytes().decode(errors="replace"))
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    target = str(link.readlink())
                    socket = _SOCKET.fullmatch(target)
                    words.append(bound.get(socket.group(1), "") if socket else target)
        text = "\n".join(words)
        used |= {entry for entry in entries if str(entry) in text}
    return used


def _sockets() -> dict[str, str]:
    """Inode -> path, of the sockets that have one."""
    lines = (line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:])
    return {words[6]: words[7] for words in lines if len(words) > 7}
