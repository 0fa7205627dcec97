"""The directory that a bench works in: enough room, nobody else's, and gone afterwards."""

from __future__ import annotations

import fcntl
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rewarm.errors import StorageError, VolumeFull

PREFIX = ".rewarm-bench-"
_LOCK = "lock"


@contextmanager
def work_directory(root: Path, *, need_bytes: int, less: str) -> Iterator[Path]:
    """A new directory below ``root``, removed at the end: after an error, Ctrl-C and SIGTERM too.

    What a killed bench left there is removed first: its lock is free. A bench that still runs keeps its directory.

    Args:
        root: Where.
        need_bytes: Room that there must be.
        less: What a person can do to need less, for the error.
    Raises:
        StorageError: ``root`` is no directory, or cannot be written to.
        VolumeFull: Less room than ``need_bytes``; nothing was made.
    """
    if not root.is_dir():
        raise StorageError(f"{root} is not a directory", path=str(root), hint="name one on the device to be measured")
    remove_abandoned(root)
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < need_bytes:
        hint = f"free some, or name another directory; {less}"
        raise VolumeFull(str(root), need_bytes=need_bytes, free_bytes=free_bytes, hint=hint)
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    except OSError as problem:
        raise StorageError(
            f"{root} cannot be written to: {problem.strerror}", path=str(root), errno=problem.errno or 0
        ) from problem
    with (directory / _LOCK).open("wb") as lock, _terminable():
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned(root: Path) -> None:
    """Remove work directories below ``root`` whose bench is gone."""
    for directory in root.glob(PREFIX + "*"):
        with suppress(OSError), (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like an exit, with the shell's exit code for it; left alone outside of the main thread."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
