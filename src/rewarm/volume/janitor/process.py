"""The parent's side: a child process that lives as long as its parent does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import rewarm

_CLOSE_WAIT_S = 10.0
_FIRST_RESTART_S = 1.0
_MAX_RESTART_S = 60.0


class JanitorProcess:
    """Started at once; ``ensure`` starts it again when it was killed. Used by one thread at a time."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = list(roots)
        self._restart_s = _FIRST_RESTART_S
        self._next_start = 0.0
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def ensure(self) -> None:
        """Start another one if it is gone, with growing pauses."""
        if self._process.poll() is None or time.monotonic() < self._next_start:
            return
        self._next_start = time.monotonic() + self._restart_s
        self._restart_s = min(2 * self._restart_s, _MAX_RESTART_S)
        self._close_pipe()
        self._process = self._start()

    def close(self) -> None:
        """End it; it saves its order first. Idempotent."""
        self._close_pipe()
        try:
            self._process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_WAIT_S)

    def _start(self) -> subprocess.Popen[bytes]:
        """It ends when the other end of its standard input closes: with close(), or with this process."""
        source = str(Path(rewarm.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-m", "rewarm.volume.janitor", str(os.getpid()), *self._roots],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
        )

    def _close_pipe(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
