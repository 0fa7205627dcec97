"""A real vLLM server on CPU for tests: started, asked, stopped; only ever the one that was started here."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
ANSWER_LIMIT_S = 180.0
CHUNK_TOKENS = 256

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
)


def transfer_config(root: Path, *flags: str, size: str = "2GiB") -> str:
    """What a user would pass: the output of ``rewarm vllm config``."""
    command = [sys.executable, "-m", "rewarm.cli.main", "vllm", "config", "--root", str(root), "--size", size, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout.strip()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    ttft_s: float


class Server:
    """Use as a context manager: ``with Server(...) as server``."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        transfer: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._temporary = Path(tempfile.mkdtemp(prefix="rewarm-server-"))
        self.port = free_port()
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "8192", "--max-num-seqs", "4", "--shutdown-timeout", "20", *flags]
        if transfer:
            command += ["--kv-transfer-config", transfer]
        dropped = {"PYTHONDONTWRITEBYTECODE"}
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(self._temporary), **(environment or {})}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def __enter__(self) -> Server:  # noqa: PYI034
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}\n{self.log_tail()}")
            with contextlib.suppress(OSError):
                self.get("/health")
                return self
            time.sleep(0.2)
        self.__exit__()
        raise AssertionError(f"the server was not healthy after {START_LIMIT_S} s\n{self.log_tail()}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As an operator stops it; whatever is left of its session after the limit is killed, and what it left goes."""
        shared = self._shared_memory_files()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: what it left behind
        self.process.wait(STOP_LIMIT_S)
        for path in shared:
            path.unlink(missing_ok=True)  # vLLM 0.32 leaves what its ranks on CPU talk through
        shutil.rmtree(self._temporary, ignore_errors=True)  # ... and its sockets

    def _shared_memory_files(self) -> set[Path]:
        """What the processes of its session have mapped in /dev/shm."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(process.name)) == self.process.pid:
                    lines = (process / "maps").read_text(errors="replace").splitlines()
                    found |= {Path(line.split(maxsplit=5)[-1]) for line in lines if "/dev/shm/" in line}
        return {path for path in found if path.exists()}

    def log_tail(self, num_lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S)

    def ask(self, prompt: Sequence[int], num_tokens: int = 16, salt: str = "") -> Answer:
        """Greedy tokens after a prompt; the client sees an error as an exception."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if salt:
            body["cache_salt"] = salt
        started = time.monotonic()
        first, tokens = 0.0, []
        with self.post("/v1/completions", {"model": self.model_name(), "return_token_ids": True, **body}) as lines:
            for line in lines:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                event = json.loads(text)
                assert "error" not in event, event
                tokens += event["choices"][0].get("token_ids") or []
                first = first or time.monotonic() - started
        assert len(tokens) == num_tokens
        return Answer(tuple(tokens), first)

    def model_name(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over its series that have these labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            if line.split("{")[0].split(" ")[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def reset_prefix_cache(self) -> None:
        """Forget what lies in the server's own blocks."""
        self.post("/reset_prefix_cache").close()

    def wait_for_records(self, root: Path, num_records: int, limit_s: float = 30.0) -> None:
        """Until that many records lie below ``root``."""
        wait_until(lambda: count_records(root) >= num_records, f"{num_records} records in {root}", limit_s)


def wait_until(holds: Any, what: str, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def count_records(root: Path) -> int:
    return sum(1 for _ in root.glob("*/??/*.rec"))


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """A prompt of byte tokens that shares no prefix with that of another number."""
    return [(number * 31 + index * (7 + number) + index // 11) % 256 for index in range(num_tokens)]


def drop_page_cache(root: Path) -> None:
    """Records below ``root`` leave the page cache, as far as an ordinary user can ask for that."""
    for record in root.glob("*/??/*.rec"):
        with record.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
