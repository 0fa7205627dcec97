"""What the power cuts left, as figures (``rewarm.bench/1``), and as the table of docs/guides/durability.md.

By hand, ``python tests/vm/report.py`` writes that table from bench/results/powercut.json.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from writelog import Loss, Rebuilt

from rewarm.bench.report import Figure, measured, with_goal

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "powercut.json"
PAGE = ROOT / "docs" / "guides" / "durability.md"
BEGIN, END = "<!-- power cuts: tests/vm/report.py -->\n", "<!-- /power cuts -->\n"
PHASES = ("cache", "paged", "durable")


@dataclass(frozen=True, slots=True)
class Moment:
    """One power cut: where in the log, what it takes, and what had been acknowledged until then."""

    phase: str
    cut: int
    loss: Loss
    acknowledged: dict[str, int]
    """Records of each volume that was made by then, and files of the control."""


def row_of(moment: Moment, rebuilt: Rebuilt, found: dict[str, Any]) -> dict[str, Any]:
    """One moment as the report keeps it; ``found`` is what the guest answered about the drive."""
    volumes = {name: found["volumes"][name] for name in PHASES if name in moment.acknowledged}
    kept = set(volumes["durable"]["hits"]) if "durable" in volumes else set()
    return {
        "phase": moment.phase,
        "log_entry": moment.cut,
        "unflushed_writes": moment.loss.value,
        "num_unflushed_writes": rebuilt.volatile_writes,
        "lost_bytes": rebuilt.lost_bytes,
        "acknowledged": {name: moment.acknowledged.get(name, 0) for name in (*PHASES, "careless")},
        "durable_lost": [number for number in range(moment.acknowledged.get("durable", 0)) if number not in kept],
        "careless": found["careless"],
        "volumes": {name: volume | {"hits": len(volume["hits"])} for name, volume in volumes.items()},
    }


def figures_of(
    rows: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]], wanted: dict[str, int], flushes: dict[str, float]
) -> list[Figure]:
    """The proof as figures: first what makes it one (moments, evictions, damage), then what must not happen.

    Args:
        rows: The moments.
        loads: What the guest said of each phase.
        wanted: Moments that were asked for, by phase.
        flushes: Of the device, a record, by phase; told, not judged.
    """
    volumes = [volume for row in rows for volume in row["volumes"].values()]
    files: Counter[str] = Counter()
    careless: Counter[str] = Counter()
    for volume in volumes:
        files.update(volume.get("files_before", {}))
    for row in rows:
        careless.update(row["careless"])
    moments = Counter(row["phase"] for row in rows)

    def count(found: Callable[[dict[str, Any]], int]) -> int:
        return sum(found(volume) for volume in volumes)

    return [
        *(_at_least(f"powercut.moments.{phase}", moments[phase], "cuts", wanted[phase]) for phase in PHASES),
        _at_least("powercut.evicted_records", sum(load["evicted"] for load in loads), "records", 1),
        _at_least("powercut.control_damaged_files", careless["torn"] + careless["empty"], "files", 1),
        _at_least("powercut.damaged_files", files["damaged"] + files["empty"], "files", 1),
        _at_least("powercut.hits", count(lambda v: v["hits"]), "records", 1),
        _none("powercut.wrong_records", count(lambda v: v.get("wrong", 0)), "records"),
        _none("powercut.failed_opens", count(lambda v: bool(v["error"] or not v["is_there"])), "opens"),
        _none("powercut.opens_without_recovery", count(lambda v: not v.get("is_recovered")), "opens"),
        _none("powercut.durable_records_lost", sum(len(row["durable_lost"]) for row in rows), "records"),
        _none("powercut.whole_but_missed", count(lambda v: v.get("whole_but_missed", 0)), "records"),
        _none("powercut.present_but_missed", count(lambda v: v.get("present_but_missed", 0)), "records"),
        _none("powercut.damaged_after_recovery", count(lambda v: v.get("damaged_after", 0)), "records"),
        _none("powercut.leftovers", count(lambda v: len(v.get("leftovers", []))), "files"),
        _none("powercut.budget_off", count(lambda v: abs(v.get("budget_off_bytes", 0))), "B"),
        _none("powercut.does_not_work_on", count(lambda v: not v.get("works_on")), "volumes"),
        *(measured(f"powercut.flushes.{name}", "flushes/record", [value]) for name, value in flushes.items()),
    ]


def _at_least(name: str, value: int, unit: str, bound: int) -> Figure:
    return with_goal(measured(name, unit, [value]), f">= {bound}", holds=value >= bound)


def _none(name: str, value: int, unit: str) -> Figure:
    return with_goal(measured(name, unit, [value]), "0", holds=value == 0)


def verdict(figures: Sequence[Figure]) -> str:
    """One line a figure, the count of those with a goal at the end."""
    words = {None: "      ", True: "ok    ", False: "FAILED"}
    lines = [
        f"{words[figure.holds]} {figure.name}: {figure.value:g} {figure.unit}"
        + (f" (goal {figure.goal})" if figure.goal else "")
        for figure in figures
    ]
    judged = [figure.holds for figure in figures if figure.holds is not None]
    return "\n".join([*lines, f"{judged.count(True)} passed, {judged.count(False)} failed"])


LOADS = {
    "cache": "no fsync, O_DIRECT (the default)",
    "paged": "no fsync, through the page cache",
    "durable": "durable=True",
}


def table(document: dict[str, Any]) -> str:
    """What the cuts during each load left of that load's volume."""
    flushes = {f["name"].rpartition(".")[2]: f["value"] for f in document["figures"] if "flushes" in f["name"]}
    lines = [
        "| records are stored | cuts | files found | of these not whole | served after | wrong | flushes a record |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase, words in LOADS.items():
        rows = [row for row in document["moments"] if row["phase"] == phase]
        volumes = [row["volumes"][phase] for row in rows]
        files: Counter[str] = Counter()
        for volume in volumes:
            files.update(volume["files_before"])
        damaged = files["damaged"] + files["empty"]
        served, wrong = (sum(volume[name] for volume in volumes) for name in ("hits", "wrong"))
        lines.append(
            f"| {words} | {len(rows)} | {files.total()} | {damaged} | {served} | {wrong} | {flushes[phase]:.2f} |"
        )
    careless = sum((Counter(row["careless"]) for row in document["moments"]), Counter[str]())
    damaged = careless["torn"] + careless["empty"]
    cuts = len(document["moments"])
    lines.append(f"| control: write, rename, no check | {cuts} | {careless.total()} | {damaged} | - | - | - |")
    return "\n".join(lines) + "\n"


def page_of(page: str, document: dict[str, Any]) -> str:
    """The page with the table that follows from the results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(document)}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8")
