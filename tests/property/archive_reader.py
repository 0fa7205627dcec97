"""Drives rewarm.volume.archive.import_archive without a disk: the volume it opens only looks at what it is given."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from archive_cases import PAYLOAD, make_record
from headerpage import PAGE

import rewarm.volume.archive
from rewarm.errors import RewarmError
from rewarm.volume.layout import NamespaceFile, identity_id


class _Stored:
    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def results(self) -> list[bool]:
        return [True]


class _Namespace:
    def __init__(self, volume: Volume, file: NamespaceFile) -> None:
        self.volume = volume
        self.file = file

    def contains(self, key: bytes) -> bool:
        return key in self.volume.stored

    def store(self, payloads: list[tuple[bytes, int]]) -> _Stored:
        for key, address in payloads:
            self.volume.stored[key] = ctypes.string_at(address, self.file.payload_bytes)
        return _Stored()


class Volume:
    """In the place of a volume."""

    roots: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}

    def open(self, roots: Any, *, engine: Any) -> Volume:
        return self

    def namespace(self, identity: Mapping[str, Any], *, payload_bytes: int) -> _Namespace:
        return _Namespace(self, NamespaceFile(identity_id(identity), payload_bytes, identity))

    def wait_scanned(self) -> bool:
        return True

    def close(self) -> None: ...


@contextmanager
def no_disk() -> Iterator[Volume]:
    """Within it, an import opens this volume, and no engine."""
    module: Any = rewarm.volume.archive
    before = module.Volume, module.open_engine
    module.Volume, module.open_engine = volume, _ = Volume(), lambda _config: Volume()
    try:
        yield volume
    finally:
        module.Volume, module.open_engine = before


def wrong_about(raw: bytes, expected: set[bytes] | None, *, is_certain: bool, volume: Volume) -> tuple[str, str]:
    """("taken" or "refused", what an import of these bytes does that it must not; empty where all is well)."""
    volume.stored.clear()
    outcome = "taken"
    try:
        rewarm.volume.archive.import_archive(io.BytesIO(raw), ["nowhere"])
    except RewarmError:
        outcome = "refused"
    except Exception as error:  # noqa: BLE001 - whatever a hostile archive raises is the finding
        return "refused", f"raised {type(error).__name__}: {error}"
    for key, payload in volume.stored.items():
        if payload != make_record(key)[PAGE : PAGE + PAYLOAD]:
            return outcome, f"stored other bytes than those of record {key.hex()}"
    if not is_certain:
        return outcome, ""
    if expected is None:
        return outcome, "was taken as a whole" if outcome == "taken" else ""
    if outcome == "refused":
        return outcome, "a whole archive was refused"
    return outcome, "" if set(volume.stored) == expected else f"took {len(volume.stored)} records, not {len(expected)}"
