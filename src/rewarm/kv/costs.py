"""Seconds of loading and of computing a prompt, from what was learned of a server's storage and its prefill."""

from __future__ import annotations

from dataclasses import dataclass

from rewarm.kv.policy import PrefixHit
from rewarm.kv.rates import PrefillModel, StorageRates

LOAD_OVERHEAD_S = 0.01
"""What a load costs besides its bytes until that is learned: orders, the last copy, the step in which its end is seen.
About 10 ms on an H200.
"""
MAX_OVERHEAD_S = 0.05
OVERHEAD_WEIGHT = 0.2
"""Of the newest load that tells it."""


@dataclass(slots=True, kw_only=True)
class Costs:
    """The measures of one server, and what follows from them."""

    storage: StorageRates
    prefill: PrefillModel
    chunk_tokens: int
    chunk_bytes: int
    """Of all ranks together."""
    step_tokens: int
    """Tokens that the server computes in one step at most."""
    overhead_s: float = LOAD_OVERHEAD_S
    """What a load costs besides its bytes."""

    def observe_load(self, hit: PrefixHit, num_chunks: int, seconds: float) -> None:
        """Take in a load that had both lanes for itself."""
        over_s = min(MAX_OVERHEAD_S, max(0.0, seconds - self._storage_s(hit, num_chunks)))
        self.overhead_s += OVERHEAD_WEIGHT * (over_s - self.overhead_s)

    def pace(self) -> float | None:
        """Seconds a byte of long loads; None: too little is known to predict anything."""
        return self.storage.seconds_a_byte() if self.prefill.is_known else None

    def load_s(self, hit: PrefixHit, num_chunks: int) -> float:
        """To load so many chunks of a hit when nothing else is being loaded."""
        return self.overhead_s + self._storage_s(hit, num_chunks)

    def chunk_s(self, hit: PrefixHit, pace: float) -> float:
        """What each chunk of a hit takes in a long load at this many seconds a byte of flash."""
        return self.chunk_bytes * pace * self.storage.weight(_host_share(hit))

    def _storage_s(self, hit: PrefixHit, num_chunks: int) -> float:
        return self.storage.seconds(num_chunks, self.chunk_bytes, _host_share(hit))

    def compute_s(self, begin: int, end: int) -> float:
        """To compute the tokens [begin, end) of a prompt, with what the steps cost for themselves; its last token is
        computed in any case.
        """
        begin = min(begin, end - 1)
        base = self.prefill.coefficients[0]
        return self.prefill.seconds(begin, end) + base * max(1.0, (end - begin) / self.step_tokens)

    def rest_s(self, hit: PrefixHit, num_chunks: int) -> float:
        """To compute what is left of a prompt when so many of its stored chunks were loaded."""
        return self.compute_s(hit.num_resident_tokens + self.tokens_of(hit, num_chunks), hit.num_request_tokens)

    def split(self, hit: PrefixHit, seconds: float) -> tuple[float, float, float]:
        """(share, seconds of loading, seconds of computing) of the longest part that loads in ``seconds``."""
        chunk_s = self._storage_s(hit, hit.num_chunks) / hit.num_chunks
        num_chunks = int((seconds - self.overhead_s) / chunk_s) if chunk_s > 0 else hit.num_chunks
        if num_chunks <= 0:
            return 0.0, 0.0, 0.0
        num_chunks = min(num_chunks, hit.num_chunks)
        load_s = self._storage_s(hit, num_chunks)
        return num_chunks / hit.num_chunks, load_s, self.rest_s(hit, num_chunks)

    def tokens_of(self, hit: PrefixHit, num_chunks: int) -> int:
        """Tokens that the first ``num_chunks`` chunks of a hit bring; the first chunk may be resident in part."""
        return hit.num_stored_tokens - (hit.num_chunks - num_chunks) * self.chunk_tokens if num_chunks else 0

    def chunks_of(self, hit: PrefixHit, num_tokens: int) -> int:
        """The reverse."""
        return hit.num_chunks - (hit.num_stored_tokens - num_tokens) // self.chunk_tokens if num_tokens else 0


def _host_share(hit: PrefixHit) -> float:
    """The part of a hit's chunks that lies in the host tier; of some of its chunks, as large a part."""
    return hit.num_host_chunks / hit.num_chunks if hit.num_chunks else 0.0
