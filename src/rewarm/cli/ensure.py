"""What commands that print a server's configuration have in common: the volume is there, or is made."""

from __future__ import annotations

import os

from rewarm.cli.common import note
from rewarm.config import KvConfig
from rewarm.engine import EngineConfig, open_engine
from rewarm.errors import UsageError
from rewarm.units import format_size, parse_size
from rewarm.volume import Volume, create_volume

ROOT_FILE = "rewarm.volume"


def size_option(option: str, text: str) -> int:
    """Bytes of a size that was given, above none."""
    num_bytes = parse_size(text)
    if num_bytes <= 0:
        raise UsageError(f"{option} is {text}", hint="like 200GiB")
    return num_bytes


def ensure_volume(asked: KvConfig) -> None:
    """Open the volume to see that it is whole, but for roots that are not there, or make it."""
    if any(os.path.lexists(os.path.join(root, ROOT_FILE)) for root in asked.roots):
        capacity_bytes, away = _capacity_of(asked)
        if away:
            note(f"to add a directory to the volume: rewarm volume add-root {asked.roots[0]} --new DIR --size SIZE")
        if asked.capacity_bytes not in (0, capacity_bytes) and not away:
            note(f"the volume is there and keeps its capacity of {format_size(capacity_bytes)}")
        return
    where = ", ".join(asked.roots)
    if asked.read_only:
        raise UsageError(f"there is no volume to read in {where}", hint="leave --read-only out to make one")
    if not asked.capacity_bytes:
        raise UsageError(f"there is no volume in {where} yet", hint="say how much it may hold, like --size 200GiB")
    made = create_volume(asked.roots, capacity_bytes=asked.capacity_bytes)
    note(f"made a volume of {format_size(made.capacity_bytes)} in {where}")


def _capacity_of(asked: KvConfig) -> tuple[int, list[str]]:
    """Bytes over the roots that are there, and the roots that are not: a server starts without those."""
    engine = open_engine(EngineConfig(kind="pure", num_workers=1))
    try:
        volume = Volume.open(asked.roots, engine=engine, read_only=True, janitor=False, may_be_away=True)
        try:
            return volume.capacity_bytes, list(volume.away)
        finally:
            volume.close()
    finally:
        engine.close()
