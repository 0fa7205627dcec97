"""Sizes, shares and times as people write and read them."""

from __future__ import annotations

import re

from rewarm.errors import UsageError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*")
MAX_SIZE = (1 << 63) - 1
"""What a file system can count."""
_SHOWN = 40


def parse_size(text: str) -> int:
    """Bytes in ``text``: ``200GiB``, ``1.5 TB``, ``4096``. Binary and decimal units, in any case.

    Raises:
        UsageError: The text is not a size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text[:_SHOWN]!r} is not a size", hint="write it like 200GiB, 1.5TB or 4096")
    size = int(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor
    if not size and float(match.group(1)):
        raise UsageError(f"{text[:_SHOWN]!r} is less than a byte", hint="write it like 200GiB, 1.5TB or 4096")
    if size > MAX_SIZE:
        raise UsageError(f"{text!r} is more than any file system holds", hint="write it like 200GiB, 1.5TB or 4096")
    return size


def format_size(num_bytes: int) -> str:
    """``num_bytes`` in the largest binary unit that keeps one digit before the point: ``1.5 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_rate(num_bytes: float, seconds: float) -> str:
    """Bytes moved in ``seconds`` as GiB/s."""
    return f"{num_bytes / GIB / seconds:.2f} GiB/s" if seconds > 0 else "- GiB/s"


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple
