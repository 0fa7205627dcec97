"""A part of a page that follows from a result: written between two marks, or checked (--check)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def follow(
    section: Callable[[dict[str, Any]], str],
    *,
    page: Path,
    result: Path,
    marks: tuple[str, str],
    what: str,
    script: str,
) -> int:
    """Run a script's command line; exit code 1 when --check finds another text than the result gives.

    Args:
        section: The text between the marks, from the result's document.
        page: Markdown with both marks.
        result: JSON.
        marks: Lines before and after the part.
        what: What the part holds, for messages.
        script: Name of the script, below bench/.
    """
    parser = argparse.ArgumentParser(description=f"Write the {what} in {page.name} from {result.name}, or check them.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page differs")
    check = parser.parse_args().check
    begin, end = marks
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    new = f"{before}{begin}{section(json.loads(result.read_text(encoding='utf-8')))}{end}{after}"
    if new != text:
        if check:
            print(f"{page.relative_to(ROOT)}: the {what} differ from {result.name}; run bench/{script}")
            return 1
        page.write_text(new, encoding="utf-8")
    print(f"the {what} in {page.relative_to(ROOT)} follow from {result.relative_to(ROOT)}")
    return 0
