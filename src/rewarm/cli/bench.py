"""``rewarm bench``: the storage path here, against its floor and its peers."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path

import click

from rewarm.cli.common import json_option, note, print_table, progress, quiet_option
from rewarm.errors import ExitCode, UsageError


@click.group("bench")
def command() -> None:
    """Measure the storage path here, against its floor and its peers."""


@command.command("kv")
@click.option(
    "--root", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Directory on the device to measure."
)
@click.option("--quick", is_flag=True, help="Fewer shapes and rounds: about three minutes instead of 10 to 15.")
@click.option("--engine", "engines", multiple=True, metavar="KIND", help="Only this engine; may be given again.")
@click.option(
    "--floor",
    "floor_tool",
    type=click.Choice(["auto", "fio", "own"]),
    default="auto",
    show_default=True,
    help="Whose rate is the floor; auto: the faster one.",
)
@click.option("--peer/--no-peer", "with_peer", default=True, help="Drive vLLM's fs tier too, where vLLM is installed.")
@click.option("--check", is_flag=True, help="Exit with 1 when a goal falls short.")
@click.option(
    "--goals", "goals_file", type=click.Path(path_type=Path), metavar="FILE", help="Goals. [bench/goals.toml]"
)
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the rates.")
@json_option
@quiet_option
def kv(
    root: Path,
    quick: bool,
    engines: tuple[str, ...],
    floor_tool: str,
    with_peer: bool,
    check: bool,
    goals_file: Path | None,
    chart: Path | None,
    as_json: bool,
) -> int:
    """Cold loads, stores, CPU time and the index, beside a plain reader's floor and vLLM's fs tier."""
    from rewarm.bench import kv as bench
    from rewarm.bench.goals import find_goals, judge, read_goals, unmeasured

    goals_path = goals_file or find_goals()
    if goals_path is None and check:
        raise UsageError("no bench/goals.toml here", hint="name one: --goals FILE")
    if chart is not None and chart.suffix != ".svg":
        raise UsageError(f"{chart} does not end in .svg")
    goals = read_goals(goals_path) if goals_path else {}
    plan = dataclasses.replace(
        bench.QUICK if quick else bench.FULL, engines=engines, floor_tool=floor_tool, with_peer=with_peer
    )
    with progress("bench kv", plan.num_steps) as advance:
        report = bench.run(root, plan, command=_command_line(), step=lambda _what: advance(1))
    report.figures = judge(report.figures, goals)
    if chart is not None:
        from rewarm.bench.chart import write_chart

        write_chart(report, chart)
    if as_json:
        click.echo(report.to_json(), nl=False)
    else:
        from rewarm.bench.table import HEADERS, rows

        print_table(HEADERS, rows(report.figures))
        for name in ("floor", "peer", "cold", "device", "cpu"):
            note(f"{name}: {report.environment[name]}")
    for text in report.notes:
        note(text)
    missing = unmeasured(report.figures, goals)
    if missing and check:
        note(f"not measured: {', '.join(missing)}")
    for figure in report.shortfalls():
        note(f"falls short: {figure.name} is {figure.value:.3g} {figure.unit}; goal {figure.goal}")
    return ExitCode.ANSWER_IS_NO if check and report.shortfalls() else ExitCode.DONE


def _command_line() -> str:
    return shlex.join(["rewarm", *sys.argv[1:]])
