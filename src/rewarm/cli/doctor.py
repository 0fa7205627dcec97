"""``rewarm doctor``: whether this machine fits together."""

from __future__ import annotations

import click

from rewarm import __version__
from rewarm.cli.common import json_option, print_json, print_table
from rewarm.errors import ExitCode
from rewarm.platform.directory import check_directory
from rewarm.platform.findings import Verdict, worst
from rewarm.platform.host import check_host


@click.command("doctor")
@click.option("--root", "roots", multiple=True, metavar="DIR", help="A directory that is to hold a volume; repeatable.")
@json_option
def command(roots: tuple[str, ...], as_json: bool) -> ExitCode:
    """Check whether this machine fits together. Nothing is changed.

    Exits 1 when a check FAILs; WARN means it works, and less well than it could.
    """
    findings = check_host()
    for root in roots:
        findings += check_directory(root)
    verdict = worst(findings)
    if as_json:
        print_json(
            {
                "schema": "rewarm.doctor/1",
                "rewarm": __version__,
                "verdict": verdict.value,
                "findings": [finding.as_json() for finding in findings],
            }
        )
    else:
        print_table(
            ("verdict", "check", "found", "expected", "of"),
            [(f.verdict.value, f.name, f.found, f.expected or "-", f.subject or "-") for f in findings],
        )
        for finding in findings:
            if finding.hint:
                where = f" of {finding.subject}" if finding.subject else ""
                click.echo(f"{finding.verdict.value}: {finding.name}{where}: {finding.hint}")
    return ExitCode.ANSWER_IS_NO if verdict is Verdict.FAIL else ExitCode.DONE
