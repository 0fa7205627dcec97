"""Opening one root: in order after a crash, with the files of the working state, and a session of this process."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import closing, suppress

from rewarm.units import MIB
from rewarm.volume.access import write_error
from rewarm.volume.count import recount
from rewarm.volume.evict import evict_until
from rewarm.volume.layout import RootFile, RootPaths
from rewarm.volume.open_root import Root, file_identity
from rewarm.volume.recovery import recover_root
from rewarm.volume.session import Session
from rewarm.volume.usage import UsageFile, read_usage
from rewarm.volume.wear import WearFile, new_wear_file

_log = logging.getLogger(__name__)

ROOM_TO_OPEN_BYTES = 4 * MIB
"""Evicted where a full disk has no room for a session's few files."""


def open_root(path: str, file: RootFile, *, read_only: bool) -> Root:
    """Bring a root in order and begin to use it; a process that only reads leaves no trace.

    Raises:
        StorageError: It cannot be read, or written to.
    """
    paths = RootPaths(path)
    try:
        identity = file_identity(paths.volume_file)
        session = None if read_only else _begin_session(paths)
    except OSError as error:
        refused = write_error(path, error)
        refused.hint += "; a server can open it read-only" if refused.hint else ""
        raise refused from error
    return Root(paths, file, session, UsageFile(paths.usage), WearFile(paths.wear), identity=identity)


def _begin_session(paths: RootPaths) -> Session:
    """Bring a root in order and begin; where the disk is full, some records make room for that first."""
    try:
        return _bring_in_order(paths)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
    used_bytes = read_usage(paths.usage).used_bytes
    evict_until([paths.root], lambda capacity: min(capacity, capacity - used_bytes + ROOM_TO_OPEN_BYTES))
    return _bring_in_order(paths)


def _bring_in_order(paths: RootPaths) -> Session:
    _make_state(paths)
    recovery = recover_root(paths)
    if recovery is not None and recovery.num_removed:
        _log.warning(
            "%s: %d of %d records were not whole after an unclean stop and were removed",
            paths.root,
            recovery.num_removed,
            recovery.num_records,
        )
    with closing(UsageFile(paths.usage)) as usage:
        if not usage.read().is_known or (recovery is not None and recovery.num_records):
            recount(paths, usage)
    return Session(paths)


def _make_state(paths: RootPaths) -> None:
    """What is missing of the directory for locks and logs is made again: nothing in it is needed to read a record."""
    for directory in (paths.state, paths.sessions, paths.quarantine):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    if not os.path.lexists(paths.wear):
        with suppress(FileExistsError):
            new_wear_file(paths.wear)


def close_root(root: Root) -> None:
    """Let go of a root. Idempotent."""
    if root.session is not None:
        root.session.close()
    root.usage.close()
    root.wear.close()
