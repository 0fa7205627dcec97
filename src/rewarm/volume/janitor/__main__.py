"""The child process: one thread a root, until the parent is gone."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from rewarm.errors import RewarmError
from rewarm.volume.janitor.process import EVICTED
from rewarm.volume.janitor.root_janitor import RootJanitor

_PARENT_STEP_S = 1.0
_END_WAIT_S = 8.0


def main() -> int:
    """``PARENT_PID ROOT...``; exit code 0, or 4 when no root could be looked after."""
    logging.basicConfig(level=logging.WARNING, format="rewarm janitor: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server; its end is ours
    parent, roots = int(sys.argv[1]), sys.argv[2:]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: ended.set())
    os.set_blocking(sys.stdout.fileno(), False)
    janitors: list[RootJanitor] = []
    threads = []
    for root in roots:
        try:
            janitor = RootJanitor(root)
        except (OSError, RewarmError) as error:
            logging.getLogger(__name__).warning("%s: %s", root, error)
            continue
        thread = threading.Thread(target=_look_after, args=(janitor, root, ended.wait), name=root, daemon=True)
        thread.start()
        threads.append(thread)
        janitors.append(janitor)
    told = (0, 0, 0)
    while not ended.is_set() and os.getppid() == parent and any(thread.is_alive() for thread in threads):
        if select.select([sys.stdin], [], [], _PARENT_STEP_S)[0]:
            break
        told = _tell(janitors, told)
    ended.set()
    for thread in threads:
        thread.join(_END_WAIT_S)
    _tell(janitors, told)
    return 0 if threads else 4


def _look_after(janitor: RootJanitor, root: str, stop: Callable[[float], bool]) -> None:
    """The thread of one root; what ends it early is one line, and the parent starts another process."""
    try:
        janitor.run(stop)
    except (OSError, RewarmError) as error:
        logging.getLogger(__name__).warning("%s: %s", root, error)


def _tell(janitors: Sequence[RootJanitor], told: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tell the parent what was evicted since ``told``; returns what it has been told by now.

    A parent that does not listen, or is gone, is no reason to stop: it is told the next time.
    """
    now = (
        sum(janitor.evicted_records for janitor in janitors),
        sum(janitor.evicted_bytes for janitor in janitors),
        sum(janitor.evicted_unread for janitor in janitors),
    )
    if now == told:
        return told
    with suppress(BlockingIOError, BrokenPipeError):
        os.write(sys.stdout.fileno(), (EVICTED % tuple(new - old for new, old in zip(now, told, strict=True))).encode())
        return now
    return told


if __name__ == "__main__":
    sys.exit(main())
