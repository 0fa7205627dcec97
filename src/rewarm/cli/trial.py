"""``rewarm trial``: prove on a real server whether recovery from flash is faster, and right."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import click

from rewarm import __version__
from rewarm.cli.common import is_quiet, json_option, note, print_json, print_table, quiet_option
from rewarm.errors import DamageError, ExitCode
from rewarm.trial.analysis import analyse
from rewarm.trial.evidence import check_files, read_events
from rewarm.trial.plan import DEMO, OWN_MODEL, Plan, from_document, load_plan
from rewarm.trial.run import Progress, finish, run_trial

_FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group("trial")
def command() -> None:
    """Prove on a real server whether recovery from flash is faster, and right."""


@command.command("run")
@click.argument("plan_file", metavar="[PLAN.toml]", required=False)
@click.option("--model", metavar="M", help="What vllm serve is given. [a tiny random model]")
@click.option("--root", metavar="DIR", help="Directory for the candidate's records. [in the output folder]")
@click.option("--baseline-root", metavar="DIR", help="Directory on the drive to compare with. [the candidate's]")
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="A new folder. [trial-DATE-TIME]")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Prompts and order follow from it. [drawn]")
@quiet_option
@json_option
def run(plan_file: str | None, out: Path | None, as_json: bool, **given: str | int | None) -> ExitCode:
    """Start servers, recover contexts with each arm in turn, compare every token, judge the gates.

    Without a plan and a model it shows itself: a tiny random model, and a baseline slowed as in the published pair, so
    that gate G3 is seen at work. For a model of yours, write into a plan how many times sooner it must be.

    Exits 0 when every required gate passes, 1 when one fails or stays open.
    """
    plan = _with_flags(load_plan(plan_file) if plan_file else _default_plan(given), given)
    folder = out or Path(datetime.now(timezone.utc).strftime("trial-%Y%m%d-%H%M%S"))
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    with _shown() as show:
        result = run_trial(plan, folder, show)
    if as_json:
        print_json(result)
    else:
        print_gates(result)
        click.echo(f"report: {folder / 'report.html'}")
    return ExitCode.DONE if result["verdict"] == "pass" else ExitCode.ANSWER_IS_NO


def _default_plan(given: Mapping[str, str | int | None]) -> Plan:
    return from_document(OWN_MODEL if given["model"] else DEMO, where="the default plan")


def _with_flags(plan: Plan, given: Mapping[str, str | int | None]) -> Plan:
    flags: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(plan, trial=dataclasses.replace(plan.trial, **flags))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """A bar with the time left on a terminal, else a line whenever another kind of work begins."""
    if is_quiet() or not sys.stderr.isatty():
        last = ""

        def line(progress: Progress) -> None:
            nonlocal last
            doing = progress.doing.partition(",")[0]
            if doing != last:
                step = min(progress.done + 1, progress.total)
                note(f"[{step:3}/{progress.total}] {doing}; about {progress.left_s / 60:.0f} min left")
            last = doing

        yield line
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    with bars.Progress(*columns, bars.TextColumn("{task.fields[left]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, left="")

        def update(progress: Progress) -> None:
            minutes, seconds = divmod(round(progress.left_s), 60)
            left = f"about {minutes}:{seconds:02} left"
            bar.update(task, description=progress.doing, completed=progress.done, total=progress.total, left=left)

        yield update


@command.command("report")
@_FOLDER
def report(folder: Path) -> None:
    """Write the reports of a trial again, from its events.

    The log must be as it was written; result.json, the reports and the manifest are made anew.
    """
    finish(folder)
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
        hint = "the lines above name what differs"
        if result.get("rewarm", __version__) != __version__:
            hint += f"; it was made by rewarm {result['rewarm']}, which may compute otherwise: verify it with that one"
        raise DamageError(f"{folder} is not as it was written", hint=hint)
    return ExitCode.DONE


def print_gates(result: dict[str, object]) -> None:
    """The verdict and its gates as a table on stdout."""
    gates = result["gates"]
    assert isinstance(gates, list)
    rows = [(gate["outcome"], gate["name"], gate["found"], gate["reason"] or "-") for gate in gates]
    print_table(("outcome", "gate", "found", "why"), rows)
    click.echo(f"verdict: {result['verdict']}")
