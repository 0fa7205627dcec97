"""What a volume holds, for people and for reports: names are counted, no record is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rewarm.engine.record import record_bytes
from rewarm.engine.scan import scan_keys
from rewarm.errors import RewarmError
from rewarm.volume.count import count_namespace, quarantined_bytes
from rewarm.volume.index import table_bytes
from rewarm.volume.layout import (
    FORMAT_VERSION,
    RootFile,
    RootPaths,
    namespace_ids,
    read_namespace_file,
    read_roots,
    read_small_file,
)
from rewarm.volume.open_root import device_bytes
from rewarm.volume.session import SessionReader, session_directories
from rewarm.volume.usage import Usage, read_usage
from rewarm.volume.wear import DAY_HOURS, Wear, read_wear

MANY_RECORDS = 5_000_000
"""Above that opening takes seconds and a janitor's memory a GiB: larger chunks are the remedy."""
_MAX_TEXT = 64


@dataclass(frozen=True, slots=True)
class RootInfo:
    """One root."""

    path: str
    file: RootFile
    usage: Usage
    disk_free_bytes: int
    quarantined_bytes: int
    pids: list[int]
    """Processes that store or load there now, on this host as far as their numbers are known."""
    janitor_pid: int
    """The last one that took the lock; 0: none ever."""
    wear: Wear
    device_bytes: int
    """Size of the file system."""

    def written_day_bytes(self, now_s: float) -> int:
        """Written by all processes in the last 24 whole hours and the one that goes on."""
        return self.wear.written_since(DAY_HOURS, now_s)


@dataclass(slots=True)
class NamespaceInfo:
    """One namespace, over all roots that were named."""

    id: bytes
    payload_bytes: int = 0
    """0: its description cannot be read."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    num_records: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """All of it."""

    id: str
    roots: list[RootInfo]
    namespaces: list[NamespaceInfo]
    scan_s: float
    """What a server waits, in the background, until it knows all that is there."""
    version: int = FORMAT_VERSION

    @property
    def capacity_bytes(self) -> int:
        """Of the roots that were named."""
        return sum(root.file.capacity_bytes for root in self.roots)

    @property
    def used_bytes(self) -> int:
        """Records, those being written, and what is in quarantine, by the budget."""
        return sum(root.usage.used_bytes for root in self.roots)

    @property
    def num_records(self) -> int:
        """Files with a record's name."""
        return sum(namespace.num_records for namespace in self.namespaces)

    @property
    def index_bytes(self) -> int:
        """Memory of the index in a process that uses all the namespaces."""
        return sum(table_bytes(namespace.num_records) for namespace in self.namespaces)


def volume_info(roots: Sequence[str]) -> VolumeInfo:
    """Look at a volume; nothing is changed, and servers may use it meanwhile.

    Raises:
        UsageError, FormatVersionError, DamageError, StorageError: The volume cannot be opened.
    """
    files = read_roots(roots)
    namespaces: dict[bytes, NamespaceInfo] = {}
    scan_s = 0.0
    for root in files:
        for namespace_id in namespace_ids(root):
            known = namespaces.setdefault(namespace_id, NamespaceInfo(namespace_id))
            scan_s += _add_root(known, root)
    infos = [root_info(root, file) for root, file in files.items()]
    return VolumeInfo(infos[0].file.volume_id, infos, list(namespaces.values()), scan_s)


def _add_root(namespace: NamespaceInfo, root: str) -> float:
    """Add what one root holds of a namespace; returns the seconds of the scan."""
    paths = RootPaths(root)
    try:
        file = read_namespace_file(root, namespace.id)
    except RewarmError as error:
        namespace.trouble = error.message
        num_records, num_bytes = count_namespace(paths, namespace.id)
        namespace.num_records += num_records
        namespace.num_bytes += num_bytes
        return 0.0
    started = time.monotonic()
    num_records = len(scan_keys(paths.namespace(namespace.id)))
    scan_s = time.monotonic() - started
    namespace.payload_bytes, namespace.identity = file.payload_bytes, file.identity
    namespace.num_records += num_records
    namespace.num_bytes += num_records * record_bytes(file.payload_bytes)
    return scan_s


def root_info(root: str, file: RootFile) -> RootInfo:
    """What one root says of itself; counts nothing."""
    paths = RootPaths(root)
    numbers = os.statvfs(root)
    return RootInfo(
        path=root,
        file=file,
        usage=read_usage(paths.usage),
        disk_free_bytes=numbers.f_bavail * numbers.f_frsize,
        quarantined_bytes=quarantined_bytes(paths),
        pids=_live_pids(paths),
        janitor_pid=_janitor_pid(paths),
        wear=read_wear(paths.wear),
        device_bytes=device_bytes(root),
    )


def _live_pids(paths: RootPaths) -> list[int]:
    pids = []
    for directory in session_directories(paths):
        with suppress(OSError, ValueError):
            if not SessionReader(directory).is_dead():
                pids.append(int(os.path.basename(directory).partition("-")[0]))
    return sorted(pids)


def _janitor_pid(paths: RootPaths) -> int:
    with suppress(OSError, ValueError):
        return int(read_small_file(paths.janitor_lock, 32))
    return 0


def flatten(identity: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted name to short printable text of every value that says something; long ones are cut."""
    flat: dict[str, str] = {}
    for name, value in identity.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        elif value not in ("", None, [], {}):
            flat[_printable(dotted)] = _printable(value if isinstance(value, str) else json.dumps(value))
    return flat


def _printable(text: str) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= _MAX_TEXT else f"{plain[: _MAX_TEXT - 3]}..."
