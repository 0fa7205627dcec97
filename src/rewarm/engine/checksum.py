"""CRC32C (Castagnoli) of bytes in memory, from the native library where it is loaded, else from a wheel."""

from __future__ import annotations

import google_crc32c


def crc32c(payload: bytes | memoryview) -> int:
    """CRC32C of a whole buffer."""
    return int(google_crc32c.value(bytes(payload)))
