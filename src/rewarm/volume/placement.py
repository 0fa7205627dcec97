"""On which root a key lies: weighted rendezvous hashing, so that a root that comes or goes moves only its own share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b


class Placement:
    """Ranks the roots of a volume for each key."""

    def __init__(self, root_ids: Sequence[str], weights: Sequence[float]) -> None:
        """
        Args:
            root_ids: R names, the same in every process.
            weights: R shares, above 0: what each root may hold.
        """
        self._seeds = [root_id.encode() for root_id in root_ids]
        self._weights = list(weights)

    def order(self, key: bytes) -> list[int]:
        """Indices of the roots, the key's own first."""
        if len(self._seeds) == 1:
            return [0]
        scores = [(self._weights[index] / -math.log(_unit(seed, key)), index) for index, seed in enumerate(self._seeds)]
        return [index for _, index in sorted(scores, reverse=True)]


def _unit(seed: bytes, key: bytes) -> float:
    """A number between 0 and 1, neither included, that follows from both."""
    digest = blake2b(key, digest_size=8, key=seed[:64]).digest()
    return (int.from_bytes(digest, "little") + 1) / (2.0**64 + 2)
