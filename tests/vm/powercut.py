"""The power-cut proof: a store-and-evict load on XFS, cut at many moments, each checked after a boot.

One guest runs the load on an NVMe drive whose every write and flush is logged, and is killed in the middle of it. From
the log the drive is rebuilt as a power cut at each of the moments would have left it, without what was not flushed. A
second guest mounts these drives, one after the other, opens the volumes and asks for every record that was ever stored.

By hand::

    python tests/vm/powercut.py --results bench/results/powercut.json

Exit code: 0 all held, 1 something did not, 3 this machine cannot run the guest (it says what is missing).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import writelog
from guest import BLOCK_BYTES, Drive, GuestFailed, boot
from image import Image, NoGuest, get_image, missing_tools
from report import PHASES, Moment, figures_of, row_of, verdict
from writelog import Entry, Loss

import rewarm
from rewarm.bench.report import Report
from rewarm.units import MIB

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DRIVE_BYTES = 512 * MIB
NOTE_AT = DRIVE_BYTES - BLOCK_BYTES
GUEST_PYTHON = "3.13"
LOSSES = (Loss.ALL, Loss.SOME, Loss.ALL, Loss.SOME, Loss.NONE)
STARTED = time.monotonic()


def load_spec(engine: str) -> dict[str, Any]:
    """What the guest stores; one volume a phase, in this order. The durable one has room for all: none is evicted."""
    cache = {
        "engine": engine, "page_cache": False, "durable": False, "payload_bytes": 300_000, "capacity_bytes": 30 * MIB,
        "batch": 4, "batches": 80, "batches_a_mark": 30,
    }  # fmt: skip
    return {
        "engine": engine,
        "xfs_bytes": DRIVE_BYTES - 16 * MIB,
        "note_at": NOTE_AT,
        "careless_bytes": 100_000,
        "phases": {
            "cache": cache,
            "paged": cache | {"engine": "pure", "page_cache": True},
            "durable": cache | {"durable": True, "payload_bytes": 100_000, "capacity_bytes": 60 * MIB},
        },
    }


def main() -> int:
    arguments = parse_arguments()
    lacks = missing_tools()
    if lacks:
        print(f"skipped: no guest: {lacks}")
        return 3
    started = datetime.now(timezone.utc)
    scratch = Path(tempfile.mkdtemp(prefix="rewarm-powercut-", dir=arguments.scratch))
    try:
        report, rows = prove(arguments, scratch)
    except (NoGuest, GuestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, NoGuest) else 1
    finally:
        if arguments.keep:
            say(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    report.started = started.isoformat(timespec="seconds")
    report.seconds = time.monotonic() - STARTED
    if arguments.results:
        document = json.loads(report.to_json()) | {"moments": rows}
        arguments.results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(verdict(report.figures))
    return 1 if report.shortfalls() else 0


def parse_arguments() -> argparse.Namespace:
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20, help="cuts of the load that asks for no fsync")
    parser.add_argument("--paged-moments", type=int, default=8, help="cuts of the same load through the page cache")
    parser.add_argument("--durable-moments", type=int, default=8, help="cuts of the load that asks for durable=True")
    parser.add_argument("--engine", default="auto", help="engine in the guest: pure, threads, io_uring, auto")
    parser.add_argument("--seed", type=int, default=1, help="chooses the moments, and the blocks that survive")
    parser.add_argument("--results", type=Path, help="write the report here, as JSON")
    parser.add_argument("--cache", type=Path, default=cache_home / "rewarm" / "vm", help="folder of the guest's image")
    parser.add_argument("--scratch", type=Path, help="folder for drives and logs: 6 GiB (default: TMPDIR)")
    parser.add_argument("--keep", action="store_true", help="keep that folder and print its name")
    return parser.parse_args()


def prove(arguments: argparse.Namespace, scratch: Path) -> tuple[Report, list[dict[str, Any]]]:
    """Load, cut, rebuild, check; the report and its moments."""
    wanted = dict(zip(PHASES, (arguments.moments, arguments.paged_moments, arguments.durable_moments), strict=True))
    image = get_image(arguments.cache)
    source, out = scratch / "src", scratch / "out"
    out.mkdir()
    stage(source, arguments.cache, load_spec(arguments.engine))
    drive, log = scratch / "drive", scratch / "log"
    with drive.open("wb") as handle:
        handle.truncate(DRIVE_BYTES)
    log.touch()
    say(f"load: guest {image.kernel_release}, engine {arguments.engine}")
    job = "load.py,/src/spec.json"
    load_s = boot(image, job, source, out, [Drive(drive, log)], cut_when=(out / "cut").exists, timeout_s=900)
    loads = read_answers(out / "load.jsonl")
    entries = writelog.read_entries(log)
    noted = [(at, json.loads(page)) for at, page in writelog.notes(log, entries, NOTE_AT, BLOCK_BYTES)]
    moments = choose_moments(entries, noted, wanted, arguments.seed)
    say(f"load done in {load_s:.0f} s: {len(entries)} log entries, {len(moments)} moments")
    drives, rebuilt = [], []
    for number, moment in enumerate(moments):
        drives.append(Drive(scratch / f"drive{number}"))
        rebuilt.append(
            writelog.rebuild(
                log, entries, moment.cut, moment.loss, drives[-1].path,
                drive_bytes=DRIVE_BYTES, block_bytes=BLOCK_BYTES, seed=arguments.seed + number,
            )
        )  # fmt: skip
    say(f"check: {len(drives)} drives rebuilt")
    check_s = boot(image, "check.py,/src/spec.json", source, out, drives, timeout_s=120 + 30 * len(drives))
    found = read_answers(out / "check.jsonl")
    rows = [row_of(*each) for each in zip(moments, rebuilt, found, strict=True)]
    figures = figures_of(rows, loads, wanted, flushes_per_record(entries, noted))
    guests = {"load_s": load_s, "check_s": check_s, "log_entries": len(entries), "loads": loads}
    command = shlex.join(["python", "tests/vm/powercut.py", *_settings(sys.argv[1:])])
    report = Report(command=command, started="", seconds=0, figures=figures, environment=environment(image) | guests)
    return report, rows


def _settings(arguments: list[str]) -> list[str]:
    """The command's arguments without the folders of one machine."""
    return [a for a in arguments if not Path(a).is_absolute() and a not in {"--keep", "--scratch", "--cache"}]


def stage(source: Path, cache: Path, spec: dict[str, Any]) -> None:
    """The folder that the guest sees as /src: Rewarm, the packages that it needs, the guest's own scripts."""
    package = Path(rewarm.__file__).parent
    shutil.copytree(HERE / "inside", source)
    shutil.copytree(package, source / "rewarm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(guest_packages(cache), source / "site")
    (source / "spec.json").write_text(json.dumps(spec))


def guest_packages(cache: Path) -> Path:
    """What Rewarm's volume imports, for the guest's Python, in the version that the tools' lock names; fetched once."""
    lock = (ROOT / "requirements" / "tools.lock").read_text().splitlines()
    pin = next(line.split()[0] for line in lock if line.startswith("google-crc32c=="))
    folder = cache / f"site-{GUEST_PYTHON}-{pin}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=cache) as scratch:
            command = [
                sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-compile",
                f"--python-version={GUEST_PYTHON}", "--platform=manylinux2014_x86_64", f"--target={scratch}/site", pin,
            ]  # fmt: skip
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise NoGuest(f"pip could not fetch {pin}: {done.stderr.strip()[-400:]}")
            (Path(scratch) / "site").rename(folder)
    return folder


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines that the guest wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


Noted = list[tuple[int, dict[str, Any]]]
"""(entry of the log, what had been acknowledged when it was written)."""


def choose_moments(entries: list[Entry], noted: Noted, wanted: dict[str, int], seed: int) -> list[Moment]:
    """Cuts in the stretch of each phase, with what the guest had noted as acknowledged before each."""
    moments = []
    for phase, count in wanted.items():
        within = [at for at, note in noted if note["phase"] == phase]
        for number, cut in enumerate(writelog.choose_cuts(entries, within[0], within[-1], count, seed)):
            said = [note for at, note in noted if at < cut][-1]
            acknowledged = {name: records for name, records in said.items() if name != "phase"}
            moments.append(Moment(phase, cut, LOSSES[number % len(LOSSES)], acknowledged))
    return moments


def flushes_per_record(entries: list[Entry], noted: Noted) -> dict[str, float]:
    """How often the device was told to flush in a phase's stretch of the log, a record stored."""
    found = {}
    for phase in PHASES:
        within = [at for at, note in noted if note["phase"] == phase]
        records = next(note[phase] for at, note in reversed(noted) if note["phase"] == phase)
        found[phase] = sum(entry.flushes for entry in entries[within[0] : within[-1]]) / records
    return found


def environment(image: Image) -> dict[str, Any]:
    """What somebody else needs to repeat this."""
    version = subprocess.run(["qemu-system-x86_64", "--version"], check=True, capture_output=True, text=True).stdout
    return {
        "guest_kernel": image.kernel_release,
        "guest_file_system": "xfs",
        "guest_python": GUEST_PYTHON,
        "drive": "QEMU NVMe, 4096-byte blocks, volatile write cache, below a loop device (no FUA)",
        "block_bytes": BLOCK_BYTES,
        "qemu": version.splitlines()[0],
        "accelerator": "tcg",
        "host_kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "rewarm": rewarm.__version__,
    }


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
