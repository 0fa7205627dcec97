"""Header pages for fuzzing: valid ones, and what becomes of them under seeded mutation.

Plain bit flips die at the page's own checksum, so most mutated pages are sealed again: the fields behind the checksum
are what a parser must not believe.
"""

from __future__ import annotations

import random
import struct

from header_judge import MOST_PIECES, pieces
from headerpage import FIELDS, PAGE, TABLE, seal

_INTERESTING = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x100, 511, 512, 767, 768, 769, 4095, 4096, 4097, 0x7FFF, 0x8000, 0xFFFF,
                1 << 20, (1 << 20) - 4096, (1 << 20) + 1, 1 << 31, (1 << 32) - 1, (1 << 32) - 4096)  # fmt: skip
_JUDGED = ("version", "kind", "payload", "piece", "count")
_WIDE = (*_INTERESTING, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096)


def valid_page(rng: random.Random) -> bytearray:
    """A header that a parser must accept, once sealed."""
    piece = rng.choice([8192, 65536, 1 << 20, 1 << 22])
    most_pages = MOST_PIECES * piece // PAGE - 1
    pages = rng.randint(0, most_pages) if rng.random() < 0.5 else min(most_pages, rng.randint(0, 600))
    payload = max(0, pages * PAGE - rng.choice([0, 0, 1, 4095, rng.randrange(PAGE)]))
    count = pieces(payload, piece)
    page = bytearray(PAGE)
    struct.pack_into("<4sIHHIQII32s32sQ", page, 0, b"RWR1", 0, 1, 0, 1, payload, piece, count, rng.randbytes(32),
                     rng.randbytes(32), rng.getrandbits(63))  # fmt: skip
    page[TABLE : TABLE + 4 * count] = rng.randbytes(4 * count)
    return page


def _field(rng: random.Random, page: bytearray) -> None:
    """One field takes a value from the edges, or one near its own."""
    offset, form = FIELDS[rng.choice(_JUDGED)]
    width = struct.calcsize(form)
    (old,) = struct.unpack_from(form, page, offset)
    value = rng.choice([rng.choice(_WIDE), old + 1, old - 1, old * 2, old ^ (1 << rng.randrange(width * 8))])
    struct.pack_into(form, page, offset, value % (1 << (8 * width)))


def _sizes(rng: random.Random, page: bytearray) -> None:
    """Payload, piece and count that all but agree: what a careless sum takes for whole."""
    piece = rng.choice([1, 512, 4095, 4096, 4097, 8191, 8192, 12288, 1 << 20, (1 << 32) - 4096])
    pages = rng.choice([0, 1, 2, rng.randint(0, 800), MOST_PIECES * piece // PAGE + rng.randint(-2, 2)])
    payload = max(0, pages * PAGE - rng.choice([0, 1, 4095]))
    count = max(0, pieces(payload, piece) + rng.choice([-1, 0, 0, 1]))
    struct.pack_into("<QII", page, FIELDS["payload"][0], payload, piece, count)


def _bit(rng: random.Random, page: bytearray) -> None:
    page[rng.randrange(128 if rng.random() < 0.7 else PAGE)] ^= 1 << rng.randrange(8)


def _stretch(rng: random.Random, page: bytearray) -> None:
    """A stretch of noise, or of zeros."""
    lo = rng.randrange(PAGE)
    hi = min(PAGE, lo + rng.choice([1, 2, 4, 8, 32, 512, 4096]))
    page[lo:hi] = rng.randbytes(hi - lo) if rng.random() < 0.5 else bytes(hi - lo)


def _copy(rng: random.Random, page: bytearray) -> None:
    """A stretch of the page, elsewhere."""
    lo, to = rng.randrange(PAGE), rng.randrange(PAGE)
    size = min(rng.choice([4, 8, 64, 1024]), PAGE - lo, PAGE - to)
    page[to : to + size] = page[lo : lo + size]


_MUTATIONS = (_field, _field, _field, _sizes, _sizes, _bit, _stretch, _copy)


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
        rng.choice(_MUTATIONS)(rng, page)
    if rng.random() < 0.85:
        page[:4] = b"RWR1"
        return seal(page)
    return bytes(page)
