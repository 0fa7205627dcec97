"""Finished requests whose blocks the server keeps for a while: their last chunks found no room to be staged yet.

A device computes KV faster than a disk takes it, and a request may end while the store buffer is full. Few blocks are
held at any time, and for no longer than the stores get on: where a rank's volume hangs, all of them come back, and none
is held until its stores get on again.
"""

from __future__ import annotations

STUCK_S = 2.0
"""A volume hangs that ends no store in this time: longer than a store waits for a janitor to begin to make room
(volume.store_thread.ROOM_WAIT_S), and than a disk of 128 MiB/s takes for a dozen records at once."""


class HeldRequests:
    """Which requests are held. One thread."""

    def __init__(self, max_blocks: int) -> None:
        """
        Args:
            max_blocks: So many blocks may be held at once; 0: none ever.
        """
        self._max_blocks = max_blocks
        self._held: dict[str, int] = {}
        """Request -> its blocks."""
        self._released: list[str] = []
        self._unreported: dict[int, int] = {}
        """Step -> stores that it ordered."""
        self._reported_step = 0
        self._room = 0
        self._stuck_s = 0.0

    def ordered(self, step: int, num_stores: int) -> None:
        """A step orders stores."""
        if num_stores:
            self._unreported[step] = num_stores

    def reported(self, step: int, room: int, stuck_s: float) -> None:
        """The ranks have told how a step went.

        Args:
            step: Its number.
            room: Stores that the fullest of the ranks could have taken.
            stuck_s: How long none of the stores that are under way has ended, on the rank where that is longest.
        """
        self._reported_step, self._room, self._stuck_s = max(step, self._reported_step), room, stuck_s
        self._unreported = {step: count for step, count in self._unreported.items() if step > self._reported_step}

    def is_unreported(self, step: int) -> bool:
        """Whether the ranks have yet to tell for which stores of a step they had room."""
        return step > self._reported_step

    @property
    def is_room_short(self) -> bool:
        """Whether there may have been no room for some of the stores that are not reported yet."""
        return sum(self._unreported.values()) > self._room

    @property
    def is_stuck(self) -> bool:
        """Whether the volume hangs: no block is worth holding for it."""
        return self._stuck_s >= STUCK_S

    @property
    def names(self) -> list[str]:
        """Held requests, the oldest first."""
        return list(self._held)

    def hold(self, request_id: str, num_blocks: int) -> bool:
        """Keep a request's blocks; False: too many are held, or the volume hangs."""
        if self.is_stuck or sum(self._held.values()) + num_blocks > self._max_blocks:
            return False
        self._held[request_id] = num_blocks
        return True

    def release(self, request_id: str) -> None:
        """Its blocks are no longer needed; told once, by take_released()."""
        del self._held[request_id]
        self._released.append(request_id)

    def take_released(self) -> list[str]:
        """Requests that were released since the last call."""
        released, self._released = self._released, []
        return released
