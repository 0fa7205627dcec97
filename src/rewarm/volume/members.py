"""Which roots a volume has now: a small file in each root, written when one is added or removed, watched by servers.

Each root has what was said last of every root that anybody spoke of, with the time. Who reads takes the newest of all
the files it can read, so that a root that is away, or a write that a crash cut off, spoils nothing. A volume of which
no root was added or removed has no such file: its roots are those that are named.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from rewarm.errors import DamageError, RewarmError, StorageError, UsageError
from rewarm.volume.access import write_error
from rewarm.volume.create import make_root
from rewarm.volume.layout import (
    RootFile,
    RootPaths,
    open_state,
    read_document,
    read_root_file,
    read_roots,
    replace_file,
    to_text,
)
from rewarm.volume.pins import copy_pins
from rewarm.volume.quota import Quotas, read_quotas, write_quotas

_log = logging.getLogger(__name__)

_FORMAT, _VERSION = "rewarm.roots", 1
_HINT = "remove this file: the other roots have it too; where none has, the roots are those that are named"
_ID = re.compile(r"[0-9a-f]{32}")
_MAX_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Member:
    """What was said last of one root."""

    root_id: str
    path: str
    """Where it lay then, absolute; elsewhere it is known by its root_id."""
    is_member: bool
    """False: it was removed."""
    changed_ns: int
    """Unix time; the later word counts."""


Members = dict[str, Member]
"""By root_id."""


def read_members(root: str) -> Members:
    """What one root says; nothing where it has no such file.

    Raises:
        DamageError, FormatVersionError, StorageError: The file is there and cannot be used.
    """
    path = RootPaths(root).members
    try:
        found = read_document(path, _FORMAT, _HINT)
        members = {one["root_id"]: Member(**one) for one in found["roots"]}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error
    except (KeyError, TypeError) as error:
        raise DamageError(f"{path} says no roots", hint=_HINT) from error
    if not all(map(_is_sound, found["roots"])):
        raise DamageError(f"{path} says no roots", hint=_HINT)
    return members


def _is_sound(one: Mapping[str, Any]) -> bool:
    root_id, path, changed_ns = one["root_id"], one["path"], one["changed_ns"]
    are_texts = isinstance(root_id, str) and _ID.fullmatch(root_id) and isinstance(path, str) and os.path.isabs(path)
    is_time = type(changed_ns) is int and 0 < changed_ns <= _MAX_NUMBER
    return bool(are_texts) and is_time and type(one["is_member"]) is bool


def newest(*said: Mapping[str, Member]) -> Members:
    """The last word on each root."""
    words: Members = {}
    for members in said:
        for root_id, member in members.items():
            if root_id not in words or member.changed_ns > words[root_id].changed_ns:
                words[root_id] = member
    return words


def members_of(roots: Sequence[str]) -> Members:
    """What all of these roots say together; one whose file cannot be used says nothing, and that is logged."""
    return newest(*map(_read_or_say, roots))


def _read_or_say(root: str) -> Members:
    try:
        return read_members(root)
    except RewarmError as error:
        _log.warning("%s", error.message)
        return {}


def current_roots(files: Mapping[str, RootFile]) -> dict[str, RootFile]:
    """The roots of a volume by what those that were named say: without removed ones, with added ones that are there.

    Args:
        files: Real path to what the volume file says, of one volume, at least one.
    Raises:
        UsageError: All of them were removed.
    """
    known = members_of(list(files))
    gone = {root_id for root_id, member in known.items() if not member.is_member}
    left = {path: file for path, file in files.items() if file.root_id not in gone}
    if not left:
        raise UsageError("all directories that were named were removed from their volume", hint="name those it has now")
    for path in files.keys() - left.keys():
        _log.warning("%s was removed from the volume and is not used", path)
    volume_id, ids = next(iter(left.values())).volume_id, {file.root_id for file in left.values()}
    for member in known.values():
        if member.is_member and member.root_id not in ids:
            with suppress(RewarmError):
                file = read_root_file(member.path)
                if (file.root_id, file.volume_id) == (member.root_id, volume_id):
                    left[os.path.realpath(member.path)] = file
    return left


def is_removed(root: str, root_id: str) -> bool:
    """Whether a root says of itself that it was removed."""
    with suppress(RewarmError):
        member = read_members(root).get(root_id)
        return member is not None and not member.is_member
    return False


class WatchedMembers:
    """Tells when the files of some roots have changed. One thread uses it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def changed(self, roots: Sequence[str]) -> bool:
        """Whether a file is another one than at the last call."""
        seen = {root: _identity(RootPaths(root).members) for root in roots}
        is_same = seen == self._seen
        self._seen = seen
        return not is_same


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def add_root(roots: Sequence[str], new: str, *, capacity_bytes: int) -> RootFile:
    """Make another root of a volume, or take one back that was removed; servers use it within seconds.

    The root is made whole before anybody is told of it. A crash in between leaves a directory that nobody uses, and
    that the same call takes on.

    Args:
        roots: Directories of the volume; all of them are told, those that are not named too where they can be reached.
        new: A directory as create_volume() takes it, or one that was a root of this volume.
        capacity_bytes: What it may hold; one that was a root keeps its own.
    Raises:
        UsageError: A directory that cannot be made a root, or is one; a size that makes no sense.
        VolumeFull, StorageError: As create_volume() gives them; a root that cannot be written to.
        FormatVersionError, DamageError: As read_roots() gives them.
    """
    files = _all_roots(roots)
    path = os.path.realpath(new)
    if path in files:
        raise UsageError(f"{path} is a root of this volume already")
    volume_id = next(iter(files.values())).volume_id
    if os.path.lexists(RootPaths(path).volume_file):
        file = read_root_file(path)
        if file.volume_id != volume_id:
            raise UsageError(f"{path} belongs to another volume", hint="name an empty directory, or a new one")
    else:
        file = make_root(path, volume_id, capacity_bytes)
    _carry_over(list(files), path)
    _tell({path: file, **files}, file.root_id, path, is_member=True)
    return file


def _carry_over(roots: Sequence[str], new: str) -> None:
    """What people said of a volume holds for its new root too: quotas and pins."""
    try:
        quotas = read_quotas(roots[0])
        if quotas != Quotas() or os.path.lexists(RootPaths(new).quotas):
            write_quotas(new, quotas)
        copy_pins(roots, new)
    except OSError as error:
        raise write_error(new, error) from error


def remove_root(roots: Sequence[str], old: str) -> Member:
    """Take a root out of a volume; servers stop using it within seconds. Nothing in it is moved or removed.

    Args:
        roots: Directories of the volume; the others are told too where they can be reached.
        old: One of the roots, reachable or not: its directory, or its root_id.
    Raises:
        UsageError: No such root, or the last one.
        StorageError: A root that cannot be written to, but for the old one.
        FormatVersionError, DamageError: As read_roots() gives them.
    """
    files = _all_roots([root for root in roots if root != old or os.path.lexists(RootPaths(root).volume_file)])
    known = members_of(list(files))
    path = os.path.realpath(old)
    ids = {file.root_id: place for place, file in files.items()}
    ids = {root_id: member.path for root_id, member in known.items() if member.is_member} | ids
    root_id = next((one for one, place in ids.items() if old == one or path == place), "")
    if not root_id:
        raise UsageError(
            f"{old} is no root of this volume",
            hint="where its directory cannot be read, name its root_id, which servers log and info --json shows",
        )
    if not set(ids) - {root_id}:
        raise UsageError("a volume keeps at least one root", hint="remove the directories to remove the volume")
    others = {place: file for place, file in files.items() if file.root_id != root_id}
    if not others:
        raise UsageError("no other root was named, or can be reached", hint="name all roots of the volume")
    said = _tell(others, root_id, ids[root_id], is_member=False)
    if ids[root_id] in files:
        with suppress(RewarmError):  # it may be why it is removed
            _write(ids[root_id], said)
    return said[root_id]


def _all_roots(roots: Sequence[str]) -> dict[str, RootFile]:
    """The volume files of the roots that are named, and of those that they know of and that can be reached."""
    return current_roots(read_roots(roots))


def _tell(files: Mapping[str, RootFile], root_id: str, path: str, *, is_member: bool) -> Members:
    """Write down in these roots what became of one of them, and that the others are there; returns what they say."""
    known = members_of(list(files))
    before = known[root_id].changed_ns if root_id in known else 0
    words = {file.root_id: Member(file.root_id, place, True, file.created_ns) for place, file in files.items()}
    words = newest(words, known)
    words[root_id] = Member(root_id, path, is_member, max(time.time_ns(), before + 1))
    for place in files:
        _write(place, words)
    return words


def _write(root: str, words: Mapping[str, Member]) -> None:
    """Durably; what somebody else wrote meanwhile stays where it is newer."""
    paths = RootPaths(root)
    try:
        with _locked(paths.members_lock):
            try:
                there = read_members(root)
            except DamageError:
                there = {}
            roots = [asdict(member) for member in newest(there, words).values()]
            document = {"format": _FORMAT, "version": _VERSION, "roots": roots}
            replace_file(paths.members, to_text(document), durable=True)
    except OSError as error:
        raise write_error(root, error) from error


@contextmanager
def _locked(path: str) -> Iterator[None]:
    descriptor = open_state(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
