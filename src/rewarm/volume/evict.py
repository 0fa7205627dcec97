"""Removing records because somebody asked for it: until there is room, or all of a namespace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from rewarm.errors import BusyError, DamageError, RewarmError, UsageError
from rewarm.units import format_size
from rewarm.volume.access import changing
from rewarm.volume.check import remove_record
from rewarm.volume.count import record_entries
from rewarm.volume.info import NamespaceInfo
from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import NAMESPACE_FILE, RootPaths, namespace_ids, read_namespace_file, read_roots
from rewarm.volume.pins import pin_names
from rewarm.volume.session import SessionReader, session_directories
from rewarm.volume.usage import Usage, UsageFile

JANITOR_WAIT_S = 30.0
"""Without a sign of work from the janitor that is running; then it is given up."""
_STEP_S = 0.05
MIN_PREFIX = 4
"""Hexadecimal digits that name a namespace."""


@dataclass(slots=True)
class Evicted:
    """What was removed."""

    num_records: int = 0
    num_bytes: int = 0


def evict_until(
    roots: Sequence[str],
    free_bytes: Callable[[int], int],
    *,
    pinned_too: bool = False,
    advance: Callable[[int], None] = lambda _n: None,
) -> Evicted:
    """Remove the records that are used least until each root has room, in the order of its janitor.

    Where a server's janitor runs, it is asked to; else this process is the janitor for as long as it takes. Pinned
    records stay, and there may be less room then, unless ``pinned_too``.

    Args:
        roots: Directories of one volume.
        free_bytes: Capacity of a root -> bytes that are to be free in it.
        pinned_too: Whether pinned records go like the rest.
        advance: Called with the bytes that were freed.
    Raises:
        UsageError: More is to be free than the capacity.
        BusyError: A janitor holds the lock and does nothing, or heeds the pins that this call is not to heed.
        StorageError, OSError: A root that cannot be written to, or records there whose namespace cannot be read.
        FormatVersionError: Records of a newer format are in the way.
    """
    done = Evicted()
    for root, file in read_roots(roots).items():
        wanted = free_bytes(file.capacity_bytes)
        if wanted > file.capacity_bytes:
            may, asked = format_size(file.capacity_bytes), format_size(wanted)
            raise UsageError(
                f"{root} may hold {may}, so {asked} can never be free in it", hint="a share like 10%, or less than that"
            )
        with changing(root):
            before, after = _evict_root(root, file.capacity_bytes - wanted, pinned_too=pinned_too)
        done.num_records += after.evicted_records - before.evicted_records
        done.num_bytes += after.evicted_bytes - before.evicted_bytes
        advance(after.evicted_bytes - before.evicted_bytes)
    return done


def _evict_root(root: str, target: int, *, pinned_too: bool) -> tuple[Usage, Usage]:
    """Bring a root down to ``target`` bytes; returns what its budget said before and after."""
    janitor = RootJanitor(root, heeds_pins=not pinned_too)
    with janitor.alone() as is_alone, closing(UsageFile(RootPaths(root).usage)) as usage:
        if pinned_too and not is_alone and pin_names(root):
            raise BusyError(
                f"a server's janitor works on {root}, and heeds its pins",
                hint="rewarm kv unpin takes a pin away; or stop the servers of this volume first",
            )
        before = usage.read()
        if is_alone:
            janitor.prepare()
            janitor.step()
        surplus = usage.read().used_bytes - target
        if surplus > 0 and is_alone:
            if janitor.evict(surplus) < surplus:
                _check_described(root)
        elif surplus > 0:
            _ask(root, usage, target)
        if is_alone:
            janitor.finish()
        return before, usage.read()


def _check_described(root: str) -> None:
    """Raise what keeps a namespace's description from being read; a missing or damaged one is no obstacle."""
    for namespace_id in namespace_ids(root):
        with suppress(UsageError, DamageError):
            read_namespace_file(root, namespace_id)


def _ask(root: str, usage: UsageFile, target: int) -> None:
    """Let the janitor of somebody else's process evict, and wait for it."""
    last, end = usage.read(), time.monotonic() + JANITOR_WAIT_S
    usage.ask_for_room(last.used_bytes - target)
    while True:
        now = usage.read()
        if now.is_known and (now.used_bytes <= target or not now.pressure_bytes):
            return
        if now.evicted_bytes != last.evicted_bytes:
            last, end = now, time.monotonic() + JANITOR_WAIT_S
        if time.monotonic() > end:
            raise BusyError(f"the janitor of {root} does not evict", hint="see the log of the server that runs it")
        time.sleep(_STEP_S)


def choose(namespaces: Sequence[NamespaceInfo], prefixes: Sequence[str]) -> list[NamespaceInfo]:
    """The namespaces whose ids begin so.

    Raises:
        UsageError: A prefix that is too short, or names none or several.
    """
    chosen = []
    for prefix in prefixes:
        found = [namespace for namespace in namespaces if namespace.id.hex().startswith(prefix.lower())]
        if len(prefix) < MIN_PREFIX:
            raise UsageError(f"{prefix!r} is too short for a namespace", hint=f"give at least {MIN_PREFIX} digits")
        if len(found) != 1:
            what = "no namespace begins" if not found else f"{len(found)} namespaces begin"
            raise UsageError(f"{what} with {prefix!r}", hint="rewarm volume info DIR lists them")
        chosen += [namespace for namespace in found if namespace not in chosen]
    return chosen


def purge(
    roots: Sequence[str], chosen: Sequence[bytes], *, advance: Callable[[int], None] = lambda _n: None
) -> Evicted:
    """Remove all records of namespaces, and what describes them where no process uses the root.

    A server that has one of them open goes on: it misses, and stores anew.

    Args:
        roots: Directories of one volume.
        chosen: Ids of the namespaces.
        advance: Called with 1 for each record.
    Raises:
        UsageError, FormatVersionError, DamageError, StorageError, OSError: The volume cannot be opened, or written to.
    """
    done = Evicted()
    for root in read_roots(roots):
        paths = RootPaths(root)
        with changing(root), closing(UsageFile(paths.usage)) as usage:
            for namespace_id in chosen:
                _purge_one(paths, namespace_id, usage, done, advance)
                if not any(not SessionReader(directory).is_dead() for directory in session_directories(paths)):
                    _remove_directories(paths.namespace(namespace_id))
    return done


def _purge_one(
    paths: RootPaths, namespace_id: bytes, usage: UsageFile, done: Evicted, advance: Callable[[int], None]
) -> None:
    record_bytes = None  # without a description, the budget has each file's own length
    with suppress(RewarmError):
        record_bytes = read_namespace_file(paths.root, namespace_id).record_bytes
    records = num_bytes = 0
    try:
        for _, entry in record_entries(paths.namespace(namespace_id)):
            with suppress(FileNotFoundError):
                size = entry.stat(follow_symlinks=False).st_size if record_bytes is None else record_bytes
                remove_record(entry.path)
                num_bytes += size
                records += 1
                advance(1)
    finally:
        usage.free(num_bytes)
        done.num_records += records
        done.num_bytes += num_bytes


def _remove_directories(directory: str) -> None:
    """Remove what is left of a namespace; what does not belong there stays, with the directory that it is in."""
    with suppress(FileNotFoundError, NotADirectoryError):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, NAMESPACE_FILE))
        for name in os.listdir(directory):
            with suppress(OSError):
                os.rmdir(os.path.join(directory, name))
        with suppress(OSError):
            os.rmdir(directory)
