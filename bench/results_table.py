"""Write the results in docs/guides/bench.md from bench/results, or check that they follow from it (--check)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "bench.md"
RESULT = ROOT / "bench" / "results" / "kv-cpu.json"
BEGIN, END = "<!-- results: bench/results_table.py -->\n", "<!-- /results -->\n"
CONDITIONS = {
    "cpu": "",
    "cores": "cores",
    "kernel": "Linux",
    "filesystem": "",
    "device": "",
    "virtual_machine": "virtual machine:",
    "python": "Python",
    "fio": "",
    "floor": "floor:",
    "peer": "peer:",
    "cold": "cold:",
}


def main() -> int:
    """Exit code 1 when --check finds another text than the results give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page differs")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}{section(json.loads(RESULT.read_text(encoding='utf-8')))}{END}{after}"
    if new != text:
        if check:
            print(f"{PAGE.relative_to(ROOT)}: the results differ from {RESULT.name}; run bench/results_table.py")
            return 1
        PAGE.write_text(new, encoding="utf-8")
    print(f"the results in {PAGE.relative_to(ROOT)} follow from {RESULT.relative_to(ROOT)}")
    return 0


def section(document: dict[str, Any]) -> str:
    """Command, conditions and one row a figure."""
    environment = document["environment"]
    said = [
        f"{word} {environment[key]}".strip() for key, word in CONDITIONS.items() if environment.get(key) is not None
    ]
    before, after = environment["loadavg_before"][0], environment["loadavg_after"][0]
    when = f"{document['started'][:10]}, {document['seconds'] / 60:.0f} minutes"
    lines = [
        f"`{document['command']}`, {when}; load average {before:.1f} before, {after:.1f} after.",
        "",
        "; ".join(said) + ".",
        "",
        "| of the floor | figure | engine | rewarm | floor | fs tier | over fs tier | goal | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(figure) for figure in document["figures"]),
    ]
    if document["notes"]:
        lines += ["", *(f"- {note}" for note in document["notes"])]
    return "\n".join(lines) + "\n"


def _row(figure: dict[str, Any]) -> str:
    cells = (
        _ratio(figure["floor_ratio"]),
        f"`{figure['name']}`",
        figure["engine"] or "-",
        f"{figure['value']:.3g} {figure['unit']}".rstrip(),
        _plain(figure["floor"]),
        _plain(figure["peer"]),
        _ratio(figure["peer_ratio"]),
        figure["goal"] or "-",
        {None: "", True: "holds", False: "**short**"}[figure["holds"]],
    )
    return f"| {' | '.join(cells)} |"


def _ratio(spread: dict[str, Any] | None) -> str:
    return f"{spread['median']:.2f}x ({spread['least']:.2f}-{spread['greatest']:.2f})" if spread else "-"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
