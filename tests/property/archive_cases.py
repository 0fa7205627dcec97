"""Archives for fuzzing: a whole one, and what becomes of its members, headers and bytes under seeded mutation.

Tar checksums are made right again, and often the manifest too: what lies behind a checksum is what a reader must not
believe. Records are only ever damaged without their own checksum, so each record that is taken has to be an original.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tarfile
from dataclasses import dataclass, field, replace

import google_crc32c
from headerpage import PAGE, seal

PAYLOAD = 5000
RECORD = 3 * PAGE
IDENTITY = {"model": "fuzz", "tokens": 16}
BLOCK = 512


def _canonical(identity: object) -> bytes:
    return json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()


NAMESPACE = hashlib.sha256(_canonical(IDENTITY)).digest()


@dataclass(frozen=True)
class Entry:
    """One file of an archive: its tar header's fields, and its bytes."""

    name: str
    data: bytes
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    size: int | None = None
    """What the header says, where that is not the length."""


@dataclass
class Archive:
    """What one case is made of."""

    head: Entry
    records: list[Entry]
    manifest: Entry
    tail: bytes = bytes(2 * BLOCK)
    expected: set[bytes] | None = field(default_factory=set)
    """Keys that an import has to take; None: it has to refuse."""


def make_record(key: bytes) -> bytes:
    """A whole record of a key: docs/format/volume-v1.md, by hand."""
    payload = hashlib.shake_256(key).digest(PAYLOAD).ljust(2 * PAGE, b"\0")
    page = bytearray(PAGE)
    crc = int(google_crc32c.value(payload))
    struct.pack_into("<4sIHHIQII32s32sQ", page, 0, b"RWR1", 0, 1, 0, 1, PAYLOAD, 1 << 20, 1, key, NAMESPACE, 1)
    struct.pack_into("<I", page, 1024, crc)
    return seal(page) + payload


def record_entry(key: bytes) -> Entry:
    """A record as it lies in an archive."""
    return Entry(f"{NAMESPACE.hex()}/{key.hex()[:2]}/{key.hex()}.rec", make_record(key))


def make_manifest(records: list[Entry]) -> Entry:
    """The manifest of these members."""
    lines = [f"{hashlib.sha256(entry.data).hexdigest()}  {entry.name}\n" for entry in records]
    return Entry("rewarm.manifest", "".join(lines).encode())


def make_head(**change: object) -> Entry:
    """The head, with fields changed or, where the value is ..., left out."""
    namespace = {"id": NAMESPACE.hex(), "payload_bytes": PAYLOAD, "identity": IDENTITY}
    head = {"format": "rewarm.archive", "version": 1, "volume_id": "0" * 32, "created_ns": 1, "namespaces": [namespace]}
    head.update(change)
    return Entry("rewarm.archive", json.dumps({k: v for k, v in head.items() if v is not ...}).encode())


_KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(4)]
_RECORDS = [record_entry(key) for key in _KEYS]
STRANGE: tuple[object, ...] = (..., None, True, 0, -1, 2, 1.5, "x", (), [[]], [{}], 1 << 70, "rewarm.archive\0")
"""JSON has no tuples: () is an empty list there."""


def whole(rng: random.Random) -> Archive:
    """An archive as export writes it."""
    numbers = rng.sample(range(len(_KEYS)), rng.randint(0, 3))
    records = [_RECORDS[n] for n in numbers]
    return Archive(make_head(), records, make_manifest(records), expected={_KEYS[n] for n in numbers})


def _records_order(rng: random.Random, archive: Archive) -> None:
    """Left out, twice, or in another order; the manifest follows now and then."""
    records = archive.records
    if not records:
        return
    action = rng.randrange(3)
    if action == 0:
        records.pop(rng.randrange(len(records)))
    elif action == 1:
        records.append(rng.choice(records))
    else:
        rng.shuffle(records)
    follows = rng.random() < 0.5
    same = make_manifest(records) == archive.manifest
    if follows:
        archive.manifest = make_manifest(records)
        if archive.expected is not None:
            archive.expected = {bytes.fromhex(entry.name[-68:-4]) for entry in records}
    elif not same:
        archive.expected = None


def _record_bytes(rng: random.Random, archive: Archive) -> None:
    """A record is damaged, cut, lengthened or another one's; the manifest says that this is right."""
    if not archive.records:
        return
    at = rng.randrange(len(archive.records))
    entry = archive.records[at]
    data = bytearray(entry.data)
    action = rng.randrange(4)
    if action == 0:
        for _ in range(rng.choice([1, 1, 2, 64])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif action == 1:
        del data[rng.randrange(len(data)) :]
    elif action == 2:
        data += rng.randbytes(rng.choice([1, BLOCK, PAGE]))
    else:
        data = bytearray(rng.choice(_RECORDS).data)
    if bytes(data) != entry.data:
        archive.expected = None
    archive.records[at] = replace(entry, data=bytes(data))
    archive.manifest = make_manifest(archive.records)


NAMES = (
    "", "/etc/passwd", "../../escape", "rewarm.archive", "rewarm.manifest", "a" * 99, f"{'0' * 64}/00/{'0' * 64}.rec",
    f"{NAMESPACE.hex()}/{'0' * 64}.rec", f"{NAMESPACE.hex()}/zz/{'z' * 64}.rec", "./rewarm.archive", "namespace.json",
    f"{NAMESPACE.hex().upper()}/00/{'0' * 64}.rec", f"{NAMESPACE.hex()}/00/../{'0' * 60}.rec", "\u00e9", "a\nb", "%s%n",
)  # fmt: skip


def _member(rng: random.Random, archive: Archive) -> None:
    """A member's name, kind, link or length is another."""
    every = [archive.head, *archive.records, archive.manifest]
    at = rng.randrange(len(every))
    entry = every[at]
    action = rng.randrange(4)
    if action == 0:
        changed = replace(entry, name=rng.choice([*NAMES, entry.name[:-1], entry.name + "x", entry.name.upper()]))
    elif action == 1:
        changed = replace(entry, kind=rng.choice([b"1", b"2", b"3", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S"]))
    elif action == 2:
        changed = replace(entry, link=rng.choice(["/etc/passwd", "x" * 99, "rewarm.archive"]))
    else:
        near = [len(entry.data) + 1, len(entry.data) - 1, 0, 1, RECORD, 1 << 33, (1 << 33) - 1, 1 << 62]
        changed = replace(entry, size=max(0, rng.choice(near)))
    if changed != entry and (changed.size is None or changed.size != len(entry.data)):
        archive.expected = None
    every[at] = changed
    archive.head, archive.records, archive.manifest = every[0], every[1:-1], every[-1]


def _head(rng: random.Random, archive: Archive) -> None:
    """The head's JSON says something else, or nothing."""
    name = rng.choice(["format", "version", "namespaces", "id", "payload_bytes", "identity", "volume_id", "nonsense"])
    value = rng.choice(STRANGE)
    if name == "nonsense":
        archive.head = replace(archive.head, data=rng.choice([b"", b"{", b"[" * 100_000, b"\xff", b"null", b'{"a":1}']))
    elif name in {"id", "payload_bytes", "identity"}:
        namespace = {"id": NAMESPACE.hex(), "payload_bytes": PAYLOAD, "identity": IDENTITY, name: value}
        archive.head = make_head(namespaces=[{k: v for k, v in namespace.items() if v is not ...}])
    else:
        archive.head = make_head(**{name: value})
    is_empty = not archive.records and (name, value) in [("namespaces", ()), ("payload_bytes", 2)]
    if name != "volume_id" and not is_empty:
        archive.expected = None


def _end(rng: random.Random, archive: Archive) -> None:
    """What comes after the manifest."""
    action = rng.randrange(3)
    if action == 0:
        archive.tail += rng.randbytes(rng.choice([1, BLOCK, PAGE]))  # not read
    elif action == 1:
        archive.tail = bytes(BLOCK)
    else:
        archive.tail = to_bytes(rng.choice([archive.head, archive.manifest, *_RECORDS])) + archive.tail
        archive.expected = None


_MUTATIONS = (_records_order, _record_bytes, _record_bytes, _member, _member, _head, _end)


def to_bytes(entry: Entry) -> bytes:
    """A member in tar's form."""
    info = tarfile.TarInfo(entry.name)
    info.size = len(entry.data) if entry.size is None else entry.size
    info.type, info.linkname, info.mode = entry.kind, entry.link, 0o600
    try:
        header = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    except ValueError:  # too large for ustar: the GNU spelling
        header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return header + entry.data + bytes(-len(entry.data) % BLOCK)


def archive_case(seed: int, number: int) -> tuple[bytes, set[bytes] | None, bool]:
    """Case ``number`` of a seed: the bytes, the keys to take (None: to be refused), and whether that is certain.

    It is not where several things were changed, or bytes blindly: one change may have undone another.
    """
    rng = random.Random((seed << 40) + number)
    archive = whole(rng)
    num_changes = rng.choice([0, 1, 1, 1, 2, 3])
    for _ in range(num_changes):
        rng.choice(_MUTATIONS)(rng, archive)
    raw = b"".join(map(to_bytes, [archive.head, *archive.records, archive.manifest])) + archive.tail
    if rng.random() < 0.75:
        return raw, archive.expected, num_changes < 2
    blind = bytearray(raw)
    if rng.random() < 0.5:
        del blind[rng.randrange(len(blind)) :]
    else:
        for _ in range(rng.choice([1, 1, 8])):
            blind[rng.randrange(len(blind))] ^= 1 << rng.randrange(8)
    return bytes(blind), archive.expected, False
