"""Reading records so that what lies below a volume has them at hand: a server of a network file system, an array."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rewarm.errors import RewarmError, StorageError
from rewarm.volume.check import RecordChecker
from rewarm.volume.layout import RootPaths, read_namespace_file


@dataclass(slots=True)
class Prefetched:
    """What was read."""

    num_records: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    """Not what their names say; a server that meets one computes instead, and puts it aside."""


def prefetch(
    roots: Sequence[str],
    entries: Sequence[tuple[bytes, bytes]],
    *,
    advance: Callable[[int], None] = lambda _n: None,
) -> Prefetched:
    """Read and check records, one after the other, through the page cache; what is not there is left out.

    Args:
        roots: Directories of one volume.
        entries: (namespace id, key) of each.
        advance: Called with the bytes of each that was read.
    Raises:
        StorageError: One that is there cannot be read.
    """
    done = Prefetched()
    checkers: dict[bytes, RecordChecker] = {}
    try:
        for place, key in entries:
            path = next(filter(os.path.lexists, (RootPaths(root).record(place, key) for root in roots)), None)
            if path is None:
                continue
            if place not in checkers:
                checkers[place] = _checker(roots, place)
            result = checkers[place].check(path, key)
            if result not in {0, errno.ENOENT, errno.EBADMSG}:
                raise StorageError(f"{path} cannot be read: {os.strerror(result)}", path=path, errno=result)
            if result == 0:
                done.num_records += 1
                done.num_bytes += len(checkers[place].record)
                advance(len(checkers[place].record))
            done.num_damaged += result == errno.EBADMSG
    finally:
        for checker in checkers.values():
            checker.close()
    return done


def _checker(roots: Sequence[str], namespace_id: bytes) -> RecordChecker:
    for root in roots[:-1]:
        with suppress(RewarmError):
            return RecordChecker(read_namespace_file(root, namespace_id))
    return RecordChecker(read_namespace_file(roots[-1], namespace_id))


def reads_directly(root: str) -> bool:
    """Whether servers read a root past the page cache of their host: its file system takes O_DIRECT."""
    with suppress(OSError):
        descriptor = os.open(RootPaths(root).volume_file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        os.close(descriptor)
        return True
    return False
