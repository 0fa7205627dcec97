"""Finished requests whose blocks the server keeps for a while: their last chunks found no room to be staged yet.

A device computes KV faster than a disk takes it, and a request may end while the store buffer is full. Few blocks are
held at any time, and for no longer than the stores get on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

HOLD_S = 30.0
"""So long may none of a request's stores end before its blocks are given back: the volume hangs."""


@dataclass(slots=True)
class _Held:
    num_blocks: int
    until: float


class HeldRequests:
    """Which requests are held, and until when. One thread."""

    def __init__(self, max_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            max_blocks: So many blocks may be held at once; 0: none ever.
            clock: Seconds, never backwards.
        """
        self._max_blocks = max_blocks
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._released: list[str] = []
        self._unreported: dict[int, int] = {}
        """Step -> stores that it ordered."""
        self._reported_step = 0
        self._room = 0

    def ordered(self, step: int, num_stores: int) -> None:
        """A step orders stores."""
        if num_stores:
            self._unreported[step] = num_stores

    def reported(self, step: int, room: int) -> None:
        """The ranks have told how a step went; the fullest of them could have taken ``room`` more stores."""
        self._reported_step, self._room = max(step, self._reported_step), room
        self._unreported = {step: count for step, count in self._unreported.items() if step > self._reported_step}

    def is_unreported(self, step: int) -> bool:
        """Whether the ranks have yet to tell for which stores of a step they had room."""
        return step > self._reported_step

    @property
    def is_room_short(self) -> bool:
        """Whether there may have been no room for some of the stores that are not reported yet."""
        return sum(self._unreported.values()) > self._room

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def names(self) -> list[str]:
        """Held requests, the oldest first."""
        return list(self._held)

    def hold(self, request_id: str, num_blocks: int) -> bool:
        """Keep a request's blocks; False: too many are held."""
        if sum(held.num_blocks for held in self._held.values()) + num_blocks > self._max_blocks:
            return False
        self._held[request_id] = _Held(num_blocks, self._clock() + HOLD_S)
        return True

    def got_on(self, request_id: str) -> None:
        """One of its stores has ended."""
        if held := self._held.get(request_id):
            held.until = self._clock() + HOLD_S

    def is_late(self, request_id: str) -> bool:
        """Whether nothing has got on for too long."""
        return self._clock() >= self._held[request_id].until

    def release(self, request_id: str) -> None:
        """Its blocks are no longer needed; told once, by take_released()."""
        del self._held[request_id]
        self._released.append(request_id)

    def take_released(self) -> list[str]:
        """Requests that were released since the last call."""
        released, self._released = self._released, []
        return released
