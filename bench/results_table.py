"""Write the results in docs/guides/bench.md from bench/results, or check that they follow from it (--check)."""

from __future__ import annotations

import sys
from typing import Any

from page_section import ROOT, follow

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
    sys.exit(follow(section, page=PAGE, result=RESULT, marks=(BEGIN, END), what="results", script="results_table.py"))
