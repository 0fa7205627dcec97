"""``rewarm bench``: the storage path here, against its floor and its peers."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewarm.cli.common import check_between, json_option, note, print_json, print_table, progress, quiet_option
from rewarm.errors import ExitCode, UsageError
from rewarm.units import parse_size

if TYPE_CHECKING:
    from rewarm.bench.goals import Goals
    from rewarm.bench.report import Report


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
    "--goals", "goals_file", type=click.Path(path_type=Path), metavar="FILE", help="Other goals than Rewarm's own."
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
    from rewarm.bench.chart import write_chart

    _check_chart(chart)
    goals = _goals(goals_file, "kv")
    plan = dataclasses.replace(
        bench.QUICK if quick else bench.FULL, engines=engines, floor_tool=floor_tool, with_peer=with_peer
    )
    with progress("bench kv", plan.num_steps) as advance:
        report = bench.run(root, plan, command=_command_line(), step=lambda _what: advance(1))
    if chart is not None:
        write_chart(report, chart)
    return _publish(report, goals, check=check, as_json=as_json, conditions=("floor", "peer", "cold", "device", "cpu"))


@command.command("device")
@click.option(
    "--root", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Directory on the storage to measure."
)
@click.option(
    "--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu, or as torch names it: cuda, cuda:1."
)
@click.option("--layers", default=64, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1), help="Of this device's share.")
@click.option("--head-size", default=128, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=16384, show_default=True, type=click.IntRange(1), help="Of a request.")
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1), help="Loaded at once.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--chunk-tokens", default=0, show_default=True, type=click.IntRange(0), help="Of a record; 0: as a server would."
)
@click.option("--ring-bytes", default="", metavar="SIZE", help="Pinned memory that reads land in. [as a server]")
@click.option("--check", is_flag=True, help="Exit with 1 when a goal falls short.")
@click.option(
    "--goals", "goals_file", type=click.Path(path_type=Path), metavar="FILE", help="Other goals than Rewarm's own."
)
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the waterfall.")
@json_option
@quiet_option
def device(
    root: Path,
    ring_bytes: str,
    check: bool,
    goals_file: Path | None,
    chart: Path | None,
    as_json: bool,
    **sizes: Any,
) -> int:
    """A server's worker without the server: loads and stores of a KV cache on a device, beside the plain copy.

    The KV cache holds all requests at once: 256 KiB a token by default, 4 GiB a request. Goals apply to a device, not
    to host memory.
    """
    from rewarm.bench import device as bench
    from rewarm.bench.device_chart import write_chart

    _check_chart(chart)
    goals = _goals(goals_file, "device")
    plan = bench.Plan(**sizes)
    if ring_bytes:
        plan = dataclasses.replace(plan, ring_bytes=parse_size(ring_bytes))
    with progress("bench device", plan.num_steps) as advance:
        report = bench.run(root, plan, command=_command_line(), step=lambda _what: advance(1))
    if chart is not None:
        write_chart(report, chart)
    if report.environment["accelerator"] == "cpu":
        goals = {}
    conditions = ("accelerator", "engine", "ring", "cold", "filesystem", "cores")
    return _publish(report, goals, check=check, as_json=as_json, conditions=conditions)


@command.command("scale")
@click.option(
    "--root", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Directory on the device to measure."
)
@click.option("--records", default=1_000_000, show_default=True, type=click.IntRange(1000, 20_000_000))
@click.option("--roots", "num_roots", default=4, show_default=True, type=click.IntRange(1, 16))
@click.option("--seconds", default=60.0, show_default=True, help="How long the janitor is watched, twice.")
@click.option("--check", is_flag=True, help="Exit with 1 when a goal falls short.")
@json_option
@quiet_option
def scale(root: Path, records: int, num_roots: int, seconds: float, check: bool, as_json: bool) -> int:
    """Scan, look-ups, memory and the janitor's CPU time on a volume of very many records."""
    from rewarm.bench import scale as bench
    from rewarm.bench.goals import judge

    check_between("--seconds", seconds, 1, 3600)
    plan = bench.Plan(num_records=records, num_roots=num_roots, work_s=seconds)
    with progress("bench scale", plan.rounds + 4) as advance:
        report = bench.run(root, plan, command=_command_line(), step=lambda _what: advance(1))
    report.figures = judge(report.figures, _goals(None, "scale"))
    if as_json:
        click.echo(report.to_json(), nl=False)
    else:
        from rewarm.bench.table import number

        rows = [
            (figure.name, f"{number(figure.value)} {figure.unit}", figure.goal or "-", figure.note)
            for figure in report.figures
        ]
        print_table(("figure", "value", "goal", "of"), rows)
    return _verdict(report, check=check)


@command.command("eviction")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="NAME",
    help="chat, documents or agents, which are generated, or a JSONL file of Mooncake's format; may be given again.",
)
@click.option("--seed", default=1, show_default=True, type=int, help="Of generated traces.")
@click.option(
    "--scale", default=1.0, show_default=True, type=float, help="Sessions of generated traces, as a multiple."
)
@click.option("--memory", default="64GiB", show_default=True, metavar="SIZE", help="KV that the server itself holds.")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the hit rates.")
@json_option
@quiet_option
def eviction(traces: tuple[str, ...], seed: int, scale: float, memory: str, chart: Path | None, as_json: bool) -> None:
    """Hit rates of the volume's order of eviction on reuse traces, and bytes written by store rule; moves no bytes."""
    from rewarm.bench.reuse import run as bench
    from rewarm.bench.reuse.chart import write_chart
    from rewarm.bench.table import number

    _check_chart(chart)
    plan = bench.Plan(seed=seed, scale=scale, memory_bytes=parse_size(memory))
    if traces:
        plan = dataclasses.replace(plan, traces=traces)
    with progress("bench eviction", plan.num_steps) as advance:
        report = bench.run(plan, command=_command_line(), step=lambda _what: advance(1))
    if chart is not None:
        write_chart(report, chart)
    if as_json:
        click.echo(report.to_json(), nl=False)
        return
    rows = [
        (figure.name, f"{number(figure.value)} {figure.unit}", number(figure.floor) if figure.floor else "-")
        for figure in report.figures
    ]
    print_table(("figure", "value", "optimum"), rows)
    for text in report.notes:
        note(text)


@command.command("trace")
@click.argument("kind")
@click.option(
    "--to", "target", required=True, type=click.Path(path_type=Path), metavar="FILE", help="A new JSONL file."
)
@click.option("--seed", default=1, show_default=True, type=int)
@click.option("--scale", default=1.0, show_default=True, type=float, help="Sessions, as a multiple.")
@quiet_option
def trace(kind: str, target: Path, seed: int, scale: float) -> None:
    """Write a generated reuse trace (chat, documents or agents) in Mooncake's format."""
    from rewarm.bench.reuse.generate import generate
    from rewarm.bench.reuse.trace import write_trace

    if target.exists():
        raise UsageError(f"{target} exists", hint="name another file, or remove it")
    made = generate(kind, seed=seed, scale=scale)
    write_trace(made, target)
    note(f"{len(made.requests):,} requests, {made.seconds / 3600:.1f} h, {made.input_tokens:,} tokens")


@command.command("policy")
@click.option("--cases", default=1000, show_default=True, metavar="N", help="Random cases.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Replay a server's log of decisions instead.",
)
@click.option("--check", is_flag=True, help="Exit with 1 when a goal falls short.")
@click.option(
    "--goals", "goals_file", type=click.Path(path_type=Path), metavar="FILE", help="Other goals than Rewarm's own."
)
@json_option
@quiet_option
def policy(cases: int, trace: Path | None, check: bool, goals_file: Path | None, as_json: bool) -> int:
    """Loading against computing on simulated servers: how near policy auto comes to the best schedule."""
    if trace is not None:
        _replay(trace, as_json=as_json)
        return ExitCode.DONE
    from rewarm.bench.policy import study
    from rewarm.bench.policy.cases import Knowledge

    if cases < 2:
        raise UsageError(f"--cases is {cases}", hint="at least 2")
    goals = _goals(goals_file, "policy")
    with progress("bench policy", cases * len(Knowledge)) as advance:
        report = study.run(cases, command=_command_line(), step=lambda: advance(1))
    return _publish(report, goals, check=check, as_json=as_json, conditions=("cases",))


def _replay(path: Path, *, as_json: bool) -> None:
    from rewarm.bench.policy.replay import read_trace, replay
    from rewarm.kv.decision_log import read_log

    log = read_log(path)
    if log.num_left_out:
        note(f"left out: {log.num_left_out:,} lines that are not as a server writes them")
    trace = read_trace(log.lines)
    results = replay(trace)
    if as_json:
        document = {
            "schema": "rewarm.bench-policy-replay/1",
            "requests": len(trace.prompts),
            "actual_mean_s": sum(trace.actual_s) / len(trace.actual_s) if trace.actual_s else None,
            "policies": [dataclasses.asdict(result) for result in results],
        }
        print_json(document)
        return
    rows = [
        (one.policy, f"{one.mean_s:.3f} s", f"{one.p99_s:.3f} s", f"{one.end_s:.1f} s", f"{one.num_loads}")
        for one in results
    ]
    print_table(("policy", "mean until a prompt is there", "p99", "all of them", "loads"), rows)
    if trace.actual_s:
        note(f"as it was: {sum(trace.actual_s) / len(trace.actual_s):.3f} s on the mean")


def _check_chart(chart: Path | None) -> None:
    if chart is not None and chart.suffix != ".svg":
        raise UsageError(f"{chart} does not end in .svg", hint="name a file like chart.svg")


def _goals(goals_file: Path | None, bench: str) -> Goals:
    from rewarm.bench.goals import GOALS_FILE, read_goals

    return read_goals(goals_file or GOALS_FILE, bench)


def _publish(report: Report, goals: Goals, *, check: bool, as_json: bool, conditions: Sequence[str]) -> int:
    """Judge a report and print it; the exit code."""
    from rewarm.bench.goals import judge, unmeasured
    from rewarm.bench.table import filled

    report.figures = judge(report.figures, goals)
    if as_json:
        click.echo(report.to_json(), nl=False)
    else:
        print_table(*filled(report.figures))
        for name in conditions:
            note(f"{name}: {report.environment[name]}")
    for text in report.notes:
        note(text)
    missing = unmeasured(report.figures, goals)
    if missing and check:
        note(f"not measured: {', '.join(missing)}")
    return _verdict(report, check=check)


def _verdict(report: Report, *, check: bool) -> int:
    """Name what falls short; the exit code."""
    for figure in report.shortfalls():
        note(f"falls short: {figure.name} is {figure.value:.3g} {figure.unit}; goal {figure.goal}")
    return ExitCode.ANSWER_IS_NO if check and report.shortfalls() else ExitCode.DONE


def _command_line() -> str:
    return shlex.join(["rewarm", *sys.argv[1:]])
