"""``rewarm kv pin``, ``unpin``, ``pins``, ``prefetch``: prompts whose records are kept, and read beforehand."""

from __future__ import annotations

import datetime as dt
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import click

from rewarm.cli.common import json_option, note, print_json, print_table, progress, quiet_option
from rewarm.cli.prompts import PromptOptions, prompt_options, prompt_records
from rewarm.errors import ExitCode, RewarmError, UsageError
from rewarm.inputs import shown
from rewarm.units import format_size
from rewarm.volume.access import changing
from rewarm.volume.layout import read_roots
from rewarm.volume.members import current_roots
from rewarm.volume.pins import (
    MAX_PINS,
    Pin,
    PinState,
    check_name,
    pin_names,
    pin_state,
    read_pin,
    read_pins,
    remove_pin,
    write_pin,
)
from rewarm.volume.prefetch import prefetch, reads_directly

MAX_SHARE = 0.5
"""Of the volume, that pins may take unless somebody insists: the rest is for what nobody pinned."""
SCHEMA = "rewarm.kv-pins/1"
_AGE = re.compile(r"([0-9]{1,9})([mhdw])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_roots = click.argument("roots", nargs=-1, required=True, metavar="DIR...")


@click.command("pin")
@_roots
@click.option("--name", required=True, metavar="NAME", help="Of the pin; one of the same name is replaced.")
@prompt_options
@click.option("--until", metavar="WHEN", help="When it ends: 12h, 7d, or 2027-01-31; never where it is left out.")
@click.option("--force", is_flag=True, help="Even where pins then take more than half of the volume.")
@json_option
@quiet_option
def pin(roots: Sequence[str], name: str, until: str | None, force: bool, as_json: bool, **prompt: Any) -> None:
    """Keep the records of a prompt: a janitor never evicts them.

    What is not on the volume yet is pinned when a server stores it. Name all DIRs of the volume.
    """
    check_name(name)
    files = current_roots(read_roots(roots))
    now_s = time.time()
    records = prompt_records(list(files), PromptOptions(**prompt))
    made = Pin(
        name=name,
        num_tokens=records.num_tokens,
        num_chunks=records.num_chunks,
        created_s=now_s,
        until_s=None if until is None else _until(until, now_s),
        entries=records.entries,
    )
    state = pin_state(list(files), made)
    capacity_bytes = sum(file.capacity_bytes for file in files.values())
    _check_room(list(files), made, state, capacity_bytes, force=force)
    for root in files:
        with changing(root):
            write_pin(root, made)
    if as_json:
        print_json({"schema": "rewarm.kv-pin/1", **_document(made, state, now_s)})
    else:
        present = f"{state.num_chunks_present} of its {made.num_chunks} chunks are"
        click.echo(f"{name}: {made.num_tokens:,} tokens pinned; {present} on the volume")


def _check_room(roots: Sequence[str], made: Pin, state: PinState, capacity_bytes: int, *, force: bool) -> None:
    """Raises UsageError where pins would take too much of the volume, or are too many."""
    others = [other for other in read_pins(roots[0])[0] if other.name != made.name and not other.has_ended(time.time())]
    if len(pin_names(roots[0])) >= MAX_PINS and made.name not in pin_names(roots[0]):
        raise UsageError(f"the volume has {MAX_PINS} pins", hint="rewarm kv unpin takes one away; join prompts in one")
    pinned = state.whole_bytes + sum(pin_state(roots, other).whole_bytes for other in others)
    limit = int(capacity_bytes * (1.0 if force else MAX_SHARE))
    if pinned > limit:
        what = f"pins would take {format_size(pinned)}"
        if force:
            raise UsageError(f"{what}, more than the whole volume of {format_size(capacity_bytes)}", hint=_LESS)
        raise UsageError(
            f"{what}, more than half of the volume's {format_size(capacity_bytes)}", hint=f"{_LESS}; or --force"
        )


_LESS = "pin less, or take another pin away: rewarm kv unpin"


def _until(text: str, now_s: float) -> float:
    match = _AGE.fullmatch(text)
    ends_s = None
    if match:
        ends_s = now_s + int(match.group(1)) * _SECONDS[match.group(2)]
    else:
        with suppress(ValueError, OverflowError, OSError):
            ends_s = dt.datetime.fromisoformat(text).timestamp()
    if ends_s is None:
        raise UsageError(f"--until is {shown(text)}", hint="like 30m, 12h, 7d, 2w or 2027-01-31T18:00")
    if ends_s <= now_s:
        raise UsageError(f"--until {shown(text)} is not in the future", hint="leave it out for a pin that does not end")
    return ends_s


@click.command("unpin")
@_roots
@click.option("--name", "names", required=True, multiple=True, metavar="NAME", help="Of the pin; repeatable.")
@quiet_option
def unpin(roots: Sequence[str], names: Sequence[str]) -> None:
    """Take pins away: their records are evicted like the rest, when their turn comes."""
    files = current_roots(read_roots(roots))
    for name in map(check_name, names):
        found = []
        for root in files:
            with changing(root):
                found.append(remove_pin(root, name))
        if not any(found):
            raise UsageError(f"there is no pin {name!r}", hint="rewarm kv pins DIR lists them")
        note(f"{name}: pinned no more")


@click.command("pins")
@_roots
@json_option
@quiet_option
def pins(roots: Sequence[str], as_json: bool) -> int:
    """List the pins of a volume, with their bytes and how much of each is there. Exits 5 where one is damaged."""
    files = current_roots(read_roots(roots))
    now_s = time.time()
    known, wrong = _read_all(list(files))
    states = [pin_state(list(files), one) for one in known]
    if as_json:
        shown_pins = [_document(one, state, now_s) for one, state in zip(known, states, strict=True)]
        print_json({"schema": SCHEMA, "pins": shown_pins, "trouble": [error.message for error in wrong]})
    else:
        rows = [_row(one, state, now_s) for one, state in zip(known, states, strict=True)]
        print_table(("pin", "tokens", "chunks there", "bytes there", "bytes when whole", "until"), rows)
        for error in wrong:
            note(f"{error.message}; {error.hint}" if error.hint else error.message)
    return max((error.exit_code for error in wrong), default=ExitCode.DONE)


@click.command("prefetch")
@_roots
@click.option("--name", metavar="NAME", help="Of a pin, instead of a prompt.")
@prompt_options
@json_option
@quiet_option
def prefetch_(roots: Sequence[str], name: str | None, as_json: bool, **prompt: Any) -> int:
    """Read and check the records of a prompt or a pin, at low priority. Exits 1 where some are not on the volume.

    It warms what lies below the file system: a network file system's servers, an array's cache. Model servers read past
    their host's page cache where they can: nothing is gained on a local drive then, and the command says so.
    """
    files = list(current_roots(read_roots(roots)))
    options = PromptOptions(**prompt)
    if (name is not None) == options.is_given:
        raise UsageError("a pin or a prompt is prefetched", hint="give --name, or one of --tokens, --text, --messages")
    if name is not None:
        made = read_pin(files[0], check_name(name))
    else:
        records = prompt_records(files, options)
        made = Pin(
            name="prompt",
            num_tokens=records.num_tokens,
            num_chunks=records.num_chunks,
            created_s=0.0,
            until_s=None,
            entries=records.entries,
        )
    state = pin_state(files, made)
    with progress("prefetch", state.present_bytes, in_bytes=True) as advance, _low_priority() as executor:
        done = executor.submit(prefetch, files, made.entries, advance=advance).result()
    num_absent = made.num_chunks - state.num_chunks_present
    if as_json:
        print_json(
            {
                "schema": "rewarm.kv-prefetch/1",
                "records": done.num_records,
                "bytes": done.num_bytes,
                "damaged_records": done.num_damaged,
                "chunks": made.num_chunks,
                "absent_chunks": num_absent,
            }
        )
    else:
        damaged = f", {done.num_damaged:,} damaged" if done.num_damaged else ""
        click.echo(f"{done.num_records:,} records read, {format_size(done.num_bytes)}{damaged}")
        if num_absent:
            click.echo(f"{num_absent:,} of {made.num_chunks:,} chunks are not on the volume")
    direct = [root for root in files if reads_directly(root)]
    if direct:
        note(f"note: servers read {', '.join(direct)} past the page cache: only what lies below it is warm now")
    return ExitCode.ANSWER_IS_NO if num_absent or done.num_damaged else ExitCode.DONE


def _low_priority() -> ThreadPoolExecutor:
    """A thread that every other one that wants to run goes before."""
    return ThreadPoolExecutor(1, initializer=lambda: os.setpriority(os.PRIO_PROCESS, 0, 19))  # 0: this thread, on Linux


def _read_all(roots: Sequence[str]) -> tuple[list[Pin], list[RewarmError]]:
    """The pins of all roots, each once, and what is wrong with them; a pin that a root lacks does not hold there."""
    known: dict[str, Pin] = {}
    wrong: list[RewarmError] = []
    for root in roots:
        found, trouble = read_pins(root)
        wrong += trouble
        for one in found:
            known.setdefault(one.name, one)
    return [known[name] for name in sorted(known)], wrong


def _document(one: Pin, state: PinState, now_s: float) -> dict[str, Any]:
    return {
        "name": one.name,
        "tokens": one.num_tokens,
        "chunks": one.num_chunks,
        "chunks_present": state.num_chunks_present,
        "present_bytes": state.present_bytes,
        "whole_bytes": state.whole_bytes,
        "created": one.created_s,
        "until": one.until_s,
        "has_ended": one.has_ended(now_s),
        "namespaces": sorted({place.hex() for place, _ in one.entries}),
    }


def _row(one: Pin, state: PinState, now_s: float) -> tuple[str, ...]:
    until = "-"
    if one.until_s is not None:
        with suppress(ValueError, OverflowError, OSError):  # a year that no calendar has
            until = dt.datetime.fromtimestamp(one.until_s).astimezone().isoformat(" ", "minutes")
        until += ", ended" if one.has_ended(now_s) else ""
    return (
        one.name,
        f"{one.num_tokens:,}",
        f"{state.num_chunks_present} of {one.num_chunks}",
        format_size(state.present_bytes),
        format_size(state.whole_bytes),
        until,
    )
