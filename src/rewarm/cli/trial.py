"""``rewarm trial``: prove on a real server whether recovery from flash is faster, and right."""

from __future__ import annotations

from pathlib import Path

import click

from rewarm.cli.common import json_option, note, print_json, print_table
from rewarm.errors import DamageError, ExitCode
from rewarm.trial.analysis import analyse
from rewarm.trial.evidence import check_files, read_events, write_manifest, write_result
from rewarm.trial.report import write_reports

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group("trial")
def command() -> None:
    """Prove on a real server whether recovery from flash is faster, and right."""


@command.command("report")
@_FOLDER
def report(folder: Path) -> None:
    """Write the reports of a trial again, from its events.

    The log must be as it was written; result.json, the reports and the manifest are made anew.
    """
    events = read_events(folder)
    result = analyse(events)
    write_result(folder, result)
    write_reports(folder, result, events)
    write_manifest(folder)
    click.echo(str(folder / "report.html"))


@command.command("verify")
@_FOLDER
@json_option
def verify(folder: Path, as_json: bool) -> ExitCode:
    """Compute a trial's hashes, statistics and verdict again.

    Exits 0 when all is as it was written and follows from the events, whatever the verdict; 5 when a byte changed.
    """
    try:
        result = analyse(read_events(folder))
        found = check_files(folder, result)
    except DamageError as error:
        result, found = {}, [error.message]
    if as_json:
        document = {"schema": "rewarm.trial-verify/1", "whole": not found, "found": found}
        print_json({**document, "verdict": result.get("verdict"), "gates": result.get("gates", [])})
    elif not found:
        print_gates(result)
    for line in found:
        note(line)
    if found:
        raise DamageError(f"{folder} is not as it was written", hint="the lines above name what differs")
    return ExitCode.DONE


def print_gates(result: dict[str, object]) -> None:
    """The verdict and its gates as a table on stdout."""
    gates = result["gates"]
    assert isinstance(gates, list)
    rows = [(gate["outcome"], gate["name"], gate["found"], gate["reason"] or "-") for gate in gates]
    print_table(("outcome", "gate", "found", "why"), rows)
    click.echo(f"verdict: {result['verdict']}")
