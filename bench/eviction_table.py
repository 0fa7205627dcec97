"""Write the tables in docs/guides/eviction.md from bench/results/eviction.json, or check that they follow (--check)."""

from __future__ import annotations

import re
import sys
from typing import Any

from page_section import ROOT, follow

PAGE = ROOT / "docs" / "guides" / "eviction.md"
RESULT = ROOT / "bench" / "results" / "eviction.json"
BEGIN, END = "<!-- eviction: bench/eviction_table.py -->\n", "<!-- /eviction -->\n"
HITS = re.compile(r"eviction\.token_hits\.(.+)\.([0-9.]+)pct@(\w+)")
WEAR = re.compile(r"eviction\.(written_gb_per_day|token_hits_by_rule)\.(.+)@(\w+)")
ORDERS = ("optimum", "rewarm", "lru", "s3fifo", "whole_prefix")


def section(document: dict[str, Any]) -> str:
    """Both tables, with what the traces are."""
    hits: dict[tuple[str, str], dict[str, float]] = {}
    wear: dict[tuple[str, str], dict[str, float]] = {}
    for figure in document["figures"]:
        if found := HITS.fullmatch(figure["name"]):
            hits.setdefault((found[1], found[2]), {})[found[3]] = figure["value"]
        elif found := WEAR.fullmatch(figure["name"]):
            wear.setdefault((found[2], found[3]), {})[found[1]] = figure["value"]
    lines = [
        f"`{document['command']}`, {document['started'][:10]}:",
        "",
        "![hit rates](../../bench/results/eviction.svg)",
        "",
        *(f"- {note}" for note in document["notes"]),
        "",
        "Tokens loaded, % of those that the server's memory lacked; the volume holds so much of a trace's bytes:",
        "",
        "| trace | volume | optimum | rewarm | LRU | S3-FIFO, a tenth (before) | rewarm, whole prefix |",
        "|---|---|---|---|---|---|---|",
    ]
    for (trace, percent), row in hits.items():
        cells = " | ".join(f"{row[order]:.1f}" for order in ORDERS)
        lines.append(f"| {trace} | {percent} % | {cells} |")
    lines += ["", "| trace | rule | GB written a day | tokens loaded, % |", "|---|---|---|---|"]
    for (trace, rule), row in wear.items():
        lines.append(f"| {trace} | `{rule}` | {row['written_gb_per_day']:,.0f} | {row['token_hits_by_rule']:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(follow(section, page=PAGE, result=RESULT, marks=(BEGIN, END), what="tables", script="eviction_table.py"))
