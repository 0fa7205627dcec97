"""The parent's side: a child process that lives as long as its parent does."""

from __future__ import annotations

import os
import re
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
EVICTED = "evicted %d %d %d\n"
"""What the child writes to its standard output: records and bytes that it evicted since it last said so, and how many
of the records nobody had used."""
_EVICTED_LINE = re.compile(rb"^evicted (\d{1,18}) (\d{1,18}) (\d{1,18})$", re.MULTILINE)
_READ_BYTES = 1 << 20
"""As much as a pipe ever holds."""


class JanitorProcess:
    """Started at once; ``ensure`` starts it again when it was killed. Used by one thread at a time."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = list(roots)
        self._restart_s = _FIRST_RESTART_S
        self._next_start = self._started = 0.0
        self._evicted = (0, 0, 0)
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child is there."""
        return self._process.poll() is None

    def ensure(self) -> None:
        """Start another one if it is gone, with pauses that grow while each new one ends soon."""
        now = time.monotonic()
        if self.is_running or now < self._next_start:
            return
        if now - self._started > _MAX_RESTART_S:
            self._restart_s = _FIRST_RESTART_S
        self._next_start = now + self._restart_s
        self._restart_s = min(2 * self._restart_s, _MAX_RESTART_S)
        self._close_pipes()
        self._process = self._start()

    def take_evicted(self) -> tuple[int, int, int]:
        """(records, bytes, records that nobody had used) that the child evicted, as far as it has said so, since the
        last call.
        """
        self._hear()
        taken, self._evicted = self._evicted, (0, 0, 0)
        return taken

    def close(self) -> None:
        """End it; it saves its order first. Idempotent."""
        self._close_stdin()
        try:
            self._process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_WAIT_S)
        self._close_pipes()

    def _start(self) -> subprocess.Popen[bytes]:
        """It ends when the other end of its standard input closes: with close(), or with this process."""
        self._started = time.monotonic()
        source = str(Path(rewarm.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "rewarm.volume.janitor", str(os.getpid()), *self._roots],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _hear(self) -> None:
        """Take what the child has said: whole lines, since a pipe does not cut short writes."""
        stdout = self._process.stdout
        if stdout is None or stdout.closed:
            return
        for line in _EVICTED_LINE.findall(stdout.read(_READ_BYTES) or b""):
            records, num_bytes, unread = (had + int(more) for had, more in zip(self._evicted, line, strict=True))
            self._evicted = (records, num_bytes, unread)

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _close_pipes(self) -> None:
        self._hear()
        self._close_stdin()
        if self._process.stdout is not None:
            self._process.stdout.close()
