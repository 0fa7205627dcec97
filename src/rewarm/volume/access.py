"""What to say where a file system lets somebody not read or change a volume: who may, and what else is in the way."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewarm.errors import StorageError

REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors that speak of rights, and not of the device."""


def access_hint(path: str, number: int) -> str:
    """The next step after an errno of REFUSED that a path gave; empty for every other errno."""
    if number == errno.EROFS:
        return "its file system is mounted read-only: mount it writable, or use another directory"
    if number not in REFUSED:
        return ""
    place, owner = _nearest(Path(path).absolute())
    if owner == os.geteuid():
        return f"the mode or an attribute of {place} forbids it: ls -ld and lsattr -d show them"
    return f"{place} belongs to {_user_name(owner)}: run this as that user"


def write_error(root: str, error: OSError) -> StorageError:
    """What an error of a file in a root means to somebody who knows the root and not its files."""
    file = os.fsdecode(error.filename) if error.filename else root
    inside = os.path.relpath(file, root)
    where = "" if inside == "." or inside.startswith("..") else f" ({inside})"
    return StorageError(
        f"{root} cannot be written to: {error.strerror}{where}",
        path=root,
        errno=error.errno or errno.EIO,
        hint=access_hint(file, error.errno or errno.EIO),
    )


@contextmanager
def changing(root: str) -> Iterator[None]:
    """Around what changes a root.

    Raises:
        StorageError: This user may not, or the file system is read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno in REFUSED:
            raise write_error(root, error) from error
        raise


def _nearest(place: Path) -> tuple[Path, int]:
    """The path, or the nearest directory above it, that can be looked at, and its owner."""
    try:
        return place, place.lstat().st_uid
    except OSError:
        return _nearest(place.parent)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user with id {uid}"
