"""Children that may be killed, quickly: a process that has imported all and opened nothing, and forks on request.

It is forked off before any thread or engine exists, so that its children start from a plain single-threaded state.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from faultshim import Shim

if TYPE_CHECKING:
    from pathlib import Path

Job = Callable[..., None]
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Death:
    """How a child ended."""

    killed: bool
    exit_code: int

    @property
    def as_expected(self) -> bool:
        """Killed by the shim, or done before the shim struck."""
        return self.killed or self.exit_code == 0


class Zygote:
    """Forks one child at a time that runs ``job(*args)`` and exits with 0, or 3 after printing what it raised."""

    def __init__(self) -> None:
        self._to, child_in = os.pipe(), os.pipe()
        self._from = child_in
        self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                self._serve()
            os._exit(0)
        os.close(self._to[0])
        os.close(self._from[1])

    def run(self, job: Job, *args: Any, control: Path | None, limit_s: float = 600.0) -> Death:
        """Run a job in a fresh child under the shim orders that lie in ``control``."""
        request = pickle.dumps((job, args, control, limit_s))
        os.write(self._to[1], _LENGTH.pack(len(request)) + request)
        ready, _, _ = select.select([self._from[0]], [], [], limit_s + 10)
        if not ready:
            raise AssertionError(f"waited {limit_s + 10} s for a child that runs {job.__name__}")
        (status,) = _LENGTH.unpack(os.read(self._from[0], _LENGTH.size))
        code = os.waitstatus_to_exitcode(status)
        return Death(code == -signal.SIGKILL, code)

    def close(self) -> None:
        """End the zygote."""
        os.close(self._to[1])
        os.close(self._from[0])
        os.waitpid(self._pid, 0)

    def _serve(self) -> None:
        os.close(self._to[1])
        os.close(self._from[0])
        while head := os.read(self._to[0], _LENGTH.size):
            (length,) = _LENGTH.unpack(head)
            request = b""
            while len(request) < length:
                request += os.read(self._to[0], length - len(request))
            job, args, control, limit_s = pickle.loads(request)  # from our own parent, over a pipe
            pid = os.fork()
            if pid == 0:
                self._child(job, args, control, limit_s)
            _, status = os.waitpid(pid, 0)
            os.write(self._from[1], _LENGTH.pack(status))

    @staticmethod
    def _child(job: Job, args: tuple[Any, ...], control: Path | None, limit_s: float) -> None:
        code = 3
        try:
            faulthandler.dump_traceback_later(limit_s, exit=True)  # a child that hangs says where, and ends with 1
            if control is not None:
                Shim.attach(control)
            job(*args)
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the parent is told
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
