"""Run the whole campaign and keep its figures: Rewarm in vLLM, vLLM's own fs tier on the same list, a root that hangs.

::

    python tests/fault/results.py --count 10000 --parallel 4      # bench/results/faults.json, and the table of its page
    python tests/fault/results.py --page                          # the table alone, into docs/guides/faults.md
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
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from faultlist import FAULTS

from rewarm.bench import environment
from rewarm.bench.report import Figure, Report, measured, with_goal
from rewarm.engine import probe_engines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "faults.json"
PAGE = ROOT / "docs" / "guides" / "faults.md"
BEGIN, END = "<!-- table -->", "<!-- /table -->"
PROGRAM = Path(__file__).with_name("run.py")
HANG_S = 60.0
ENGINES = ("threads", "io_uring")
"""Those that servers run on; each gets the whole count. The pure one is for machines without a compiler."""


def run_all(folder: Path, engines: Sequence[str], count: int, parallel: int) -> None:
    """Each run's report, as a file of the folder: threads-SEED.json, io_uring-SEED.json, peer.json, hang.json."""
    share = -(-count // parallel)
    for engine in engines:
        seeds = range(1, parallel + 1)
        _run(
            folder, {f"{engine}-{seed}": [f"--engine={engine}", f"--seed={seed}", f"--count={share}"] for seed in seeds}
        )
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


Runs = Sequence[dict[str, Any]]
"""Reports of runs with one seed each."""


def figures(rewarm: dict[str, Runs], peer: dict[str, Any], hang: dict[str, Any], count: int) -> list[Figure]:
    """The figures of a whole campaign."""
    made = [figure for engine, runs in rewarm.items() for figure in _of_engine(engine, runs, peer, count)]
    units = {"hung_s": "s", "answered": "", "loads_given_up": ""}
    made += [measured(f"faults.hang.{name}", unit, [hang[name]]) for name, unit in units.items()]
    wrong = measured("faults.hang.wrong_blocks", "", [hang["wrong_blocks"]])
    made.append(with_goal(wrong, "0", holds=wrong.value == 0))
    for side, calls in hang["slowest_call_ms"].items():
        (call, slowest_ms), = calls.items()  # fmt: skip
        slowest = measured(f"faults.hang.slowest_{side}_call", "ms", [slowest_ms], note=call)
        made.append(with_goal(slowest, "below 1000", holds=slowest_ms < 1000))
    return made


def _of_engine(engine: str, runs: Runs, peer: dict[str, Any], count: int) -> list[Figure]:
    def total(name: str) -> Figure:
        return measured(f"faults.{name}", "", [sum(run[name] for run in runs)], peers=[peer[name]], engine=engine)

    injected = total("injected")
    made = [with_goal(injected, f"at least {count}", holds=injected.value >= count)]
    for name in ("wrong_blocks_served", "failed_cases"):
        figure = total(name)
        made.append(with_goal(figure, "0", holds=figure.value == 0))
    return [*made, total("cases_with_wrong_bytes")]


def kinds(rewarm: dict[str, Runs], peer: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Counts by kind of fault, of each engine and of the peer."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for fault in FAULTS:
        sides: dict[str, dict[str, int]] = {}
        for side, runs in {**rewarm, "peer": [peer]}.items():
            counts: Counter[str] = Counter()
            for run in runs:
                counts.update(run["kinds"].get(fault.name, {}))
            sides[side] = dict(counts)
        table[fault.name] = sides
    return table


def write(path: Path, report: Report, **more: Any) -> None:
    """Keep a report, with what else belongs to it."""
    document = json.loads(report.to_json()) | more
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(document: dict[str, Any]) -> str:
    """The Markdown table of the page."""
    columns = [*(f"`{engine}`" for engine in ENGINES), "wrong blocks served", "vLLM's fs tier", "wrong blocks served"]
    lines = [f"| fault | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    sums: Counter[int] = Counter()
    for fault in FAULTS:
        sides = document["kinds"][fault.name]
        mine, peer = [sides.get(engine, {}) for engine in ENGINES], sides["peer"]
        cells = [*(side.get("injected") for side in mine), sum(side.get("wrong_blocks_served", 0) for side in mine)]
        cells += [peer.get("injected"), peer.get("wrong_blocks_served")]
        sums.update({column: cell for column, cell in enumerate(cells) if cell is not None})
        lines.append(f"| {fault.says} | {' | '.join('-' if cell is None else f'{cell:,}' for cell in cells)} |")
    totals = [f"{sums[column]:,}" for column in range(len(columns))]
    return "\n".join([*lines, f"| **all** | {' | '.join(totals)} |"])


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
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--page", action="store_true", help="put the table of --out into the page, no more")
    args = options.parse_args(argv)
    if args.page:
        _write_page(args.out)
        return 0
    started, begun = datetime.now(tz=timezone.utc), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rewarm-faults-") as temporary:
        folder = Path(temporary)
        where = environment.describe(folder)
        engines = [engine for engine in ENGINES if not probe_engines()[engine]]
        run_all(folder, engines, args.count, args.parallel)
        rewarm = {engine: [_read(path) for path in sorted(folder.glob(f"{engine}-*.json"))] for engine in engines}
        peer, hang = _read(folder / "peer.json"), _read(folder / "hang.json")
    report = Report(
        command=f"python tests/fault/results.py --count {args.count} --parallel {args.parallel}",
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - begun, 1),
        figures=figures(rewarm, peer, hang, args.count),
        environment=where | {"loadavg_after": list(os.getloadavg())},
        notes=[
            f"{run['subject']}: seed {run['seed']}, {run['injected']} injected"
            for run in [*chain(*rewarm.values()), peer]
        ],
    )
    write(args.out, report, kinds=kinds(rewarm, peer))
    if args.out == RESULTS:
        _write_page(RESULTS)
    for figure in report.shortfalls():
        print(f"{figure.name} is {figure.value:g}, goal: {figure.goal}", file=sys.stderr)
    return 1 if report.shortfalls() else 0


def _write_page(results: Path) -> None:
    PAGE.write_text(page_with(_read(results)), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
