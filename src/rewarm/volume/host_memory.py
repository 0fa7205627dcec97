"""How much memory files in a tmpfs may still take, before somebody is killed for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rewarm.volume.layout import read_small_file

_UNLIMITED = 1 << 60
"""cgroup v1 writes a number above this where there is no limit."""
_KIB = 1024


def free_memory(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> tuple[int, str]:
    """(bytes, what bounds them): the least of what the machine has available and what each memory cgroup has left.

    The pages of a tmpfs count for the cgroup of whoever wrote them first. File cache, which goes when it must, is free.

    Args:
        proc: Where the process file system is mounted.
        cgroups: Where the cgroup file systems are.
    """
    bounds = [(free, f"the memory limit of cgroup {name}") for name, free in _cgroups_left(proc, cgroups)]
    with suppress(OSError, ValueError, StopIteration):
        lines = read_small_file(os.path.join(proc, "meminfo")).decode().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        bounds.append((int(available.split()[1]) * _KIB, "this machine"))
    return min(bounds, default=(_UNLIMITED, "this machine"))


def _cgroups_left(proc: str, cgroups: str) -> Iterator[tuple[str, int]]:
    """(path, bytes left) of the memory cgroups that this process is in, as far as they are to be seen here."""
    try:
        lines = read_small_file(os.path.join(proc, "self", "cgroup")).decode().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_new = not controllers
        if not is_new and "memory" not in controllers.split(","):
            continue
        top = Path(cgroups) if is_new else Path(cgroups) / "memory"
        names = ("memory.max", "memory.current") if is_new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        place = PurePosixPath(path.lstrip("/"))
        for one in (place, *place.parents):
            with suppress(OSError, ValueError):  # no limit, or a cgroup of another namespace
                limit, used = (int(read_small_file(str(top / one / name))) for name in names)
                if limit < _UNLIMITED:
                    yield f"/{one}".replace("/.", "/"), max(0, limit - used + _file_cache(top / one))


def _file_cache(cgroup: Path) -> int:
    """Bytes of file cache that a cgroup can give up; a tmpfs's are not among them."""
    with suppress(OSError, ValueError):
        pairs = (line.split() for line in read_small_file(str(cgroup / "memory.stat")).decode().splitlines())
        numbers = {name: int(number) for name, number in pairs}
        prefix = "total_" if "total_inactive_file" in numbers else ""
        return numbers.get(f"{prefix}inactive_file", 0) + numbers.get(f"{prefix}active_file", 0)
    return 0
