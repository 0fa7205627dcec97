"""What the policy decided and what came of it, kept beside the volume: ``rewarm kv explain`` and replays read it.

``<root>/.rewarm/policy/`` of the volume's first root has, for each host and namespace, ``<name>.jsonl`` (the newest
decisions, a JSON object a line; ``<name>.1.jsonl`` has those before), and ``<name>.json`` (the rates last learned, with
which the next start begins). Advice like everything in there: it may be missing, old or anything at all.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.errors import StorageError
from rewarm.volume.layout import DIR_MODE, FILE_MODE, open_regular, read_small_file

logger = logging.getLogger(__name__)

SCHEMA = "rewarm.kv-decisions/1"
MAX_LOG_BYTES = 1 << 20
"""Some 2,500 decisions; two such files are kept."""
MAX_DIGITS = 20
"""Of an integer; 64 bits have no more."""
MAX_QUEUED = 4096
"""Lines that wait for a slow disk; what comes beyond is dropped."""
CLOSE_WAIT_S = 2.0


class DecisionLog:
    """Written by a thread of its own: the server's never waits for a disk."""

    def __init__(self, folder: str, name: str) -> None:
        """
        Args:
            folder: Made when the first line is written.
            name: Of the files, without a suffix.
        """
        self._folder = folder
        self._path = os.path.join(folder, f"{name}.jsonl")
        self._rates_path = os.path.join(folder, f"{name}.json")
        self._queue: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rewarm-kv-decisions", daemon=True)
        self._thread.start()

    def add(self, line: dict[str, Any]) -> None:
        """Append a line."""
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put((self._path, json.dumps(line, separators=(",", ":"))))

    def keep_rates(self, rates: dict[str, Any]) -> None:
        """Replace the rates for the next start."""
        self._queue.put((self._rates_path, json.dumps(rates)))

    def read_rates(self) -> dict[str, Any]:
        """What the last run kept; empty where there is nothing that can be read. No number in it is to be trusted."""
        try:
            document = json.loads(read_small_file(self._rates_path), parse_int=_integer_or_none)
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def close(self) -> None:
        """Write what is queued, as far as that takes a bounded time."""
        self._queue.put(None)
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        try:
            os.makedirs(self._folder, mode=DIR_MODE, exist_ok=True)
            while (entry := self._queue.get()) is not None:
                path, text = entry
                if path == self._rates_path:
                    self._replace(path, text)
                else:
                    self._append(text)
        except OSError as error:
            logger.warning("Rewarm: decisions are not kept: %s: %s", self._folder, error.strerror)
            while self._queue.get() is not None:
                pass

    def _append(self, text: str) -> None:
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, f"{text}\n".encode())
            is_full = os.fstat(descriptor).st_size > MAX_LOG_BYTES
        finally:
            os.close(descriptor)
        if is_full:
            os.replace(self._path, f"{self._path.removesuffix('.jsonl')}.1.jsonl")

    @staticmethod
    def _replace(path: str, text: str) -> None:
        new = f"{path}.{os.getpid()}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        os.replace(new, path)


def log_files(folder: str) -> list[Path]:
    """All logs of a folder, the older part of each before the newer."""
    with suppress(OSError):
        return sorted(Path(folder).glob("*.jsonl"), key=lambda path: (path.name.split(".")[0], ".1." not in path.name))
    return []


@dataclass(frozen=True, slots=True)
class Log:
    """What a log holds."""

    lines: list[dict[str, Any]]
    """Every number in them is finite, and no integer longer than a server writes."""
    num_left_out: int
    """Lines that are no such thing: cut off, say, or damaged."""


def read_log(path: str | os.PathLike[str]) -> Log:
    """The lines of a log.

    Raises:
        StorageError: It cannot be read, or is far too long.
    """
    name = os.fspath(path)
    try:
        content = read_small_file(name, limit=64 * MAX_LOG_BYTES)
    except OSError as error:
        raise StorageError(f"{name} cannot be read: {error.strerror}", path=name, errno=error.errno or 0) from error
    texts = [text for text in content.split(b"\n") if text.strip()]
    lines = []
    for text in texts:
        with suppress(ValueError, RecursionError):
            document = json.loads(text, parse_constant=_integer, parse_int=_integer, parse_float=_finite)
            if isinstance(document, dict):
                lines.append(document)
    return Log(lines, len(texts) - len(lines))


def _integer(text: str) -> int:
    """Raises ValueError for what has more digits than a counter, and for NaN and its like."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _integer_or_none(text: str) -> int | None:
    """So that one odd number hides no other."""
    return int(text) if len(text) <= MAX_DIGITS else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
