"""How much each root delivers to one rank, and in how much time: what bandwidth is learned from."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rewarm.kv.chunks import Delivery


@dataclass(slots=True)
class _Window:
    """One root, since it was last told of."""

    num_open: int = 0
    """Records that are asked for and have not ended."""
    busy_since: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0
    ran_dry: bool = False


class RootMeter:
    """Counts while records are asked for and end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roots: dict[int, _Window] = {}

    def asked(self, root: int, now: float) -> None:
        """A record is to be read; a negative root: no root was asked for it."""
        if root < 0:
            return
        with self._lock:
            window = self._roots.setdefault(root, _Window())
            if not window.num_open:
                window.busy_since = now
            window.num_open += 1

    def ended(self, root: int, num_bytes: int, at: float, *, is_exact: bool = True) -> None:
        """A record has ended, and has brought ``num_bytes``; not exact: at that time or somewhat earlier."""
        with self._lock:
            window = self._roots.get(root)
            if window is None or not window.num_open:
                return
            window.num_open -= 1
            window.num_bytes += num_bytes
            if not window.num_open:
                window.busy_s += max(0.0, at - window.busy_since)
                window.ran_dry |= not is_exact

    def take(self, now: float) -> dict[int, Delivery]:
        """Root -> what it delivered since the last call; roots that had nothing to do are left out."""
        taken = {}
        with self._lock:
            for root, window in self._roots.items():
                if window.num_open:
                    window.busy_s += max(0.0, now - window.busy_since)
                    window.busy_since = now
                if window.busy_s > 0:
                    taken[root] = Delivery(window.num_bytes, window.busy_s, window.ran_dry)
                window.num_bytes, window.busy_s, window.ran_dry = 0, 0.0, False
        return taken
