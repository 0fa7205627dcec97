"""One model server as a child process: started on a free port, known to be ours, ended without a trace."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rewarm.errors import StorageError, UnsupportedError
from rewarm.trial.client import Client

STOP_S = 40.0
"""A server that has not ended by then, or after the time that its start took where that is longer, is killed; it needs
about 5 s to write its last blocks and end, and many times that on a machine that is busy with other things."""
SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A running server.

    Args:
        name: Of the arm.
        command: Its words, without port and name.
        env: Variables beside this process's own.
        log: A file for what it prints.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.port = free_port()
        self.model_name = f"trial-{secrets.token_hex(6)}"
        self.command = [*command, "--port", str(self.port), "--served-model-name", self.model_name]
        self.env = dict(env)
        self.client = Client(f"http://127.0.0.1:{self.port}", self.model_name)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.start_s = 0.0
        self._stop_begin_s = 0.0
        self._shared: list[Path] = []
        self._begin_s = time.monotonic()
        self._temporary = _temporary_folder()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, "TMPDIR": str(self._temporary), **self.env},
                start_new_session=True,  # Ctrl-C is for the trial, which ends its servers itself
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one system call, no lock, no thread of ours yet
            )
        self._family = [psutil.Process(self._process.pid)]

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def is_ready(self, timeout_s: float) -> bool:
        """Whether it answers; ``start_s`` is known from then on.

        Raises:
            UnsupportedError: It ended instead.
            StorageError: It did not answer in time.
        """
        if self.client.is_up():
            self.start_s = time.monotonic() - self._begin_s
            self._look_around()
            return True
        if self._process.poll() is not None:
            raise UnsupportedError(
                f"the server of {self.name} ended with {self._process.returncode}: {self.last_words()}",
                hint=f"all it said: {self.log}",
            )
        if time.monotonic() - self._begin_s > timeout_s:
            raise StorageError(f"the server of {self.name} did not answer within {timeout_s:g} s, see {self.log}")
        return False

    def describe(self) -> dict[str, Any]:
        """Fields of the event ``server_started``."""
        return {
            "server": self.name,
            "pid": self.pid,
            "start_s": round(self.start_s, 3),
            "port": self.port,
            "command": self.command,
            "env": self.env,
            "listener_is_ours": self._listener_pid() in {process.pid for process in self._family},
            "name_is_ours": self.client.models() == [self.model_name],
        }

    def last_words(self) -> str:
        """The last line it printed that tells something."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["nothing was printed"])[-1].strip()[-300:]

    def _look_around(self) -> None:
        """Learn which processes are its own, and keep those that were: a child outlives a parent that broke."""
        with suppress(psutil.Error):
            self._family = list({*self._family, *self._family[0].children(recursive=True)})
            self._family.sort(key=lambda process: process.pid != self.pid)

    def _listener_pid(self) -> int | None:
        for process in self._family:
            with suppress(psutil.Error):
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                        return process.pid
        return None

    def read_bytes(self) -> int | None:
        """What its processes read from below the page cache since they began; None where the kernel does not say."""
        total, known = 0, False
        for process in self._family:
            with suppress(psutil.Error, AttributeError, OSError):
                total += process.io_counters().read_bytes
                known = True
        return total if known else None

    def cpu_s(self) -> float:
        """CPU seconds that its processes used since they began."""
        total = 0.0
        for process in self._family:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def begin_stop(self) -> None:
        """Ask it to end, so that several end at once."""
        if not self._stop_begin_s:
            self._look_around()
            self._shared = self._shared_memory_files()
            self._stop_begin_s = time.monotonic()
            if self._process.poll() is None:
                self._process.terminate()

    def stop(self) -> dict[str, Any]:
        """End it, its children too, and remove what it left.

        Returns:
            Fields of the event ``server_stopped``.
        """
        self.begin_stop()
        _, alive = psutil.wait_procs(self._family, timeout=max(STOP_S, self.start_s))
        killed = [process.pid for process in alive]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)
        code = self._process.wait(timeout=10)
        left = [path for path in self._shared if path.exists()]
        for path in left:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return {
            "server": self.name,
            "pid": self.pid,
            "exit_code": code,
            "stop_s": round(time.monotonic() - self._stop_begin_s, 3),
            "killed": killed,
            "port_is_free": self._port_is_free(),
            "left_in_shm": [str(path) for path in left],
        }

    def _shared_memory_files(self) -> list[Path]:
        """Files in /dev/shm that its processes have mapped."""
        found = set()
        for process in self._family:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
            found |= {Path(path) for path in paths if path.startswith(f"{SHARED_MEMORY}/")}
        return sorted(path for path in found if path.exists())

    def _port_is_free(self) -> bool:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", self.port))
            except OSError:
                return False
        return True


LONGEST_TEMPORARY_DIRECTORY = 45
"""A socket's whole name has at most 107 bytes, and vLLM's sockets lie in the folder under names of 36."""


def _temporary_folder() -> Path:
    """For what a server leaves when it is ended: vLLM the sockets and the rendezvous file of its processes."""
    usual = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="rewarm-server-", dir=usual if len(usual) <= LONGEST_TEMPORARY_DIRECTORY else "/tmp")
    )


def _end_with_parent() -> None:
    """In the child, before it becomes the server: the end of the trial, whatever its cause, is a SIGTERM to it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
