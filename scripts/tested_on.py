"""Write the table "Tested on" of README.md from bench/tested.toml, or check that it follows from it (--check)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tested-on: scripts/tested_on.py -->\n", "<!-- /tested-on -->\n"
HOW = {"hardware": "run on it", "emulated": "run, emulated", "source": "read only"}


def main() -> int:
    """Exit code 1 when --check finds another table, or a row is without evidence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the table differs")
    check = parser.parse_args().check
    rows = tomllib.loads((ROOT / "bench" / "tested.toml").read_text(encoding="utf-8"))["row"]
    wrong = [f"{row['what']}: no such file: {row['evidence']}" for row in rows if not (ROOT / row["evidence"]).exists()]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}{table(rows)}{END}{after}"
    if new != text:
        if check:
            wrong.append("README.md: the table differs from bench/tested.toml; run scripts/tested_on.py")
        else:
            readme.write_text(new, encoding="utf-8")
    print("\n".join(wrong) or f"{len(rows)} rows of README.md follow from bench/tested.toml")
    return 1 if wrong else 0


def table(rows: list[dict[str, str]]) -> str:
    """Real runs first, then what stood in for the real thing, then what was only read."""
    lines = ["| what | how | with | evidence |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: list(HOW).index(row["how"])):
        link = f"[{Path(row['evidence']).name}]({row['evidence']})"
        lines.append(f"| {row['what']} | {HOW[row['how']]} | {row.get('with', '-')} | {link} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
