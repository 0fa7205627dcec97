"""What a reader must know of the machine to judge the figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from rewarm import __version__
from rewarm.trial.arms import Installation
from rewarm.units import format_size


def describe(install: Installation, roots: dict[str, Path]) -> dict[str, Any]:
    """Fields of ``environment``.

    Args:
        install: The vLLM that serves.
        roots: Directories by what they are for.
    """
    load = os.getloadavg()
    return {
        "machine": f"{_cpu()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "memory": format_size(psutil.virtual_memory().total),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": "cpu" if install.on_cpu else "accelerator",
        "load": f"{load[0]:.2f} over the minute before",
        "python": platform.python_version(),
        **install.versions,
        "rewarm": __version__,
        **{f"{name}_directory": _file_system(root) for name, root in roots.items()},
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(root: Path) -> str:
    """``ext4 on /dev/vda, 78.0 GiB free``: of the mount that holds the directory."""
    mounts = [part for part in psutil.disk_partitions(all=True) if root.resolve().is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    free = format_size(psutil.disk_usage(str(root)).free)
    return f"{mount.fstype} on {mount.device}, {free} free" if mount else f"{free} free"
