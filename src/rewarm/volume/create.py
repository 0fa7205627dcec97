"""Making a volume: all of it, or nothing."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rewarm.errors import StorageError, UsageError, VolumeFull
from rewarm.units import MIB, format_size
from rewarm.volume.access import access_hint
from rewarm.volume.layout import DIR_MODE, RootFile, RootPaths, sync_directory, to_text, write_new
from rewarm.volume.usage import Usage, new_usage_file

MIN_CAPACITY_BYTES = MIB
_RESERVE_BYTES = 16 * MIB
"""Of a file system, beyond the records: directories, logs, the order of eviction."""
_ONE_EACH = "name one directory on each device"
_ALLOWED_BESIDE = {"lost+found"}


@dataclass(frozen=True, slots=True)
class VolumeIdentity:
    """What create_volume() made."""

    volume_id: str
    roots: dict[str, RootFile]
    """By absolute path."""

    @property
    def capacity_bytes(self) -> int:
        """Over all roots."""
        return sum(root.capacity_bytes for root in self.roots.values())


def create_volume(roots: Sequence[str], *, capacity_bytes: int) -> VolumeIdentity:
    """Make a volume of one or more roots.

    Args:
        roots: Directories, one a device; each is empty (but for lost+found) or missing with a parent that is there.
        capacity_bytes: What the volume may hold; spread over the roots by the free space of their file systems.
    Raises:
        UsageError: A size that makes no sense, a directory named twice, not empty, or one that holds a volume.
        VolumeFull: More than the file systems have free, or a full disk while making it.
        StorageError: A directory that is missing, no directory, or not writable.
        Nothing is changed by a call that raises.
    """
    paths = [os.path.realpath(root) for root in roots]
    if not paths:
        raise UsageError("a volume needs at least one directory", hint=_ONE_EACH)
    if len(set(paths)) != len(paths):
        raise UsageError("the same directory is named twice", hint=_ONE_EACH)
    for path in paths:
        _check_place(path, paths)
    if capacity_bytes < MIN_CAPACITY_BYTES * len(paths):
        raise UsageError(
            f"a volume of {format_size(capacity_bytes)} is too small",
            hint=f"at least {format_size(MIN_CAPACITY_BYTES)} a directory; like 200GiB",
        )
    free = [_check_root(path) for path in paths]
    if capacity_bytes > sum(free):
        place = ", ".join(paths)
        raise VolumeFull(place, need_bytes=capacity_bytes, free_bytes=sum(free), hint="ask for a smaller --size")
    volume_id, now = uuid.uuid4().hex, time.time_ns()
    made: dict[str, RootFile] = {}
    undo: list[tuple[str, str]] = []
    try:
        for path, free_bytes in zip(paths, free, strict=True):
            share = capacity_bytes * free_bytes // max(1, sum(free))
            root = RootFile(volume_id, uuid.uuid4().hex, max(MIN_CAPACITY_BYTES, share), now)
            _make_root(path, root, undo)
            made[path] = root
    except BaseException as error:
        _undo(undo)
        if isinstance(error, OSError):
            raise _as_storage_error(error, paths) from error
        raise
    return VolumeIdentity(volume_id, made)


def make_root(path: str, volume_id: str, capacity_bytes: int) -> RootFile:
    """Make one more root of a volume that is there; who uses the volume has to be told of it.

    Raises:
        UsageError, VolumeFull, StorageError: As create_volume(); nothing is changed then.
    """
    _check_place(path, ())
    if capacity_bytes < MIN_CAPACITY_BYTES:
        raise UsageError(
            f"a root of {format_size(capacity_bytes)} is too small", hint=f"at least {format_size(MIN_CAPACITY_BYTES)}"
        )
    free_bytes = _check_root(path)
    if capacity_bytes > free_bytes:
        raise VolumeFull(path, need_bytes=capacity_bytes, free_bytes=free_bytes, hint="ask for a smaller --size")
    root = RootFile(volume_id, uuid.uuid4().hex, capacity_bytes, time.time_ns())
    undo: list[tuple[str, str]] = []
    try:
        _make_root(path, root, undo)
    except BaseException as error:
        _undo(undo)
        if isinstance(error, OSError):
            raise _as_storage_error(error, [path]) from error
        raise
    return root


def _check_place(path: str, paths: Sequence[str]) -> None:
    """A root inside another one would be taken for a part of it, or be purged with it."""
    for parent in map(str, Path(path).parents):
        if parent in paths or os.path.lexists(RootPaths(parent).volume_file):
            raise UsageError(
                f"{path} lies inside a volume's directory, {parent}", hint="name a directory outside of it"
            )


def _check_root(path: str) -> int:
    """Free bytes of the file system below a root that may be made."""
    there = os.path.lexists(path)
    parent = path if there else os.path.dirname(path)
    if not os.path.isdir(parent):
        what = f"{path} is not a directory" if there else f"{parent} does not exist"
        raise StorageError(what, path=path, errno=errno.ENOTDIR, hint="name a directory on the flash device")
    try:
        names = set(os.listdir(path)) if there else set()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error
    if "rewarm.volume" in names:
        raise UsageError(f"{path} holds a volume already", hint=f"rewarm volume info {path} shows it")
    if names - _ALLOWED_BESIDE:
        raise UsageError(f"{path} is not empty", hint="a volume needs a directory of its own: name an empty or new one")
    numbers = os.statvfs(parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        number = errno.EROFS if numbers.f_flag & os.ST_RDONLY else errno.EACCES
        hint = access_hint(parent, number)
        raise StorageError(f"{parent} is not writable", path=path, errno=number, hint=hint)
    return max(0, numbers.f_bavail * numbers.f_frsize - _RESERVE_BYTES)


def _make_root(path: str, root: RootFile, undo: list[tuple[str, str]]) -> None:
    paths = RootPaths(path)
    if not os.path.lexists(path):
        os.mkdir(path, DIR_MODE)
        undo.append(("rmdir", path))
        sync_directory(os.path.dirname(path))
    for directory in (paths.state, paths.sessions, paths.quarantine):
        os.mkdir(directory, DIR_MODE)
        undo.append(("rmdir", directory))
    new_usage_file(paths.usage, Usage())
    undo.append(("unlink", paths.usage))
    # Last, so that a directory with this file in it is a whole root; exclusive, so that one of two creators fails.
    write_new(paths.volume_file, to_text(root.to_json()), durable=True)
    undo.append(("unlink", paths.volume_file))
    sync_directory(paths.state)
    sync_directory(path)


def _undo(undo: list[tuple[str, str]]) -> None:
    for action, path in reversed(undo):
        with suppress(OSError):
            os.unlink(path) if action == "unlink" else os.rmdir(path)


def _as_storage_error(error: OSError, paths: list[str]) -> StorageError | UsageError:
    place = os.fsdecode(error.filename) if error.filename else paths[0]
    if error.errno == errno.EEXIST:
        return UsageError(f"somebody else is making a volume in {place}", hint="look again in a moment")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return VolumeFull(place, need_bytes=_RESERVE_BYTES, free_bytes=0, hint="free some space first")
    return StorageError(f"{place}: {error.strerror}", path=place, errno=error.errno or 0)
