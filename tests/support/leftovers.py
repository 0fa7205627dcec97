"""What a server leaves where temporary files lie, told from what others on this machine keep there at that time."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_STEADY = ("torchinductor_", "pytest-of-")
"""Caches and folders of the tests, which are meant to stay."""


def temporary_entries() -> set[Path]:
    """Everything in the temporary directory and in shared memory."""
    folders = {Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY}
    return {entry for folder in folders for entry in folder.iterdir() if not entry.name.startswith(_STEADY)}


def left_since(before: set[Path]) -> list[Path]:
    """New entries that a server made, and that no living process has bound, mapped or open."""
    new = {entry for entry in temporary_entries() - before if _may_be_of_a_server(entry)}
    return sorted(entry for entry in new - _in_use(new) if entry.exists())


def _may_be_of_a_server(entry: Path) -> bool:
    with suppress(OSError):
        return (
            entry.is_socket()
            or entry.parent == SHARED_MEMORY
            or entry.name.startswith(("vllm", "rewarm-server-", "torch"))
        )
    return False


def _in_use(entries: set[Path]) -> set[Path]:
    used = {entry for entry in entries if str(entry) in Path("/proc/net/unix").read_text()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            used |= {entry for entry in entries if str(entry) in maps}
        with suppress(OSError):
            targets = [str(link.readlink()) for link in (process / "fd").iterdir()]
            used |= {entry for entry in entries if any(target.startswith(str(entry)) for target in targets)}
        with suppress(OSError):
            environment = (process / "environ").read_bytes()
            used |= {entry for entry in entries if str(entry).encode() in environment}
    return used
