"""One result from the readings of ``bench/vllm_cold.py``: a figure for each label and kind of recovery.

    python bench/vllm_report.py readings.jsonl --against rewarm.tmpfs=fs.tmpfs --conditions machine.json > result.json

``--against A=B`` puts the readings of label B beside those of label A as a peer's. The conditions are a JSON object of
what a reader needs to know of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from rewarm.bench.report import Figure, Report, measured

Reading: TypeAlias = "dict[str, Any]"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readings", type=Path)
    parser.add_argument("--against", action="append", default=[], metavar="LABEL=PEER")
    parser.add_argument("--conditions", type=Path, required=True)
    parser.add_argument("--command", required=True, help="what was run, as a user would type it")
    parser.add_argument("--started", required=True, help="ISO 8601, UTC")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--note", action="append", default=[])
    args = parser.parse_args()
    lines = args.readings.read_text(encoding="utf-8").splitlines()
    readings: list[Reading] = [json.loads(line) for line in lines]
    wrong = [reading for reading in readings if reading.get("same") is False]
    if wrong:
        sys.exit(f"{len(wrong)} readings have other tokens than the first side; no result is made of them")
    peers = dict(pair.split("=", 1) for pair in args.against)
    report = Report(
        command=args.command,
        started=args.started,
        seconds=args.seconds,
        figures=figures_of(readings, peers),
        environment=json.loads(args.conditions.read_text(encoding="utf-8")),
        notes=args.note,
    )
    document = json.loads(report.to_json())
    document["readings"] = [{key: value for key, value in reading.items() if "gaps" not in key} for reading in readings]
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


MEASURES: dict[str, tuple[str, Callable[[Reading], float]]] = {
    "ttft_mean": ("s", lambda reading: statistics.mean(reading["ttft_s"])),
    "ttft_max": ("s", lambda reading: max(reading["ttft_s"])),
    "wall": ("s", lambda reading: reading["wall_s"]),
    "gap_p99": ("ms", lambda reading: percentile(reading["gaps_ms"], 0.99)),
    "calm_gap_p99": ("ms", lambda reading: percentile(reading["calm_gaps_ms"], 0.99)),
}
"""Of a recovery; gaps are those between the tokens of a request that decodes meanwhile."""
OF_KIND = {
    "fill": ("wall",),
    "x1": ("ttft_mean",),
    "decode": ("gap_p99", "calm_gap_p99"),
}
OF_OTHERS = ("ttft_mean", "ttft_max", "wall")


def figures_of(readings: list[Reading], peers: dict[str, str]) -> list[Figure]:
    """A figure a label, kind and measure, in the order of the readings."""
    by_name: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        if reading["what"] != "start":
            by_name.setdefault((reading["label"], reading["what"]), []).append(reading)
    figures = []
    for (label, what), rounds in by_name.items():
        peer_rounds = by_name.get((peers[label], what), []) if label in peers else []
        for measure in OF_KIND.get(what, OF_OTHERS):
            unit, value_of = MEASURES[measure]
            count = min(len(rounds), len(peer_rounds)) if peer_rounds else len(rounds)
            figures.append(
                measured(
                    f"vllm.{label}.{what}.{measure}",
                    unit,
                    [value_of(reading) for reading in rounds[:count]],
                    peers=[value_of(reading) for reading in peer_rounds[:count]],
                    note=f"peer: {peers[label]}" if peer_rounds else "",
                )
            )
    return figures


def percentile(values: list[float], share: float) -> float:
    """The smallest value that is not below ``share`` of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
