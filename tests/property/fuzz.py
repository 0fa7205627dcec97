"""Seeded fuzzing of what Rewarm parses: header pages of records.

Run by test_fuzz.py, or by hand::

    python tests/property/fuzz.py --seed 1 --count 20000             # a sample
    python tests/property/fuzz.py --seed 1 --first 137 --count 1     # one case again
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

from header_cases import header_page
from header_judge import PAGE, Fields, Verdict, fields, judge

from rewarm.engine import _native
from rewarm.engine.record import parse_header
from rewarm.errors import DamageError, FormatVersionError

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


def fuzz(seed: int, count: int, first: int, known: dict[str, Parser]) -> tuple[Counter[str], list[str]]:
    """Cases by verdict, and findings with their number."""
    verdicts: Counter[str] = Counter()
    findings: list[str] = []
    for number in range(first, first + count):
        page = header_page(seed, number)
        verdicts[judge(page).value] += 1
        findings += [f"case {number}: {line}" for line in disagreements(page, known)]
    return verdicts, findings


def main(argv: list[str]) -> int:
    """Exit code 1 when a parser is wrong about one page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--count", type=int, default=20_000)
    args = options.parse_args(argv)
    started = time.monotonic()
    known = parsers()
    verdicts, findings = fuzz(args.seed, args.count, args.first, known)
    for line in findings[:20]:
        print(line, file=sys.stderr)
    report = {
        "seed": args.seed, "cases": args.count, "parsers": list(known), "verdicts": dict(verdicts),
        "findings": len(findings), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
