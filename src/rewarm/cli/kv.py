"""``rewarm kv``: what a server decided between loading and computing, and why; prompts that are kept."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from rewarm.cli import kv_pins
from rewarm.cli.common import json_option, note, print_json, print_table
from rewarm.errors import ExitCode, UsageError
from rewarm.kv.decision_log import log_files, read_log
from rewarm.kv.rates import learned_prefill, learned_roots
from rewarm.volume.layout import RootPaths, read_roots

SCHEMA = "rewarm.kv-explain/1"
MAX_NUMBER = 1e15
"""Bytes, tokens and seconds of a decision are less; what is more counts as unknown."""
MIN_ACTUAL_S = 1e-6
"""The log has no more digits."""


@click.group("kv")
def command() -> None:
    """Explain what a server loaded and computed; pin prompts."""


for _one in (kv_pins.pin, kv_pins.unpin, kv_pins.pins, kv_pins.prefetch_):
    command.add_command(_one)


@command.command("explain")
@click.argument("paths", nargs=-1, required=True, metavar="DIR|FILE...")
@click.option("--last", default=20, show_default=True, metavar="N", help="Decisions to show; 0: all there are.")
@json_option
def explain(paths: Sequence[str], last: int, as_json: bool) -> int:
    """Show a server's newest decisions, with predicted and actual seconds.

    DIR is the volume's first directory, FILE a log of decisions copied from there. Exits 1 where there is none.
    """
    if last < 0:
        raise UsageError(f"--last is {last}", hint="0 or more")
    lines, num_left_out = _lines(paths)
    decisions = [line for line in lines if _is_decision(line)]
    num_left_out += sum("request_id" in line for line in lines) - len(decisions)
    decisions.sort(key=lambda line: _number(line, "time") or 0.0)
    shown = decisions[-last:] if last else decisions
    summary = _summary(decisions, lines)
    if as_json:
        known = [{name: value for name, value in line.items() if _is_plain(value)} for line in shown]
        print_json({"schema": SCHEMA, "num_left_out": num_left_out, **summary, "decisions": known})
    elif decisions:
        print_table(_HEADERS, [_row(line) for line in shown])
        counts = Counter(summary["reasons"]).most_common()
        print_table(("reason", "decisions"), [(_plain(reason), str(count)) for reason, count in counts])
        error = summary["median_prediction_error"]
        note("predictions: " + ("none with an end yet" if error is None else f"median error {error:.0%}"))
        rates = [f"{rate / 1e9:.2f} GB/s" for rate in summary["root_bytes_a_s"]]
        note(f"learned: storage {', '.join(rates) or 'unknown'}; prefill {_prefill(summary['prefill_s'])}")
    else:
        note("no decisions: no server has used this volume since they are kept, or none was asked for a prompt yet")
    if num_left_out:
        note(f"left out: {num_left_out:,} lines that are not as a server writes them")
    return ExitCode.DONE if decisions else ExitCode.ANSWER_IS_NO


_HEADERS = ("request", "tokens", "stored", "loaded", "why", "if loaded", "if computed", "predicted", "actual", "error")


def _lines(paths: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """The lines of all logs, and how many are left out."""
    files = []
    for path in paths:
        if os.path.isdir(path):
            read_roots([path])  # says what is wrong with a directory that is no volume
            files += [str(file) for file in log_files(RootPaths(path).policy)]
        else:
            files.append(path)
    logs = [read_log(file) for file in files]
    return [line for log in logs for line in log.lines], sum(log.num_left_out for log in logs)


def _is_decision(line: dict[str, Any]) -> bool:
    return isinstance(line.get("request_id"), str) and isinstance(line.get("reason"), str)


def _summary(decisions: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [error for error in map(_error, decisions) if error is not None]
    learned: dict[str, list[float]] = {"root_bytes_a_s": [], "prefill_s": []}
    for line in lines:
        learned["root_bytes_a_s"] = learned_roots(line) or learned["root_bytes_a_s"]
        learned["prefill_s"] = learned_prefill(line) or learned["prefill_s"]
    return {
        "reasons": dict(Counter(line["reason"] for line in decisions)),
        "num_decisions": len(decisions),
        "median_prediction_error": statistics.median(errors) if errors else None,
        **learned,
    }


def _error(line: dict[str, Any]) -> float | None:
    predicted, actual = _number(line, "predicted_s"), _number(line, "actual_s")
    if predicted is None or actual is None or actual < MIN_ACTUAL_S or line.get("was_cut"):
        return None
    return abs(predicted - actual) / actual


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if value is not None and is_number and 0 <= value <= MAX_NUMBER else None


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    error = _error(line)
    counts = [_number(line, name) for name in ("num_request_tokens", "num_stored_tokens", "num_load_tokens")]
    texts = ["-" if count is None else f"{count:.0f}" for count in counts]
    texts[-1] += _from_memory(line)
    seconds = [_number(line, name) for name in ("predicted_load_s", "predicted_compute_s", "predicted_s", "actual_s")]
    return (
        _plain(line["request_id"])[-24:],
        *texts,
        _plain(line["reason"]) + (", cut" if line.get("was_cut") else ""),
        *("-" if s is None else f"{s:.3f} s" for s in seconds),
        "-" if error is None else f"{error:.0%}",
    )


def _from_memory(line: dict[str, Any]) -> str:
    """What of a load came from the host tier."""
    host_bytes, load_bytes = _number(line, "host_bytes"), _number(line, "load_bytes")
    if host_bytes is None or load_bytes is None or not 0 < host_bytes <= load_bytes:
        return ""
    return f" ({host_bytes / load_bytes:.0%} from memory)"


def _plain(text: str) -> str:
    """A name from a file, without what a terminal would act on."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _prefill(coefficients: Sequence[float]) -> str:
    if len(coefficients) != 3:
        return "unknown"
    base, a_token, a_pair = coefficients
    seconds = a_token * 16384 + a_pair * 16384**2 / 2 + base
    return f"{seconds:.2f} s for 16,384 tokens"
