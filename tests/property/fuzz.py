"""Seeded fuzzing of what Rewarm parses and may come from anybody: header pages of records, archives of records.

By hand::

    python tests/property/fuzz.py headers --seed 1 --count 20000             # a sample
    python tests/property/fuzz.py archives --seed 1 --first 137 --count 1    # one case again
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))
sys.path.insert(0, str(Path(__file__).parent))

from archive_cases import archive_case
from archive_reader import no_disk, wrong_about
from header_cases import header_page
from header_judge import PAGE, Fields, Verdict, fields, judge

from rewarm.engine import _native
from rewarm.engine.record import parse_header
from rewarm.errors import DamageError, FormatVersionError

Found = tuple[Counter[str], list[str]]
Parser = Callable[[bytes], "Fields | Verdict"]
"""The fields of a whole page, or why there are none. Anything else that it raises is a finding."""


def pure_parser(page: bytes) -> Fields | Verdict:
    """rewarm.engine.record."""
    try:
        header = parse_header(page)
    except DamageError:
        return Verdict.DAMAGE
    except FormatVersionError:
        return Verdict.VERSION
    return Fields(header.key, header.namespace_id, header.payload_bytes, header.created_ns, header.piece_crcs,
                  header.piece_bytes)  # fmt: skip


def native_parser() -> Parser:
    """native/record.c."""
    header = _native.Header()
    names = ("payload_bytes", "created_ns", "piece_bytes", "num_pieces")

    def parse(page: bytes) -> Fields | Verdict:
        if len(page) != PAGE:
            return Verdict.DAMAGE  # its callers always read a whole page
        result = _native.library.calls.rw_record_parse(page, ctypes.byref(header))
        if result:
            return {-errno.EBADMSG: Verdict.DAMAGE, -errno.EPROTONOSUPPORT: Verdict.VERSION}[result]
        payload, created, piece, count = (int(getattr(header, name)) for name in names)
        crcs = tuple(header.crcs[:count])
        return Fields(bytes(header.key), bytes(header.namespace_id), payload, created, crcs, piece)

    return parse


def parsers() -> dict[str, Parser]:
    """Every parser that this machine has."""
    known: dict[str, Parser] = {"pure": pure_parser}
    if _native.library.calls:
        known["native"] = native_parser()
    return known


def disagreements(page: bytes, known: dict[str, Parser]) -> list[str]:
    """What each parser says that the format's page does not; empty where all is well."""
    verdict = judge(page)
    want: Fields | Verdict = fields(page) if verdict is Verdict.WHOLE else verdict
    found = []
    for name, parser in known.items():
        try:
            said: object = parser(page)
        except Exception as error:  # noqa: BLE001 - whatever a hostile page raises is the finding
            said = f"{type(error).__name__}: {error}"
        if said != want:
            found.append(f"{name} says {_short(said)}, the format says {_short(want)}")
    return found


def _short(said: object) -> str:
    if isinstance(said, Fields):
        return f"payload {said.payload_bytes}, piece {said.piece_bytes}, {len(said.piece_crcs)} checksums"
    return said.value if isinstance(said, Verdict) else str(said)


def fuzz_headers(seed: int, count: int, first: int = 0, known: dict[str, Parser] | None = None) -> Found:
    """Cases by verdict, and findings with their number."""
    known = parsers() if known is None else known
    verdicts: Counter[str] = Counter()
    findings: list[str] = []
    for number in range(first, first + count):
        page = header_page(seed, number)
        verdicts[judge(page).value] += 1
        findings += [f"case {number}: {line}" for line in disagreements(page, known)]
    return verdicts, findings


def fuzz_archives(seed: int, count: int, first: int = 0) -> Found:
    """Cases by what became of them, and findings with their number."""
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    with no_disk() as volume:
        for number in range(first, first + count):
            raw, expected, is_certain = archive_case(seed, number)
            outcome, finding = wrong_about(raw, expected, is_certain=is_certain, volume=volume)
            outcomes[outcome] += 1
            findings += [f"case {number}: {finding}"] if finding else []
    return outcomes, findings


TARGETS: dict[str, Callable[[int, int, int], Found]] = {"headers": fuzz_headers, "archives": fuzz_archives}


def main(argv: list[str]) -> int:
    """Exit code 1 when something is wrong about one case."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target", choices=TARGETS)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--count", type=int, default=20_000)
    args = options.parse_args(argv)
    started = time.monotonic()
    outcomes, findings = TARGETS[args.target](args.seed, args.count, args.first)
    for line in findings[:20]:
        print(line, file=sys.stderr)
    report = {
        "target": args.target, "seed": args.seed, "cases": args.count, "outcomes": dict(outcomes),
        "findings": len(findings), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
