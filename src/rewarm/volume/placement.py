"""On which root a key lies: weighted rendezvous hashing, so that a root that comes or goes moves only its own share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b


class Placement:
    """Ranks the roots of a volume for each key."""

    def __init__(self, root_ids: Sequence[str], weights: Sequence[float], numbers: Sequence[int] | None = None) -> None:
        """
        Args:
            root_ids: R names, the same in every process.
            weights: R shares, above 0: what each root may hold.
            numbers: R numbers that stand for the roots in this process; default: 0 to R - 1.
        """
        given = range(len(root_ids)) if numbers is None else numbers
        self._roots = [
            (number, root_id.encode(), weight) for number, root_id, weight in zip(given, root_ids, weights, strict=True)
        ]

    def order(self, key: bytes) -> list[int]:
        """Numbers of the roots, the key's own first."""
        if len(self._roots) == 1:
            return [self._roots[0][0]]
        scores = [(weight / -math.log(_unit(seed, key)), number) for number, seed, weight in self._roots]
        return [number for _, number in sorted(scores, reverse=True)]


def _unit(seed: bytes, key: bytes) -> float:
    """A number between 0 and 1, neither included, that follows from both."""
    digest = blake2b(key, digest_size=8, key=seed[:64]).digest()
    return (int.from_bytes(digest, "little") + 1) / (2.0**64 + 2)
