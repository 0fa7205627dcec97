"""CRC32C (Castagnoli) of bytes in memory, from the native library where it is loaded, else from a wheel."""

from __future__ import annotations

import ctypes

from rewarm.engine import _native


def crc32c(payload: bytes | memoryview) -> int:
    """CRC32C of a whole buffer; a writable view is not copied."""
    calls = _native.library.calls
    if calls is None:
        import google_crc32c

        return int(google_crc32c.value(bytes(payload)))
    if isinstance(payload, memoryview) and not payload.readonly and payload.nbytes:
        return int(calls.rw_crc32c(0, ctypes.addressof(ctypes.c_char.from_buffer(payload)), payload.nbytes))
    whole = bytes(payload)
    return int(calls.rw_crc32c(0, whole, len(whole)))
