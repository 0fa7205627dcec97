"""The place of a volume's host tier: a directory in memory, made, checked and shared by the servers of a node."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from rewarm.engine.base import Engine
from rewarm.engine.workers import HUGETLBFS, TMPFS, file_system_type
from rewarm.errors import BusyError, DamageError, RewarmError, StorageError, UnsupportedError, UsageError
from rewarm.metrics import BY_NAME, Counters
from rewarm.units import MIB, format_size
from rewarm.volume.create import create_volume
from rewarm.volume.host_memory import free_memory
from rewarm.volume.info import RootInfo, root_info
from rewarm.volume.layout import DIR_MODE, RootFile, RootPaths, open_regular, read_root_file, replace_file, to_text
from rewarm.volume.session import SessionReader, session_directories
from rewarm.volume.tiered import AnyVolume, TieredVolume
from rewarm.volume.usage import read_usage
from rewarm.volume.volume import Volume

_log = logging.getLogger(__name__)

LOCK_WAIT_S = 30.0
RESERVE_BYTES = 32 * MIB
"""Of the tmpfs, beyond the records: directories, logs, the order of eviction, and what servers share there."""
_LOCK_STEP_S = 0.05
_SHM_HINT = "lower kv.host_bytes, or give the tmpfs more room: docker run --shm-size, or mount -o remount,size="
_OWN_HINT = "name another directory with kv.host_root, one that only the server's user can write to"

_OWN = {
    "rewarm_volume_records": "rewarm_host_records",
    "rewarm_evicted_records_total": "rewarm_host_evicted_records_total",
    "rewarm_evicted_bytes_total": "rewarm_host_evicted_bytes_total",
}
"""Metrics of a volume -> what they are called of the host tier. Those that name the root are called the same."""
_OF_WEAR = {"rewarm_root_written_day_bytes", "rewarm_root_dwpd"}
"""Memory does not wear."""


class HostCounters(Counters):
    """Takes what a host volume counts, and hands on to the server's what is shown of it."""

    def __init__(self, server: Counters) -> None:
        super().__init__()
        self._server = server

    def watch(self, refresh: Callable[[], None]) -> None:
        """See Counters."""
        self._server.watch(refresh)

    def unwatch(self, refresh: Callable[[], None]) -> None:
        """See Counters."""
        self._server.unwatch(refresh)

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """See Counters."""
        super().add(name, amount, *labels)
        if shown := _shown(name):
            self._server.add(shown, amount, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        """See Counters."""
        super().set(name, value, *labels)
        if shown := _shown(name):
            self._server.set(shown, value, *labels)

    def forget(self, label: str) -> None:
        """See Counters."""
        super().forget(label)
        self._server.forget(label)


def _shown(name: str) -> str:
    """What a server calls this metric of its host tier; empty: nothing."""
    names_root = "root" in BY_NAME[name].labels and name not in _OF_WEAR
    return name if names_root else _OWN.get(name, "")


def host_root(volume_id: str, place: str = "") -> str:
    """The directory of a volume's host tier.

    Args:
        volume_id: Of the volume on flash.
        place: kv.host_root; empty: a directory of this user in /dev/shm.
    """
    return os.path.join(place or f"/dev/shm/rewarm-{os.geteuid()}", volume_id)


def host_tier_info(volume_id: str, place: str) -> RootInfo | None:
    """What the host tier of a volume on this machine says of itself; None: there is none that can be read.

    Args:
        volume_id: Of the volume.
        place: As host_root() takes it.
    """
    root = host_root(volume_id, place)
    try:
        return root_info(root, read_root_file(root))
    except (OSError, RewarmError):
        return None


def with_host_tier(
    flash: Volume, *, capacity_bytes: int, place: str, engine: Engine, counters: Counters, janitor: bool
) -> AnyVolume:
    """The volume with its host tier, which is made where it is missing.

    Args:
        flash: The volume; owned by what is returned. Opened read-only, it gets a host tier that is there, or none.
        capacity_bytes: What the host tier may hold.
        place: As host_root() takes it.
        engine: Moves the bytes of the host tier; stays the caller's.
        counters: The server's.
        janitor: Start a process that evicts from the host tier, if no other one does.
    Raises:
        UsageError, UnsupportedError: A place that is not in memory, or in memory of a kind that takes no files.
        StorageError: A link or somebody else's in its place, too little memory, a place that cannot be written to.
        BusyError: Another process has been making it for a long time.
        FormatVersionError: It was made by a newer release.
    """
    root = host_root(flash.id, place)
    if flash.read_only:
        if not os.path.lexists(RootPaths(root).volume_file):
            _log.warning("there is no host tier in %s, and a server that only reads makes none", root)
            return flash
        _check_own(root)
    else:
        prepare(root, capacity_bytes)
    own = HostCounters(counters)
    host = Volume.open([root], engine=engine, counters=own, read_only=flash.read_only, janitor=janitor)
    return TieredVolume(flash, host, counters)


def prepare(root: str, capacity_bytes: int) -> None:
    """Make the volume of a host tier, or bring what is there to the size that is asked for; raises as with_host_tier().

    One process at a time does this. What is no volume is removed, a half-made one for example: the directory's name is
    a volume's id, and nobody else has business there.
    """
    place = os.path.dirname(root)
    try:
        with suppress(FileExistsError):
            os.mkdir(place, DIR_MODE)
        _check_own(place)
        _check_in_memory(place)
        with _locked(f"{root}.lock"):
            if os.path.lexists(root):
                _check_own(root)
            file = _read_root(root)
            used_bytes = 0 if file is None else read_usage(RootPaths(root).usage).used_bytes
            _check_room(root, max(0, capacity_bytes - used_bytes))
            if file is None:
                create_volume([root], capacity_bytes=capacity_bytes)
            elif file.capacity_bytes != capacity_bytes:
                _resize(root, file, capacity_bytes)
    except OSError as error:
        raise StorageError(
            f"the host tier in {root} cannot be made: {error.strerror}",
            path=root,
            errno=error.errno or 0,
            hint="kv.host_root names another place, on a tmpfs that the server's user can write to",
        ) from error


def _check_own(path: str) -> None:
    """Whoever else could write here could have this user write and remove what they like."""
    found = os.lstat(path)
    what = ""
    if stat.S_ISLNK(found.st_mode):
        what = "is a symbolic link"
    elif not stat.S_ISDIR(found.st_mode):
        what = "is not a directory"
    elif found.st_uid != os.geteuid():
        what = f"belongs to user {found.st_uid}, and the server runs as user {os.geteuid()}"
    elif found.st_mode & 0o022:
        what = f"can be written to by others (mode {stat.S_IMODE(found.st_mode):04o})"
    if what:
        raise StorageError(f"{path}, for the host tier, {what}", path=path, hint=_OWN_HINT)


def _check_in_memory(place: str) -> None:
    kind = file_system_type(place)
    if kind == HUGETLBFS:
        raise UnsupportedError(
            f"{place} is a hugetlbfs, whose files can be mapped but not written to: no record can be stored there",
            hint="name a directory on a tmpfs; mounted with huge=within_size it has large pages too",
        )
    if kind != TMPFS:
        raise UsageError(
            f"{place}, for the host tier, does not lie in memory (file system type {kind:#x})",
            hint="name a directory on a tmpfs with kv.host_root, or leave it out: /dev/shm is one",
        )


def _check_room(root: str, need_bytes: int) -> None:
    place = os.path.dirname(root)
    numbers = os.statvfs(place)
    free_bytes = max(0, numbers.f_bavail * numbers.f_frsize - RESERVE_BYTES)
    memory_bytes, what = free_memory()
    for free, of, hint in (
        (free_bytes, f"the tmpfs below {place}", _SHM_HINT),
        (memory_bytes, what, "lower kv.host_bytes, or raise the limit: files in a tmpfs count as this server's memory"),
    ):
        if need_bytes > free:
            raise StorageError(
                f"the host tier needs {format_size(need_bytes)}, and {of} has {format_size(free)} left",
                path=place,
                hint=_unused_hint(root) or hint,
            )


def _unused_hint(root: str) -> str:
    """Names the largest host tier of another volume in the same place that no server uses; empty: there is none.

    Nobody else would ever remove it: its volume may be gone, or come back.
    """
    place = os.path.dirname(root)
    unused = []
    for name in os.listdir(place):
        other = os.path.join(place, name)
        with suppress(OSError, RewarmError):
            read_root_file(other)  # else it is none
            if other != root and not _is_used(other):
                unused.append((read_usage(RootPaths(other).usage).used_bytes, other))
    used_bytes, other = max(unused, default=(0, ""))
    return f"{other} holds {format_size(used_bytes)} that no server uses now: remove it" if used_bytes else ""


def _read_root(root: str) -> RootFile | None:
    """What the volume file says; None where nothing is left that is no volume."""
    try:
        return read_root_file(root)
    except (UsageError, DamageError):
        if os.path.lexists(root):
            shutil.rmtree(root)
        return None


def _resize(root: str, file: RootFile, capacity_bytes: int) -> None:
    """A new size holds for all who open it from now on; who has it open goes by the old one."""
    if _is_used(root):
        _log.warning("the host tier keeps its size of %s while servers use it", format_size(file.capacity_bytes))
        return
    replace_file(RootPaths(root).volume_file, to_text(replace(file, capacity_bytes=capacity_bytes).to_json()))


def _is_used(root: str) -> bool:
    """Whether a process has it open to store there, as far as can be told."""
    try:
        return any(not SessionReader(directory).is_dead() for directory in session_directories(RootPaths(root)))
    except OSError:
        return True


@contextmanager
def _locked(path: str) -> Iterator[None]:
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    end = time.monotonic() + LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BusyError(
                        f"another process has held {path} for {LOCK_WAIT_S:.0f} s",
                        hint="look for one that is stopped: fuser " + path,
                    ) from None
                time.sleep(_LOCK_STEP_S)
        yield
    finally:
        os.close(descriptor)
