"""The output folder as evidence: an append-only log whose lines are chained by hashes, and a manifest over all files.

events.jsonl    one event a line: {"seq", "previous", "at", "event", ...}; previous is the sha256 of the line before
result.json     what follows from the events: statistics, proofs, gates, verdict
report.html report.md junit.xml      result.json for people and machines
manifest.json   in-toto Statement v1 with the sha256 of every file above

A hash proves that nothing was changed since, not that what was written is true.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rewarm.errors import DamageError, StorageError, UsageError

EVENTS, RESULT, MANIFEST = "events.jsonl", "result.json", "manifest.json"
REPORTS = ("report.html", "report.md", "junit.xml")
PREDICATE_TYPE = "urn:rewarm:trial:1"

_START = "0" * 64


def canonical(document: Any) -> str:
    """JSON in one spelling: sorted keys, no spaces, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class EventLog:
    """Writes events.jsonl; each event is on the disk's way when ``add`` returns.

    Args:
        folder: The output folder; made when it is missing.
    Raises:
        UsageError: The folder has something in it already.
        StorageError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UsageError(f"{folder} is not empty", hint="a trial writes into a new folder: --out DIR")
            self._file = (folder / EVENTS).open("x", encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"{folder} cannot hold a trial: {error.strerror}", path=str(folder), errno=error.errno or 0
            ) from error
        self._previous = _START
        self._next = 0

    def add(self, event: str, **fields: Any) -> None:
        """Append one event with its wall-clock time."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = canonical({"seq": self._next, "previous": self._previous, "at": at, "event": event, **fields})
        self._file.write(line + "\n")
        self._file.flush()
        self._previous = hashlib.sha256(line.encode()).hexdigest()
        self._next += 1

    def close(self) -> None:
        """Bring the log to the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a trial, their chain checked.

    Raises:
        UsageError: No trial lies there.
        DamageError: A line is not what was written.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise UsageError(f"{folder} holds no trial", hint=f"a folder with {EVENTS}, as rewarm trial run writes it")
    previous = _START
    events = []
    try:
        text = path.read_bytes().decode()
        lines = text.removesuffix("\n").split("\n")
        for number, line in enumerate(lines):
            event = json.loads(line)
            if canonical(event) != line or (event["seq"], event["previous"]) != (number, previous):
                raise DamageError(f"{path}: line {number + 1} does not follow from the line before it")
            previous = hashlib.sha256(line.encode()).hexdigest()
            events.append(event)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DamageError(f"{path}: line {len(events) + 1} is not an event") from error
    if not text.endswith("\n"):
        raise DamageError(f"{path}: the last line is cut short")
    return events


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write result.json."""
    (folder / RESULT).write_text(_pretty(result), encoding="utf-8")


def write_manifest(folder: Path) -> None:
    """Write manifest.json over the files that are there now."""
    (folder / MANIFEST).write_text(_pretty(_statement(folder)), encoding="utf-8")


def check_files(folder: Path, result: Mapping[str, Any]) -> list[str]:
    """What is wrong with the files, one line each; none: all is as it was written.

    Args:
        folder: Of the trial.
        result: What follows from the events, computed anew.
    """
    found = []
    path = folder / RESULT
    if not path.is_file() or path.read_bytes() != _pretty(result).encode():
        found.append(f"{path}: does not follow from {EVENTS}")
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return [*found, f"{manifest}: missing"]
    try:
        listed = {each["name"]: each["digest"]["sha256"] for each in json.loads(manifest.read_bytes())["subject"]}
    except (ValueError, RecursionError, KeyError, TypeError):
        return [*found, f"{manifest}: not a manifest"]
    for name in _subjects():
        digest = _sha256(folder / name)
        if digest is None:
            found.append(f"{folder / name}: missing")
        elif listed.get(name) != digest:
            found.append(f"{folder / name}: not what {MANIFEST} says")
    if not found and manifest.read_bytes() != _pretty(_statement(folder)).encode():
        found.append(f"{manifest}: changed")
    return found


def _subjects() -> Sequence[str]:
    return (EVENTS, RESULT, *REPORTS)


def _statement(folder: Path) -> dict[str, Any]:
    subject = [{"name": name, "digest": {"sha256": _sha256(folder / name)}} for name in _subjects()]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subject,
        "predicateType": PREDICATE_TYPE,
        "predicate": {},
    }


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _pretty(document: Any) -> str:
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
