"""Start-up refusals: their text, and that no server has two seats on one volume."""

from __future__ import annotations

import sys
import threading

from rewarm.errors import RewarmError, UsageError


class StartRefused(SystemExit):
    """Ends the process of a server that cannot be served as it is configured. LMCache's in-process loader logs every
    other exception and serves without the tier, which nobody would notice.
    """


_lock = threading.Lock()
_claimed: set[str] = set()
_CONNECTOR = "rewarm.adapters.vllm.connector"


def hinted(error: RewarmError) -> RewarmError:
    """LMCache prints an exception as it is: the next step must stand in its text."""
    if error.hint:
        error.args = (f"{error.message}; {error.hint}",)
    return error


def claim(what: str) -> str:
    """Note that a seat of this process uses a volume; release() takes it back.

    Raises:
        UsageError: Another seat of this process does, so that everything would be stored twice.
    """
    if _CONNECTOR in sys.modules:
        raise UsageError(
            "this server has Rewarm's own connector too: everything would be stored twice",
            hint="leave RewarmConnector out of --kv-transfer-config, or Rewarm out of LMCache's configuration",
        )
    with _lock:
        if what in _claimed:
            raise UsageError(
                "this server has Rewarm twice on one volume in LMCache's configuration",
                hint="leave one of the two entries out; several directories go into one entry's roots",
            )
        _claimed.add(what)
    return what


def release(what: str) -> None:
    """Take a claim() back."""
    with _lock:
        _claimed.discard(what)
