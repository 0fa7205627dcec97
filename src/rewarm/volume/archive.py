"""A volume's records in one tar file, and back: docs/format/archive-v1.md.

Export takes whole records only. Import takes nothing on trust: each record is checked like one that comes off flash,
then stored like one that a server stores, through the budget; so it can be ended at any time, and started again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

from rewarm.engine import AlignedBuffer, EngineConfig, open_engine
from rewarm.engine.checks import MAX_PAYLOAD_BYTES
from rewarm.engine.memory import PAGE_BYTES
from rewarm.errors import DamageError, FormatVersionError, StorageError, UsageError
from rewarm.units import MIB, format_size
from rewarm.volume.check import RecordChecker, check_record
from rewarm.volume.count import count_namespace, described_namespaces, record_entries
from rewarm.volume.evict import evict_until
from rewarm.volume.handles import StoreHandle
from rewarm.volume.layout import NamespaceFile, RootPaths, identity_id, namespace_ids, read_roots, to_text
from rewarm.volume.namespace import Namespace
from rewarm.volume.tar import Member, read_members, write_end, write_member
from rewarm.volume.usage import read_usage
from rewarm.volume.volume import Volume

HEAD_NAME, MANIFEST_NAME = "rewarm.archive", "rewarm.manifest"
ARCHIVE_VERSION = 1
_RECORD_NAME = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.rec")
_MAX_HEAD_BYTES = 64 * MIB
_MAX_BUFFERS, _BUFFER_BYTES = 8, 256 * MIB
_PIECE_BYTES = MIB
_TRIES = 5
_STEP_S = 0.05
_ROOM_SHARE = 8
"""What is evicted at once where no janitor does it is at most this part of a root, but for one record."""


@dataclass(slots=True)
class Exported:
    """What went into an archive."""

    num_records: int = 0
    num_bytes: int = 0
    num_left_out: int = 0
    """Damaged, of a newer format, or not to be read."""


@dataclass(slots=True)
class Imported:
    """What came out of an archive."""

    num_records: int = 0
    """Stored by this import."""
    num_present: int = 0
    """That were there before."""
    num_bytes: int = 0
    """Read and checked, of both."""


def export_archive(
    roots: Sequence[str],
    stream: BinaryIO,
    *,
    only: Collection[bytes] | None = None,
    advance: Callable[[int], None] = lambda _n: None,
) -> Exported:
    """Write the records of a volume into an archive, while servers may use it.

    Args:
        roots: Directories of one volume.
        stream: Where the archive goes.
        only: Namespace ids; None: all.
        advance: Called with 1 for each record.
    Raises:
        UsageError, FormatVersionError, DamageError, StorageError: The volume cannot be opened.
        OSError: The stream took no more.
    """
    done = Exported()
    files = read_roots(roots)
    chosen: list[tuple[RootPaths, NamespaceFile]] = []
    for root in files:
        paths = RootPaths(root)
        described = {n.id: n for n in described_namespaces(paths)}
        for namespace_id in namespace_ids(root):
            if namespace_id in described and (only is None or namespace_id in only):
                chosen.append((paths, described[namespace_id]))
            elif only is None or namespace_id in only:
                done.num_left_out += count_namespace(paths, namespace_id)[0]
    _write_head(stream, {n.id: n for _, n in chosen}, next(iter(files.values())).volume_id)
    with tempfile.TemporaryFile() as manifest:
        for paths, namespace in chosen:
            _export_namespace(paths, namespace, stream, manifest, done, advance)
        num_bytes = manifest.tell()
        manifest.seek(0)
        pieces = (memoryview(piece) for piece in iter(lambda: manifest.read(_PIECE_BYTES), b""))
        write_member(stream, MANIFEST_NAME, num_bytes, int(time.time()), pieces)
    write_end(stream)
    return done


def _write_head(stream: BinaryIO, namespaces: Mapping[bytes, NamespaceFile], volume_id: str) -> None:
    head = to_text(
        {
            "format": HEAD_NAME,
            "version": ARCHIVE_VERSION,
            "volume_id": volume_id,
            "created_ns": time.time_ns(),
            "namespaces": [
                {"id": n.id.hex(), "payload_bytes": n.payload_bytes, "identity": dict(n.identity)}
                for n in namespaces.values()
            ],
        }
    )
    write_member(stream, HEAD_NAME, len(head), int(time.time()), iter([memoryview(head)]))


def _export_namespace(
    paths: RootPaths,
    namespace: NamespaceFile,
    stream: BinaryIO,
    manifest: IO[bytes],
    done: Exported,
    advance: Callable[[int], None],
) -> None:
    with closing(RecordChecker(namespace)) as checker:
        for key, entry in record_entries(paths.namespace(namespace.id)):
            advance(1)
            if checker.check(entry.path, key) != 0:
                done.num_left_out += os.path.lexists(entry.path)
                continue
            name = f"{namespace.id.hex()}/{key.hex()[:2]}/{entry.name}"
            write_member(stream, name, namespace.record_bytes, checker.created_ns // 10**9, iter([checker.record]))
            manifest.write(_manifest_line(checker.record, name))
            done.num_records += 1
            done.num_bytes += namespace.record_bytes


def _manifest_line(record: memoryview, name: str) -> bytes:
    """As sha256sum writes it, so that ``sha256sum -c rewarm.manifest`` checks an unpacked archive."""
    return f"{hashlib.sha256(record).hexdigest()}  {name}\n".encode()


class ArchiveReader:
    """Takes an archive apart and believes nothing of it: each call raises DamageError where it is not as it should be.

    Raises:
        DamageError: No archive of Rewarm, or its head is damaged.
        FormatVersionError: Of a newer format.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._members = read_members(stream)
        self._manifest = hashlib.sha256()
        self._manifest_bytes = 0
        self.namespaces = {n.id: n for n in _read_head(next(self._members, None))}

    @property
    def largest_bytes(self) -> int:
        """Length of the largest record that may come."""
        return max((n.record_bytes for n in self.namespaces.values()), default=PAGE_BYTES)

    def read_record(self, buffer: memoryview) -> tuple[NamespaceFile, bytes] | None:
        """Read the next record and check it.

        Args:
            buffer: Room for the largest record; it begins with the record's file.
        Returns:
            Namespace and key; None at the end of the archive, once its manifest was found right.
        Raises:
            DamageError: The archive is cut, or has anything that export_archive() does not write.
        """
        member = next(self._members, None)
        if member is None:
            raise DamageError("the archive has no manifest: it is cut short")
        if member.name == MANIFEST_NAME:
            self._check_manifest(member)
            return None
        match = _RECORD_NAME.fullmatch(member.name)
        namespace = self.namespaces.get(bytes.fromhex(match[1])) if match else None
        if match is None or namespace is None:
            raise DamageError(f"the archive has {member.name[:200]!a}, which is no record of its namespaces")
        if member.num_bytes != namespace.record_bytes:
            raise DamageError(f"the archive has a record of {member.num_bytes} bytes, not {namespace.record_bytes}")
        key, record = bytes.fromhex(match[3]), buffer[: namespace.record_bytes]
        member.read_into(record)
        check_record(record, key, namespace)
        line = _manifest_line(record, member.name)
        self._manifest.update(line)
        self._manifest_bytes += len(line)
        return namespace, key

    def _check_manifest(self, member: Member) -> None:
        digest = hashlib.sha256()
        left = member.num_bytes if member.num_bytes == self._manifest_bytes else 0
        while left:
            piece = bytearray(min(left, _PIECE_BYTES))
            member.read_into(memoryview(piece))
            digest.update(piece)
            left -= len(piece)
        if member.num_bytes != self._manifest_bytes or digest.digest() != self._manifest.digest():
            raise DamageError("the archive's manifest does not match its records: some are missing or were added")
        if next(self._members, None) is not None:
            raise DamageError("the archive goes on after its manifest")


def _read_head(member: Member | None) -> list[NamespaceFile]:
    if member is None or member.name != HEAD_NAME or member.num_bytes > _MAX_HEAD_BYTES:
        raise DamageError("this is no archive of Rewarm", hint="rewarm volume export writes one")
    content = bytearray(member.num_bytes)
    member.read_into(memoryview(content))
    try:
        document = json.loads(content)
        if document["format"] != HEAD_NAME or type(document["version"]) is not int or document["version"] < 1:
            raise DamageError("this is no archive of Rewarm")
        if document["version"] > ARCHIVE_VERSION:
            raise FormatVersionError("the archive", found=document["version"], known=ARCHIVE_VERSION)
        return [_described(entry) for entry in document["namespaces"]]
    except (ValueError, TypeError, KeyError, RecursionError, UsageError) as error:
        raise DamageError("the head of the archive says nothing sensible") from error


def _described(entry: Mapping[str, Any]) -> NamespaceFile:
    identity, payload_bytes = entry["identity"], entry["payload_bytes"]
    if not isinstance(identity, dict) or type(payload_bytes) is not int or not 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
        raise ValueError("fields of the wrong kind")
    namespace = NamespaceFile(identity_id(identity), payload_bytes, identity)
    if namespace.id.hex() != entry["id"]:
        raise ValueError("an identity that is not its id's")
    return namespace


def import_archive(
    stream: BinaryIO, roots: Sequence[str], *, advance: Callable[[int], None] = lambda _n: None
) -> Imported:
    """Store the records of an archive in a volume.

    Args:
        stream: The archive.
        roots: Directories of one volume.
        advance: Called with the bytes of each record.
    Raises:
        DamageError: The archive is cut, or has anything that export_archive() does not write; records that came
            before that were whole and stay.
        FormatVersionError: An archive of a newer format.
        StorageError: The volume cannot be opened, or takes no more records.
    """
    reader = ArchiveReader(stream)
    with ExitStack() as stack:
        engine = stack.enter_context(closing(open_engine(EngineConfig())))
        volume = stack.enter_context(closing(Volume.open(roots, engine=engine)))
        importer = _Importer(volume, reader)
        stack.callback(importer.close)
        importer.run(advance)
        return importer.done


class _Importer:
    """Stores the records of an archive, a few at once."""

    def __init__(self, volume: Volume, reader: ArchiveReader) -> None:
        self.done = Imported()
        self._volume = volume
        self._reader = reader
        self._namespaces = {
            n.id: volume.namespace(n.identity, payload_bytes=n.payload_bytes) for n in reader.namespaces.values()
        }
        volume.wait_scanned()
        count = max(2, min(_MAX_BUFFERS, _BUFFER_BYTES // reader.largest_bytes))
        self._free = [AlignedBuffer(reader.largest_bytes) for _ in range(count)]
        self._under_way: list[tuple[AlignedBuffer, Namespace, bytes, bool, StoreHandle]] = []

    def run(self, advance: Callable[[int], None]) -> None:
        """All of them."""
        while found := self._reader.read_record(self._free[-1].view):
            file, key = found
            namespace, buffer = self._namespaces[file.id], self._free.pop()
            is_present = namespace.contains(key)
            self.done.num_bytes += file.record_bytes
            handle = namespace.store([(key, buffer.address + PAGE_BYTES)])
            self._under_way.append((buffer, namespace, key, is_present, handle))
            advance(file.record_bytes)
            if not self._free:
                self._settle()
        while self._under_way:
            self._settle()

    def close(self) -> None:
        """Wait for what is under way, then free the memory."""
        for *_, handle in self._under_way:
            handle.wait()
        for buffer in [*self._free, *(entry[0] for entry in self._under_way)]:
            buffer.close()

    def _settle(self) -> None:
        """Bring the oldest store to its end; one that found no room is tried again."""
        buffer, namespace, key, is_present, handle = self._under_way[0]
        record_bytes = namespace.file.record_bytes
        for tries_left in reversed(range(_TRIES)):
            handle.wait()
            if handle.results() == [True]:
                break
            if not tries_left or all(record_bytes > root.file.capacity_bytes for root in self._volume.roots):
                raise self._refusal(record_bytes)
            self._make_room(record_bytes)
            handle = namespace.store([(key, buffer.address + PAGE_BYTES)])
            self._under_way[0] = (buffer, namespace, key, is_present, handle)
        self.done.num_present += is_present
        self.done.num_records += not is_present
        self._under_way.pop(0)
        self._free.append(buffer)

    def _make_room(self, record_bytes: int) -> None:
        """Evict where a root is full, in case that no janitor lives long enough to; then wait until a root is used."""
        for root in self._volume.roots:
            usage = read_usage(root.paths.usage)
            is_full = usage.pressure_bytes > 0 or usage.used_bytes + record_bytes > root.file.capacity_bytes
            if is_full and record_bytes <= root.file.capacity_bytes:
                share_bytes = root.file.capacity_bytes // _ROOM_SHARE
                _evict(root.name, max(record_bytes, min(_MAX_BUFFERS * record_bytes, share_bytes)))
        while all(root.health.stores.is_on for root in self._volume.roots):
            time.sleep(_STEP_S)

    def _refusal(self, record_bytes: int) -> StorageError:
        """Why the volume takes no record, root by root."""
        reasons = []
        for root in self._volume.roots:
            capacity_bytes, number = root.file.capacity_bytes, root.health.store_error
            if record_bytes > capacity_bytes:
                may = f"a record of {format_size(record_bytes)} does not fit into {format_size(capacity_bytes)}"
                reasons.append(f"{root.name}: {may}")
            elif number in {0, errno.ENOSPC, errno.EDQUOT}:
                used, numbers = read_usage(root.paths.usage).used_bytes, os.statvfs(root.name)
                free = format_size(numbers.f_bavail * numbers.f_frsize)
                reasons.append(
                    f"{root.name}: {format_size(used)} of {format_size(capacity_bytes)} used, {free} free on its disk"
                )
            else:
                reasons.append(f"{root.name}: {os.strerror(number)}")
        return StorageError(
            f"the volume takes no more records ({'; '.join(reasons)}); {self.done.num_records} were imported",
            hint="started again, the import goes on where it was",
        )


def _evict(root: str, room_bytes: int) -> None:
    evict_until([root], lambda _capacity: room_bytes)
