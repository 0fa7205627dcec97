"""Run the fault campaign on one subject, and say what it served.

By hand::

    python tests/fault/run.py --engine threads --seed 1 --count 500          # a sample
    python tests/fault/run.py --engine threads --seed 1 --case 137           # one case again, with its story
    python tests/fault/run.py --subject vllm-fs --seed 1 --count 1000        # vLLM's own fs tier, for the table
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import broken
import faultshim
from campaign import Campaign, Row, Subject
from faultlist import BY_NAME, Case, deal
from faultshim import Shim
from zygote import Zygote


def summary(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Counts by kind of fault."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        kind = kinds[row.fault]
        kind["cases"] += 1
        kind["injected"] += row.fired
        kind["chunks_served"] += row.good
        kind["wrong_blocks_served"] += row.wrong
        kind["cases_with_wrong_bytes"] += row.wrong > 0
        kind["still_wrong_after_another_store"] += row.wrong_again > 0
        kind["damaged_counted"] += row.damaged
        kind["failed_cases"] += bool(row.complaints)
    return {name: dict(kinds[name]) for name in BY_NAME if name in kinds}


def make_subject(name: str, engine: str, folder: Path, *, durable: bool = False) -> Subject:
    """The subject of that name; what it needs beside its roots lies in the folder."""
    if name == "vllm-fs":
        from subject_fs import FsSubject

        return FsSubject()
    if name == "engine":
        from subject_engine import EngineSubject

        return EngineSubject(engine)
    from subject_volume import VolumeSubject, share_one_janitor, wait_for_slow_machines

    share_one_janitor()
    wait_for_slow_machines()
    if name == "volume":
        return VolumeSubject(engine, durable=durable)
    from subject_rewarm import RewarmSubject

    return RewarmSubject(engine, folder)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", choices=["rewarm", "volume", "engine", "vllm-fs"], default="rewarm")
    parser.add_argument("--engine", default="auto", help="io_uring, threads, pure or auto")
    parser.add_argument("--durable", action="store_true", help="subject volume: fsync each record")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="stop when so many faults were injected")
    parser.add_argument("--case", type=int, help="this case alone, with its story")
    parser.add_argument("--kind", action="append", help="only faults of this name; may be repeated")
    parser.add_argument("--folder", type=Path, help="where the roots lie; default: a new folder, removed at the end")
    parser.add_argument("--broken", choices=["reader", "writer", "scheduler"], help="break something: is it seen?")
    parser.add_argument("--hang", type=float, help="no campaign: a root that hangs for so many seconds; see hang.py")
    parser.add_argument("--rows", type=Path, help="write one JSON line a case here")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the cases; 0 when none has a complaint."""
    args = parse(argv)
    if "FAULTSHIM_CONTROL" in os.environ:
        del os.environ["LD_PRELOAD"]  # programs that are started from here run without the shim
        control = Path(os.environ.pop("FAULTSHIM_CONTROL"))
        if args.hang is not None:
            import hang

            return hang.run(control.parent, Shim(control), args.hang, broken=args.broken == "scheduler")
        return run(args, control.parent, Shim(control))
    folder = Path(tempfile.mkdtemp(prefix="rewarm-faults-", dir=args.folder))
    try:
        if missing := faultshim.missing():
            print(f"skipped: all faults in system calls ({missing})", file=sys.stderr)
            return run(args, folder, None)
        control = folder / "parent.shim"
        Shim(control)
        env = faultshim.preload(faultshim.build(folder), control)
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
        return subprocess.run([sys.executable, __file__, *argv], env=env, check=False).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def dealt(args: argparse.Namespace) -> Iterator[Case]:
    """The one case, or cases without end."""
    numbers = [args.case] if args.case is not None else itertools.count()
    for number in numbers:
        case = deal(args.seed, number)
        if not args.kind or case.fault.name in args.kind:
            yield case


def run(args: argparse.Namespace, folder: Path, shim: Shim | None) -> int:
    """Run the cases in this process, which runs under the shim."""
    if args.broken:
        broken.install(args.broken)
    subject = make_subject(args.subject, args.engine, folder, durable=args.durable)
    zygote = Zygote() if shim else None
    campaign = Campaign(subject, folder, shim, zygote)
    rows: list[Row] = []
    injected = 0
    started = time.monotonic()
    try:
        for case in dealt(args):
            row = campaign.run(case)
            if row is not None:
                rows.append(row)
                injected += row.fired
                note(args, row)
            if injected >= args.count:
                break
    finally:
        campaign.close()
        if zygote:
            zygote.close()
    failed = sum(bool(row.complaints) for row in rows)
    report = {
        "subject": subject.name, "seed": args.seed, "cases": len(rows), "injected": injected,
        "wrong_blocks_served": sum(r.wrong for r in rows),
        "cases_with_wrong_bytes": sum(r.wrong + r.wrong_again > 0 for r in rows), "failed_cases": failed,
        "seconds": round(time.monotonic() - started, 1), "kinds": summary(rows),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    return 1 if failed else 0


def note(args: argparse.Namespace, row: Row) -> None:
    """Keep a case's row; tell its story on stderr where somebody must read it, with the command that repeats it."""
    if args.rows:
        with args.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: v for k, v in asdict(row).items() if k != "story"}) + "\n")
    if args.case is None and (not row.complaints or args.subject == "vllm-fs"):
        return
    again = f"python tests/fault/run.py --subject {args.subject} --engine {args.engine} --seed {args.seed}"
    print(f"case {row.case} ({row.fault}): {'; '.join(row.complaints) or 'as it should be'}", file=sys.stderr)
    print("\n".join(f"    {line}" for line in row.story), file=sys.stderr)
    print(f"    repeat: {again} --case {row.case}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
