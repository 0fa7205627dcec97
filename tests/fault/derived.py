"""The bytes that a key demands: whoever knows the key knows whether what was served is right."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

POISON = 0xA5C3F00D
"""What no key demands: memory is filled with it before a load."""


def derived_block(key: bytes, words: int, model: str = "") -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The bytes that a key demands of a model: every word depends on the key, on the model and on its place."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=model.encode()).digest(), "little") | 1
    place = np.arange(1, words + 1, dtype=np.uint64)
    mixed = place * np.uint64(seed)
    mixed ^= mixed >> np.uint64(29)
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
