"""What all seats in servers share: one server through two of them would store everything twice, so that is refused."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakSet

from rewarm.errors import RewarmError, UsageError

CONNECTOR = "Rewarm's connector"
LMCACHE = "LMCache with Rewarm"
_REMOVE = {CONNECTOR: "RewarmConnector out of --kv-transfer-config", LMCACHE: "Rewarm out of LMCache's configuration"}


@dataclass(eq=False)
class Seat:
    """A seat that is taken, until release(), or until nobody has this any more."""

    kind: str
    volume: str
    """What of it: "" where several objects share one seat, as the two sides of a connector do."""


_lock = threading.Lock()
_taken: WeakSet[Seat] = WeakSet()


def claim(kind: str, volume: str = "") -> Seat:
    """Take a seat.

    Args:
        kind: CONNECTOR or LMCACHE.
        volume: What only one seat of this kind may use in a process; "": several may be.
    Raises:
        UsageError: This process has a seat of another kind, or this one already.
    """
    with _lock:
        for other in _taken:
            if other.kind != kind:
                raise UsageError(
                    f"this server has {other.kind} too: everything would be stored twice",
                    hint=f"leave {_REMOVE[CONNECTOR]}, or {_REMOVE[LMCACHE]}",
                )
            if volume and other.volume == volume:
                raise UsageError(
                    f"this server has {kind} twice on one volume",
                    hint="leave one of the two entries out; several directories go into one entry's roots",
                )
        seat = Seat(kind, volume)
        _taken.add(seat)
        return seat


def release(seat: Seat) -> None:
    """Leave a seat; again is harmless."""
    with _lock:
        _taken.discard(seat)


def hinted(error: RewarmError) -> RewarmError:
    """Servers print an exception as it is: the next step must stand in its text."""
    if error.hint:
        error.args = (f"{error.message}; {error.hint}",)
    return error
