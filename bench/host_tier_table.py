"""Write the table in docs/guides/host-tier.md from bench/results/host-tier.json, or check that it follows (--check)."""

from __future__ import annotations

import re
import sys
from typing import Any

from page_section import ROOT, follow

PAGE = ROOT / "docs" / "guides" / "host-tier.md"
RESULT = ROOT / "bench" / "results" / "host-tier.json"
BEGIN, END = "<!-- replays: bench/host_tier_table.py -->\n", "<!-- /replays -->\n"
FIGURE = re.compile(r"eviction\.host_(hits|reads)\.(.+)@(\w+)")
RULES = ("first_load", "second_load", "when_stored")


def section(document: dict[str, Any]) -> str:
    """One row a trace: what comes from memory, and what flash reads for it."""
    rows: dict[str, dict[tuple[str, str], float]] = {}
    for figure in document["figures"]:
        if found := FIGURE.fullmatch(figure["name"]):
            rows.setdefault(found[2], {})[found[3], found[1]] = figure["value"]
    lines = [
        f"`{document['command']}`, {document['started'][:10]} ([host-tier.json](../../bench/results/host-tier.json)):",
        "",
        "| trace | copied at the first load | at the second load | when stored |",
        "|---|---|---|---|",
    ]
    for trace, row in rows.items():
        cells = (f"{row[rule, 'hits']:.0f} %, {row[rule, 'reads']:.0f}" for rule in RULES)
        lines.append(f"| {trace} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(follow(section, page=PAGE, result=RESULT, marks=(BEGIN, END), what="table", script="host_tier_table.py"))
