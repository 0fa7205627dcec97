"""Reads every record of a volume and says which are not what their names say."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from rewarm.engine import Engine, EngineConfig, open_engine
from rewarm.engine.base import Completion, ReadRecord, ToSlot
from rewarm.errors import DamageError, FormatVersionError, StorageError, UsageError
from rewarm.volume.check import remove_record
from rewarm.volume.count import record_entries
from rewarm.volume.layout import NamespaceFile, RootPaths, namespace_ids, read_namespace_file, read_roots
from rewarm.volume.usage import UsageFile

_BATCH_RECORDS = 8
_BATCHES = 3
"""Under way at once: one is read while another is looked at."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a verify found."""

    path: str
    reason: str
    """In a few words."""
    is_removed: bool = False


@dataclass(slots=True)
class VerifyReport:
    """What a verify saw."""

    num_records: int = 0
    """Read, whole or not."""
    num_bytes: int = 0
    damaged: list[Problem] = field(default_factory=list)
    """What has a record's name and is none; to every server it is a miss."""
    unreadable: list[Problem] = field(default_factory=list)
    """What the storage refused to give; it may be whole."""
    skipped: list[Problem] = field(default_factory=list)
    """Namespaces of a newer format."""


def verify_volume(
    roots: Sequence[str], *, repair: bool = False, advance: Callable[[int], None] = lambda _n: None
) -> VerifyReport:
    """Read every record of a volume whole, while servers may use it.

    Args:
        roots: Directories of one volume; those that are left out are not looked at.
        repair: Remove what is damaged.
        advance: Called with 1 for each record.
    Raises:
        UsageError, FormatVersionError, DamageError, StorageError: The volume cannot be opened.
    """
    report = VerifyReport()
    for root in read_roots(roots):
        paths = RootPaths(root)
        with closing(UsageFile(paths.usage)) as usage:
            look = _Look(paths, usage if repair else None, report, advance)
            for namespace_id in namespace_ids(root):
                look.verify_namespace(namespace_id)
    return report


class _Look:
    """At one root."""

    def __init__(
        self, paths: RootPaths, usage: UsageFile | None, report: VerifyReport, advance: Callable[[int], None]
    ) -> None:
        self._paths = paths
        self._usage = usage
        """None: nothing is removed."""
        self._report = report
        self._advance = advance

    def verify_namespace(self, namespace_id: bytes) -> None:
        try:
            namespace = read_namespace_file(self._paths.root, namespace_id)
        except FormatVersionError as error:
            self._report.skipped.append(Problem(self._paths.namespace(namespace_id), error.message))
        except StorageError as error:
            self._report.unreadable.append(Problem(error.path, os.strerror(error.errno)))
        except (UsageError, DamageError) as error:
            for _, entry in record_entries(self._paths.namespace(namespace_id), self._unreadable):
                self._report.num_records += 1
                self._damaged(entry.path, f"its namespace has no description: {error.message}", counted_bytes=None)
                self._advance(1)
        else:
            self._verify_records(namespace)

    def _verify_records(self, namespace: NamespaceFile) -> None:
        slot_bytes = namespace.record_bytes
        ring_bytes = slot_bytes * _BATCH_RECORDS * (_BATCHES + 1)
        under_way: deque[tuple[Completion, list[str]]] = deque()
        with closing(open_engine(EngineConfig(ring_bytes=ring_bytes, slot_bytes=slot_bytes))) as engine:
            for batch in self._batches(namespace):
                under_way.append((_submit(engine, namespace, batch), [path for path, _ in batch]))
                if len(under_way) == _BATCHES:
                    self._take(namespace, *under_way.popleft())
            while under_way:
                self._take(namespace, *under_way.popleft())

    def _batches(self, namespace: NamespaceFile) -> Iterator[list[tuple[str, bytes]]]:
        """(path, key) of files that have the right kind and size."""
        batch = []
        for key, entry in record_entries(self._paths.namespace(namespace.id), self._unreadable):
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or found.st_size != namespace.record_bytes:
                    self._report.num_records += 1
                    self._damaged(entry.path, f"not a file of {namespace.record_bytes} bytes", namespace.record_bytes)
                    self._advance(1)
                    continue
                batch.append((entry.path, key))
                if len(batch) == _BATCH_RECORDS:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _take(self, namespace: NamespaceFile, completion: Completion, batch: Sequence[str]) -> None:
        completion.wait()
        for index, (path, result) in enumerate(zip(batch, completion.results(), strict=True)):
            self._advance(1)
            if result == errno.ENOENT:
                continue  # evicted since
            self._report.num_records += 1
            if result == 0:
                completion.release(index)
                self._report.num_bytes += namespace.record_bytes
            elif result == errno.EBADMSG:
                self._damaged(path, "a checksum or the name does not match", namespace.record_bytes)
            else:
                self._report.unreadable.append(Problem(path, os.strerror(result)))

    def _damaged(self, path: str, reason: str, counted_bytes: int | None) -> None:
        """Note damage, and remove it; ``counted_bytes`` is what the budget has for it, None: the file's length."""
        is_removed = False
        if self._usage is not None:
            try:
                num_bytes = os.stat(path, follow_symlinks=False).st_size
                remove_record(path)
                is_removed = True
                self._usage.free(num_bytes if counted_bytes is None else counted_bytes)
            except FileNotFoundError:
                pass  # evicted since
            except OSError as error:
                reason += f"; {'not given back to the budget' if is_removed else 'not removed'}: {error.strerror}"
        self._report.damaged.append(Problem(path, reason, is_removed))

    def _unreadable(self, error: OSError) -> None:
        self._report.unreadable.append(Problem(os.fsdecode(error.filename), os.strerror(error.errno or errno.EIO)))


def _submit(engine: Engine, namespace: NamespaceFile, batch: Sequence[tuple[str, bytes]]) -> Completion:
    return engine.submit(
        [ReadRecord(path, key, namespace.id, namespace.payload_bytes, ToSlot()) for path, key in batch]
    )
