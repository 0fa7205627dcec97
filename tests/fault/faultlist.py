"""The faults, as data, and the seeded generator that deals them.

A case is a number and a campaign seed, nothing else: ``deal(seed, number)`` gives the same case on every machine, so
that a failing case is repeated with ``python tests/fault/run.py --seed S --case N``. Each block of 100 numbers
holds every kind in the shares below, shuffled.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from faultshim import Action, Op

if TYPE_CHECKING:
    from pathlib import Path


class Phase(Enum):
    """When the fault strikes."""

    AT_REST = "between a store and a load, in the files"
    LOAD = "during a load, in the system calls"
    STORE = "during a store, in the system calls"
    KILL_STORE = "kill -9 during a store"
    KILL_EVICT = "kill -9 during an eviction"
    KILL_IMPORT = "kill -9 during an import"


class Effect(Enum):
    """What the damaged record then is to a loader."""

    DAMAGE = "refused by a check, counted as damaged, a miss"
    ABSENT = "not there: a miss, nothing counted"
    ERROR = "an I/O error is reported: a miss, counted as an I/O error"
    HARMLESS = "served, and right"


@dataclass(frozen=True)
class Layout:
    """Where things lie in the files of one format; 0 header bytes for a format without one."""

    header_bytes: int
    used_header_bytes: int
    payload_bytes: int
    file_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Zeros after the payload."""
        return self.file_bytes - self.header_bytes - self.payload_bytes


@dataclass(frozen=True)
class Record:
    """A record on disk that a fault may touch, and others that it may borrow from."""

    path: Path
    layout: Layout
    sibling: Path
    """Another record of the same namespace."""
    stranger: Path
    """The record of the same key in another namespace (another model, say)."""


Damage = Callable[[random.Random, Record], None]


@dataclass(frozen=True)
class Order:
    """What the shim is told for a fault in the system calls."""

    action: Action
    ops: Op
    error: int = 0
    times: int = 1


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    share: int
    """Cases in each 100."""
    phase: Phase
    effect: Effect
    says: str
    """Its line in docs/guides/faults.md."""
    damage: Damage | None = None
    order: Order | None = None
    needs_janitor: bool = False
    """What stands there cannot be written over: the next store works after a janitor has put it away."""
    needs_header: bool = False
    """Makes sense only for a format with a header page, or padding."""


def _edit(path: Path, offset: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new)


def _flip(rng: random.Random, path: Path, lo: int, hi: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for at in rng.sample(range(lo * 8, hi * 8), bits):
        data[at // 8] ^= 1 << (at % 8)
    path.write_bytes(data)


def _flip_header(rng: random.Random, record: Record) -> None:
    whole_page = rng.random() < 0.4
    _flip(rng, record.path, 0, record.layout.header_bytes if whole_page else record.layout.used_header_bytes)


def _flip_payload(rng: random.Random, record: Record) -> None:
    start = record.layout.header_bytes
    _flip(rng, record.path, start, start + record.layout.payload_bytes)


def _flip_padding(rng: random.Random, record: Record) -> None:
    _flip(rng, record.path, record.layout.file_bytes - record.layout.padding_bytes, record.layout.file_bytes)


def _flip_many(rng: random.Random, record: Record) -> None:
    _flip(rng, record.path, record.layout.header_bytes, record.layout.file_bytes, bits=rng.randint(2, 64))


def _truncate(rng: random.Random, record: Record) -> None:
    size = record.layout.file_bytes
    pages = range(0, size, 4096)
    new = rng.choice([0, 1, size - 1, rng.randrange(size), rng.choice(pages), max(record.layout.header_bytes, 1)])
    with record.path.open("r+b") as file:
        file.truncate(min(new, size - 1))


def _swap(rng: random.Random, record: Record) -> None:
    mine, other = record.path.read_bytes(), record.sibling.read_bytes()
    record.path.write_bytes(other)
    record.sibling.write_bytes(mine)


def _borrow(source: str) -> Damage:
    def damage(rng: random.Random, record: Record) -> None:
        other: Path = getattr(record, source)
        record.path.write_bytes(other.read_bytes())

    return damage


def _zero_pages(rng: random.Random, record: Record) -> None:
    pages = (record.layout.file_bytes + 4095) // 4096
    count = rng.choice([1, 1, rng.randint(1, pages)])
    start = rng.randrange(pages - count + 1)
    end = min((start + count) * 4096, record.layout.file_bytes)
    _edit(record.path, start * 4096, bytes(end - start * 4096))


def _zero_all(rng: random.Random, record: Record) -> None:
    record.path.write_bytes(bytes(record.layout.file_bytes))


def _torn(rng: random.Random, record: Record) -> None:
    """The first part of one write and the rest of another, as a power cut leaves them."""
    pages = record.layout.file_bytes // 4096
    at = rng.randint(1, max(1, pages - 1)) * 4096
    _edit(record.path, at, record.sibling.read_bytes()[at:])


def _noise(rng: random.Random, record: Record) -> None:
    record.path.write_bytes(rng.randbytes(rng.choice([0, 7, 4096, record.layout.file_bytes])))


def _reseal(field: str) -> Damage:
    """Change a header field and make the header's own checksum right again: no random flip does this, a bug might."""

    def damage(rng: random.Random, record: Record) -> None:
        from headerpage import reseal

        page = record.path.read_bytes()[:4096]
        _edit(record.path, 0, reseal(rng, page, field))

    return damage


def _remove(rng: random.Random, record: Record) -> None:
    record.path.unlink()


def _replace(kind: str) -> Damage:
    def damage(rng: random.Random, record: Record) -> None:
        record.path.unlink()
        if kind == "directory":
            record.path.mkdir()
        else:
            record.path.symlink_to(record.sibling if kind == "link" else record.path.with_name("nowhere"))

    return damage


_DAMAGE, _ABSENT, _ERROR, _HARMLESS = Effect.DAMAGE, Effect.ABSENT, Effect.ERROR, Effect.HARMLESS


def _rest(name: str, share: int, says: str, damage: Damage, effect: Effect = _DAMAGE, header: bool = False) -> Fault:
    return Fault(name, share, Phase.AT_REST, effect, says, damage, needs_header=header)


def _load(name: str, share: int, effect: Effect, says: str, action: Action, ops: Op = Op.READ, error: int = 0) -> Fault:
    return Fault(name, share, Phase.LOAD, effect, says, order=Order(action, ops, error))


def _store(name: str, share: int, effect: Effect, says: str, action: Action, error: int = 0) -> Fault:
    order = Order(action, Op.STORE, error, times=0) if error else Order(action, Op.WRITE)
    return Fault(name, share, Phase.STORE, effect, says, order=order)


FAULTS: tuple[Fault, ...] = (
    _rest("flip-header", 9, "a bit flips in the header page", _flip_header, header=True),
    _rest("flip-payload", 11, "a bit flips in the payload", _flip_payload),
    _rest("flip-padding", 4, "a bit flips in the padding", _flip_padding, header=True),
    _rest("flip-many", 2, "2 to 64 bits flip", _flip_many),
    _rest("truncate", 7, "the file is cut short", _truncate),
    _rest("swap", 4, "two records' files are swapped", _swap),
    _rest("alien-key", 2, "another record's bytes under this name", _borrow("sibling")),
    _rest("alien-namespace", 3, "the same key's record of another model", _borrow("stranger")),
    _rest("zero-pages", 4, "pages read as zeros", _zero_pages),
    _rest("zero-file", 1, "the whole file reads as zeros", _zero_all),
    _rest("torn", 2, "the start of one write, the end of another", _torn),
    _rest("noise", 1, "random bytes instead of a record", _noise),
    _rest("version", 2, "a header of an unknown version", _reseal("version"), header=True),
    _rest("reseal", 3, "a header field is wrong, its checksum right", _reseal("any"), header=True),
    _rest("missing", 1, "the file is gone", _remove, _ABSENT),
    Fault(
        "directory",
        1,
        Phase.AT_REST,
        _DAMAGE,
        "a directory in place of the file",
        _replace("directory"),
        needs_janitor=True,
    ),
    _rest("link", 1, "a link to another record in place of the file", _replace("link")),
    _rest("link-nowhere", 1, "a link to nowhere in place of the file", _replace("nowhere")),
    _load("read-eio", 3, _ERROR, "EIO from a read", Action.FAIL, error=errno.EIO),
    _load("open-eio", 1, _ERROR, "EIO from an open", Action.FAIL, Op.OPEN, errno.EIO),
    _load("open-emfile", 1, _ERROR, "no descriptor left", Action.FAIL, Op.OPEN, errno.EMFILE),
    _load("read-short", 2, _HARMLESS, "a read returns half, then goes on", Action.SHORT),
    _load("read-eintr", 1, _HARMLESS, "a signal interrupts a read", Action.FAIL, error=errno.EINTR),
    _load("read-end", 2, _DAMAGE, "a read finds the end too early", Action.END),
    _load("read-flip", 3, _DAMAGE, "a bit flips on the way from the device", Action.FLIP),
    _load("read-stale", 2, _DAMAGE, "a read claims success and moves nothing", Action.STALE),
    _store("store-enospc", 4, _ABSENT, "ENOSPC from a step of a store on", Action.FAIL, errno.ENOSPC),
    _store("store-eio", 2, _ABSENT, "EIO from a step of a store on", Action.FAIL, errno.EIO),
    _store("store-short", 1, _HARMLESS, "a write takes half, then goes on", Action.SHORT),
    _store("store-flip", 2, _DAMAGE, "a bit flips on the way to the device", Action.FLIP),
    _store("store-lost", 2, _DAMAGE, "a write claims success and stores nothing", Action.DROP),
    Fault("kill-store", 7, Phase.KILL_STORE, _ABSENT, "kill -9 at a file operation of a store"),
    Fault("kill-evict", 4, Phase.KILL_EVICT, _ABSENT, "kill -9 at a file operation of an eviction"),
    Fault("kill-import", 4, Phase.KILL_IMPORT, _ABSENT, "kill -9 at a file operation of an import"),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
_DECK = [fault.name for fault in FAULTS for _ in range(fault.share)]
assert len(_DECK) == 100, len(_DECK)


@dataclass(frozen=True)
class Case:
    """One injected fault: what it is, and the random source of everything that is drawn for it."""

    seed: int
    number: int
    fault: Fault

    def rng(self) -> random.Random:
        """A fresh source; the same draws each time."""
        return random.Random(f"rewarm faults {self.seed} {self.number}")


def deal(seed: int, number: int) -> Case:
    """Case ``number`` of a campaign."""
    deck = list(_DECK)
    random.Random(f"rewarm deck {seed} {number // 100}").shuffle(deck)
    return Case(seed, number, BY_NAME[deck[number % 100]])
