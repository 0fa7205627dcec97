"""Run the whole campaign and keep its figures: Rewarm in vLLM, vLLM's own fs tier on the same list, a root that hangs.

::

    python tests/fault/results.py --count 10000 --parallel 5      # writes bench/results/faults.json
    python tests/fault/results.py --page                          # puts its table into docs/guides/faults.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from faultlist import FAULTS

from rewarm.bench import environment
from rewarm.bench.report import Figure, Report, measured, with_goal

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "faults.json"
PAGE = ROOT / "docs" / "guides" / "faults.md"
BEGIN, END = "<!-- table -->", "<!-- /table -->"
PROGRAM = Path(__file__).with_name("run.py")
HANG_S = 60.0


def run_all(folder: Path, count: int, parallel: int) -> None:
    """Each run's report, as a file of the folder: rewarm-SEED.json, peer.json, hang.json."""
    share = -(-count // parallel)
    runs = {
        f"rewarm-{seed}": ["--engine=threads", f"--seed={seed}", f"--count={share}"] for seed in range(1, parallel + 1)
    }
    _run(folder, runs)
    _run(folder, {"peer": ["--subject=vllm-fs", f"--count={count}"]})
    _run(folder, {"hang": [f"--hang={HANG_S}"]})


def _run(folder: Path, runs: dict[str, list[str]]) -> None:
    """Several at once; what they say of cases that are not as they should be lies beside the reports."""
    started = []
    for name, arguments in runs.items():
        with (folder / f"{name}.json").open("wb") as out, (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=out, stderr=log))
    for process in started:
        process.wait()


def figures(rewarm: Sequence[dict[str, Any]], peer: dict[str, Any], hang: dict[str, Any], count: int) -> list[Figure]:
    """The figures of a whole campaign."""

    def total(name: str) -> Figure:
        return measured(f"faults.{name}", "", [sum(run[name] for run in rewarm)], peers=[peer[name]])

    injected = total("injected")
    made = [with_goal(injected, f"at least {count}", holds=injected.value >= count)]
    for name in ("wrong_blocks_served", "failed_cases"):
        figure = total(name)
        made.append(with_goal(figure, "0", holds=figure.value == 0))
    made.append(total("cases_with_wrong_bytes"))
    units = {"hung_s": "s", "answered": "", "loads_given_up": ""}
    made += [measured(f"faults.hang.{name}", unit, [hang[name]]) for name, unit in units.items()]
    wrong = measured("faults.hang.wrong_blocks", "", [hang["wrong_blocks"]])
    made.append(with_goal(wrong, "0", holds=wrong.value == 0))
    for side, calls in hang["slowest_call_ms"].items():
        (call, slowest_ms), = calls.items()  # fmt: skip
        slowest = measured(f"faults.hang.slowest_{side}_call", "ms", [slowest_ms], note=call)
        made.append(with_goal(slowest, "below 1000", holds=slowest_ms < 1000))
    return made


def kinds(rewarm: Sequence[dict[str, Any]], peer: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Counts by kind of fault, of both sides."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for fault in FAULTS:
        mine: Counter[str] = Counter()
        for run in rewarm:
            mine.update(run["kinds"].get(fault.name, {}))
        table[fault.name] = {"rewarm": dict(mine), "peer": peer["kinds"].get(fault.name, {})}
    return table


def write(path: Path, report: Report, **more: Any) -> None:
    """Keep a report, with what else belongs to it."""
    document = json.loads(report.to_json()) | more
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def conditions(folder: Path) -> dict[str, Any]:
    """What a run is done on."""
    return environment.describe(folder)


def table(document: dict[str, Any]) -> str:
    """The Markdown table of the page."""
    lines = [
        "| fault | injected | wrong blocks served | on vLLM's fs tier | wrong blocks served |",
        "|---|--:|--:|--:|--:|",
    ]
    for fault in FAULTS:
        mine, peer = document["kinds"][fault.name]["rewarm"], document["kinds"][fault.name]["peer"]
        cells = [
            f"{side[key]:,}" if side else "-" for side in (mine, peer) for key in ("injected", "wrong_blocks_served")
        ]
        lines.append(f"| {fault.says} | {' | '.join(cells)} |")
    totals = {figure["name"]: figure for figure in document["figures"]}
    injected, wrong = totals["faults.injected"], totals["faults.wrong_blocks_served"]
    cells = [f"{value:,.0f}" for value in (injected["value"], wrong["value"], injected["peer"], wrong["peer"])]
    return "\n".join([*lines, f"| **all** | {' | '.join(cells)} |"])


def page_with(document: dict[str, Any]) -> str:
    """The page as it is, with the table of these results."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(document)}\n{END}{after}"


def main(argv: list[str]) -> int:
    """Exit code 1 when a goal does not hold."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--parallel", type=int, default=1, help="runs at once, each with a seed of its own")
    options.add_argument("--reports", type=Path, help="take the reports of runs that were done, from this folder")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--page", action="store_true", help="put the table of --out into the page, no more")
    args = options.parse_args(argv)
    if args.page:
        PAGE.write_text(page_with(json.loads(args.out.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    started, begun = datetime.now(tz=timezone.utc), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rewarm-faults-") as temporary:
        folder = args.reports or Path(temporary)
        where = conditions(folder)
        if args.reports is None:
            run_all(folder, args.count, args.parallel)
        rewarm = [_read(path) for path in sorted(folder.glob("rewarm-*.json"))]
        peer, hang = _read(folder / "peer.json"), _read(folder / "hang.json")
        if args.reports is not None:
            started = min(_began(path) for path in folder.glob("rewarm-*.json"))
    report = Report(
        command=f"python tests/fault/results.py --count {args.count} --parallel {len(rewarm)}",
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - begun if args.reports is None else max(run["seconds"] for run in rewarm), 1),
        figures=figures(rewarm, peer, hang, args.count),
        environment=where | {"loadavg_after": list(os.getloadavg())},
        notes=[f"{run['subject']}: seed {run['seed']}, {run['injected']} injected" for run in [*rewarm, peer]],
    )
    write(args.out, report, kinds=kinds(rewarm, peer))
    for figure in report.shortfalls():
        print(f"{figure.name} is {figure.value:g}, goal: {figure.goal}", file=sys.stderr)
    return 1 if report.shortfalls() else 0


def _began(path: Path) -> datetime:
    ended = datetime.fromtimestamp(path.stat().st_mtime, tz=timezone.utc)
    return ended - timedelta(seconds=_read(path)["seconds"])


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
