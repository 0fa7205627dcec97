"""Header pages for fuzzing: valid ones, and what becomes of them under seeded mutation.

Plain bit flips die at the page's own checksum, so most mutated pages are sealed again: the fields behind the checksum are
what a parser must not believe.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

from headerpage import FIELDS, PAGE, TABLE, seal

_INTERESTING = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x100, 511, 512, 767, 768, 769, 4095, 4096, 4097, 0x7FFF, 0x8000, 0xFFFF,
                1 << 20, (1 << 20) - 4096, (1 << 20) + 1, 1 << 31, (1 << 32) - 1, (1 << 32) - 4096)  # fmt: skip
_WIDE = (*_INTERESTING, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096)


def valid_page(rng: random.Random) -> bytearray:
    """A header that a parser must accept."""
    piece = rng.choice([4096, 8192, 65536, 1 << 20, 1 << 22])
    end_pages = rng.randint(1, 768 * piece // 4096 - 1) if rng.random() < 0.5 else rng.randint(1, 600)
    payload = max(1, end_pages * 4096 - rng.choice([0, 0, 1, 4095, rng.randrange(4096)]))
    end = 4096 + (payload + 4095) // 4096 * 4096
    cuts = [4096, *(cut for cut in range(piece, end, piece) if cut > 4096), end] if piece > 4096 else []
    count = len(cuts) - 1 if cuts else (end - 4096) // 4096
    if count > 768:
        return valid_page(rng)
    page = bytearray(PAGE)
    struct.pack_into("<4sIHHIQII32s32sQ", page, 0, b"RWR1", 0, 1, 0, 1, payload, piece, count, rng.randbytes(32),
                     rng.randbytes(32), rng.getrandbits(63))  # fmt: skip
    page[TABLE : TABLE + 4 * count] = rng.randbytes(4 * count)
    return page


def _mutate(rng: random.Random, page: bytearray) -> None:
    kind = rng.random()
    if kind < 0.5:
        name = rng.choice(list(FIELDS))
        offset, form = FIELDS[name]
        if form == "32s":
            page[offset : offset + 32] = rng.randbytes(32)
            return
        width = struct.calcsize(form)
        (old,) = struct.unpack_from(form, page, offset)
        value = rng.choice([rng.choice(_WIDE), old + 1, old - 1, old * 2, old ^ (1 << rng.randrange(width * 8))])
        struct.pack_into(form, page, offset, value % (1 << (8 * width)))
    elif kind < 0.75:
        at = rng.randrange(128 if rng.random() < 0.7 else PAGE)
        page[at] ^= 1 << rng.randrange(8)
    elif kind < 0.9:
        lo = rng.randrange(PAGE)
        hi = min(PAGE, lo + rng.choice([1, 2, 4, 8, 32, 512, 4096]))
        page[lo:hi] = rng.randbytes(hi - lo) if rng.random() < 0.5 else bytes(hi - lo)
    else:
        lo, to = rng.randrange(PAGE), rng.randrange(PAGE)
        size = min(rng.choice([4, 8, 64, 1024]), PAGE - lo, PAGE - to)
        page[to : to + size] = page[lo : lo + size]


def header_pages(seed: int, count: int, first: int = 0) -> Iterator[bytes]:
    """``count`` pages, the same ones for the same seed; about one in twenty is valid."""
    for number in range(first, first + count):
        yield header_page(seed, number)


_BASES: dict[int, list[bytes]] = {}


def header_page(seed: int, number: int) -> bytes:
    """Page ``number`` of a seed."""
    bases = _BASES.get(seed)
    if bases is None:
        source = random.Random(f"header bases {seed}")
        bases = _BASES[seed] = [bytes(valid_page(source)) for _ in range(256)]
    rng = random.Random((seed << 40) + number)
    page = bytearray(bases[rng.randrange(256)])
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 8])):
        _mutate(rng, page)
    if rng.random() < 0.85:
        page[:4] = b"RWR1"
        return seal(page)
    return bytes(page)
