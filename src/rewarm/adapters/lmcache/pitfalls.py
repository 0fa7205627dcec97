"""What makes LMCache drop KV, or never find it again, without an error: seen in the environment and in its files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rewarm.errors import RewarmError
from rewarm.inputs import read_input
from rewarm.units import MIB

KFD = "/dev/kfd"
"""Is there where the kernel drives an AMD accelerator."""
_REMOTE = re.compile(r"^\s*remote_url\s*:\s*[\"']?(fs:///[^\s\"'#]*)", re.MULTILINE)
_CUDA_PACKAGES = ("cupy-cuda", "cuda-python", "cufile-python")


def pitfalls(environ: Mapping[str, str], *, in_process: bool, kfd: str = KFD) -> list[str]:
    """One line for each that is seen here, with what to do.

    Args:
        environ: Of the server to be.
        in_process: Whether LMCache runs inside of vLLM, and not as a server of its own.
        kfd: The device file of AMD accelerators.
    """
    found = [
        *_file_urls(environ),
        *_cuda_wheel(kfd),
    ]
    if in_process and not environ.get("PYTHONHASHSEED", "").isdigit():
        found.append(
            "PYTHONHASHSEED is not set here: without it vLLM before 0.30, and Python's own hash in any, name all "
            "chunks anew at every start; set PYTHONHASHSEED=0 for every process of the server"
        )
    if environ.get("LMCACHE_LOCAL_DISK"):
        found.append("LMCACHE_LOCAL_DISK is set: everything would be stored twice; unset it")
    return found


def _file_urls(environ: Mapping[str, str]) -> list[str]:
    """A URL of LMCache's fs connector without a host and a port: LMCache warns once and stores nothing."""
    urls = [environ["LMCACHE_REMOTE_URL"]] if environ.get("LMCACHE_REMOTE_URL", "").startswith("fs:///") else []
    path = environ.get("LMCACHE_CONFIG_FILE", "")
    if path and Path(path).is_file():
        try:
            urls += _REMOTE.findall(read_input(path, MIB).decode(errors="replace"))
        except (RewarmError, OSError) as error:
            return [f"LMCACHE_CONFIG_FILE cannot be read: {error}"]
    return [
        f"remote_url {url} has no host and port, so LMCache drops what it should store there: "
        f"write fs://local:0{url.removeprefix('fs://')}, or leave it out"
        for url in urls
    ]


def _cuda_wheel(kfd: str) -> list[str]:
    """LMCache's ordinary wheel where there is an AMD accelerator."""
    if not Path(kfd).exists():
        return []
    try:
        wheel = metadata.distribution("lmcache")
    except metadata.PackageNotFoundError:
        return []
    needs: Sequence[str] = wheel.requires or ()
    if "rocm" in wheel.version or not any(need.startswith(_CUDA_PACKAGES) for need in needs):
        return []
    text = (
        f"lmcache {wheel.version} here is built for CUDA, and this machine has an AMD accelerator ({kfd}): "
        "install the ROCm wheel of its releases, or build it with BUILD_WITH_HIP=1"
    )
    return [text]
