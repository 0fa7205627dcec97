"""``rewarm volume top``: a volume at work, as its processes, its roots and their devices say."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rewarm.cli.common import check_between, json_option, note, print_json, print_table, quiet_option
from rewarm.units import GIB, format_size
from rewarm.volume.watch import Picture, ProcessRates, RootRates, Watch

if TYPE_CHECKING:
    from rich.console import Group

_MAX_WAIT_S = 2.0
_NONE = "-"
_ROOT_HEADERS = ("root", "used", "read", "written", "busy", "IOPS r/w", "queue", "evicted", "state")
_PROCESS_HEADERS = ("process", "host", "up", "read", "written", "loading", "storing", "records", "state")


@click.command("top")
@click.argument("roots", nargs=-1, required=True, metavar="DIR...")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--interval", type=float, default=1.0, show_default=True, metavar="SECONDS", help="Between two pictures.")
@json_option
@quiet_option
def command(roots: Sequence[str], once: bool, interval: float, as_json: bool) -> None:
    """Show a volume at work: bandwidth, IOPS, queues, hits, evictions, and the processes that use it.

    A live view on a terminal, until ctrl-C; elsewhere plain lines every SECONDS. --json prints one picture and ends.
    Servers that only read (kv.read_only) leave no trace, and are not shown.
    """
    check_between("--interval", interval, 0.2, 3600, "seconds")
    watch = Watch(roots)
    wait_s = min(interval, _MAX_WAIT_S)
    picture = watch.settle(wait_s)
    if as_json:
        print_json(_document(picture))
    elif once:
        _print(picture)
    elif sys.stdout.isatty():
        _show(watch, picture, interval, wait_s)
    else:
        _repeat(watch, picture, interval, wait_s, _print)


def _repeat(watch: Watch, picture: Picture, interval: float, wait_s: float, show: Callable[[Picture], None]) -> None:
    """Show a picture after the other, until ctrl-C."""
    try:
        while True:
            show(picture)
            due = time.monotonic() + interval
            time.sleep(interval)
            picture = watch.poll(max(0.0, wait_s - (time.monotonic() - due)))
    except KeyboardInterrupt:
        return


def _show(watch: Watch, picture: Picture, interval: float, wait_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(_drawn(picture), console=console, screen=True, auto_refresh=False) as live:
        _repeat(watch, picture, interval, wait_s, lambda new: live.update(_drawn(new), refresh=True))


def _drawn(picture: Picture) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(_headline(picture), style="bold")]
    for headers, rows in (
        (_ROOT_HEADERS, [_root_cells(root) for root in picture.roots]),
        (_PROCESS_HEADERS, [_process_cells(process) for process in picture.processes]),
    ):
        table = Table(box=None, pad_edge=False, header_style="dim")
        for number, header in enumerate(headers):
            is_text = number in {0, len(headers) - 1}
            table.add_column(header, justify="left" if is_text else "right", no_wrap=number < len(headers) - 1)
        for cells in rows:
            is_well = cells[-1] in {"ok", ""}
            table.add_row(*[Text(cell) for cell in cells[:-1]], Text(cells[-1], style="" if is_well else "bold red"))
        parts += [Text(""), table]
    parts += [Text(f"skipped: {line}", style="yellow") for line in picture.skipped]
    return Group(*parts)


def _print(picture: Picture) -> None:
    click.echo(_headline(picture))
    print_table(_ROOT_HEADERS, [_root_cells(root) for root in picture.roots])
    if picture.processes:
        print_table(_PROCESS_HEADERS, [_process_cells(process) for process in picture.processes])
    else:
        click.echo("no process stores on it now")
    click.echo()
    sys.stdout.flush()
    for line in picture.skipped:
        note(f"skipped: {line}")


def _headline(picture: Picture) -> str:
    used = sum(root.used_bytes for root in picture.roots)
    capacity = sum(root.capacity_bytes for root in picture.roots)
    lost_loads = sum(process.totals.lost_loads for process in picture.processes)
    lost_stores = sum(process.totals.lost_stores for process in picture.processes)
    slow_loads = sum(process.totals.slow_loads for process in picture.processes)
    return (
        f"volume {picture.volume_id[:12]}  {format_size(used)} of {format_size(capacity)}  {_hits(picture)}  "
        f"lost: {lost_loads:.0f} loads, {lost_stores:.0f} stores; slow loads {slow_loads:.0f}; rates in GiB/s"
    )


def hit_ratios(picture: Picture) -> tuple[float | None, float | None]:
    """Part of the prompt tokens that were found: now, and since the processes began; None: nothing was looked up."""

    def ratio(found: float, asked: float) -> float | None:
        return min(1.0, found / asked) if asked else None

    gains = [process.gains for process in picture.processes]
    totals = [process.totals for process in picture.processes]
    return (
        ratio(sum(one.hit_tokens for one in gains), sum(one.lookup_tokens for one in gains)),
        ratio(sum(one.hit_tokens for one in totals), sum(one.lookup_tokens for one in totals)),
    )


def _hits(picture: Picture) -> str:
    now, ever = hit_ratios(picture)
    if ever is None:
        return "nothing looked up"
    return f"tokens found: {'-' if now is None else f'{now:.0%}'} now, {ever:.0%} since start"


def _root_cells(root: RootRates) -> list[str]:
    reads, writes = root.device_reads_s, root.device_writes_s
    state = root.trouble or "ok"
    if root.damaged_records or root.io_errors:
        state += f"; {root.damaged_records} damaged, {root.io_errors} I/O errors"
    return [
        root.path,
        f"{root.used_bytes / root.capacity_bytes:.0%}" if root.capacity_bytes else _NONE,
        _rate(root.read_bytes_s),
        _rate(root.written_bytes_s),
        f"{root.read_share:.0%}",
        _NONE if reads is None or writes is None else f"{reads:.0f}/{writes:.0f}",
        _NONE if root.device_in_flight is None else str(root.device_in_flight),
        _rate(root.evicted_bytes_s),
        state,
    ]


def _process_cells(process: ProcessRates) -> list[str]:
    state = f"silent for {process.age_s:.0f} s" if process.is_stale else "full" if process.totals.is_full else "ok"
    return [
        f"{process.title}[{process.pid}]",
        process.host,
        _duration(time.time() - process.started_s),
        _rate(process.read_bytes_s),
        _rate(process.written_bytes_s),
        format_size(int(process.totals.load_queue_bytes)),
        format_size(int(process.totals.store_queue_bytes)),
        f"{process.totals.records:.0f}",
        state,
    ]


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / GIB:.2f}"


def _duration(seconds: float) -> str:
    minutes, _ = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02}h" if days else f"{hours}h{minutes:02}m"


def _process_document(process: ProcessRates) -> dict[str, Any]:
    document = {**asdict(process), "is_stale": process.is_stale}
    for level in ("load_queue_bytes", "store_queue_bytes", "records", "is_full"):
        del document["gains"][level]  # these are no counts
    document["gains_a_second"] = document.pop("gains")
    return document


def _document(picture: Picture) -> dict[str, Any]:
    now, ever = hit_ratios(picture)
    return {
        "schema": "rewarm.volume.top/1",
        "volume_id": picture.volume_id,
        "found_token_ratio": now,
        "found_token_ratio_since_start": ever,
        "roots": [asdict(root) for root in picture.roots],
        "processes": [_process_document(process) for process in picture.processes],
        "skipped": picture.skipped,
    }
