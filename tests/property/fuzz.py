"""Seeded fuzzing of what Rewarm parses and may come from anybody: header pages of records, archives of records.

By hand::

    python tests/property/fuzz.py headers --seed 1 --count 20000             # a sample
    python tests/property/fuzz.py archives --seed 1 --first 137 --count 1    # one case again
    python tests/property/fuzz.py both --count 1000000 --results bench/results/fuzz.json
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))
sys.path.insert(0, str(Path(__file__).parent))

from archive_cases import archive_case
from archive_reader import no_disk, wrong_about
from header_cases import header_page
from header_judge import PAGE, Fields, Verdict, fields, judge

from rewarm.bench import environment
from rewarm.bench.report import Figure, Report, measured, with_goal
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


ARCHIVES_IN = 10
"""Of so many cases one is an archive, where both are fuzzed: one costs as much as twenty headers."""


def main(argv: list[str]) -> int:
    """Exit code 1 when something is wrong about one case."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target", choices=[*TARGETS, "both"])
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--count", type=int, default=20_000)
    options.add_argument("--results", type=Path, help="keep the figures here")
    args = options.parse_args(argv)
    archives = args.count // ARCHIVES_IN
    shares = (
        {"headers": args.count - archives, "archives": archives} if args.target == "both" else {args.target: args.count}
    )
    started, begun = datetime.now(tz=timezone.utc), time.monotonic()
    where = environment.describe(Path.cwd())
    made: list[Figure] = []
    notes: list[str] = [f"header parsers: {', '.join(parsers())}"]
    num_findings = 0
    for target, count in shares.items():
        outcomes, findings = TARGETS[target](args.seed, count, args.first)
        for line in findings[:20]:
            print(f"{target}: {line}", file=sys.stderr)
        num_findings += len(findings)
        made.append(measured(f"fuzz.{target}.cases", "", [count]))
        made.append(with_goal(measured(f"fuzz.{target}.findings", "", [len(findings)]), "0", holds=not findings))
        notes.append(f"{target}: seed {args.seed}, {dict(outcomes)}")
    print("\n".join(notes), f"{num_findings} findings", sep="\n")
    if args.results:
        command = f"python tests/property/fuzz.py {args.target} --seed {args.seed} --count {args.count}"
        conditions = where | {"loadavg_after": list(os.getloadavg())}
        seconds = round(time.monotonic() - begun, 1)
        report = Report(
            command=command, started=started.isoformat(timespec="seconds"), seconds=seconds, figures=made,
            environment=conditions, notes=notes,
        )  # fmt: skip
        args.results.write_text(report.to_json(), encoding="utf-8")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
