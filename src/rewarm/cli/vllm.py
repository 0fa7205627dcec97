"""``rewarm vllm``: the configuration of a vLLM server, and whether a running one gets hits."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from rewarm.cli.common import json_option, print_json, print_table
from rewarm.cli.ensure import ensure_volume, size_option
from rewarm.cli.server import ask_server
from rewarm.config import POLICIES, STORE_RULES, KvConfig, resolve
from rewarm.errors import ExitCode, UsageError
from rewarm.units import format_size


@click.group("vllm")
def command() -> None:
    """Configure a vLLM server, and check whether its tier hits."""


@command.command("config")
@click.option("--root", "roots", multiple=True, metavar="DIR", help="A directory of the volume; repeatable.")
@click.option("--size", metavar="SIZE", help="What the volume may hold, like 200GiB; needed to make one.")
@click.option("--host-tier", metavar="SIZE", help="Host memory for copies of what is used again, like 64GiB. [none]")
@click.option("--chunk-tokens", type=int, metavar="N", help="Tokens in one record. [chosen]")
@click.option("--policy", metavar="RULE", help=f"{' | '.join(POLICIES)} [{POLICIES[0]}]")
@click.option("--store", metavar="RULE", help=f"{' | '.join(STORE_RULES)} [{STORE_RULES[0]}]")
@click.option("--read-only", is_flag=True, default=None, help="Load, but neither store nor evict.")
@click.option("--durable", is_flag=True, default=None, help="fsync each record.")
@click.option("--salt", metavar="TEXT", help="Servers with different salts never share a record.")
@click.option("--allow-untested", is_flag=True, default=None, help="Start with a vLLM that was never tried.")
def config(roots: tuple[str, ...], size: str | None, host_tier: str | None, **flags: Any) -> None:
    """Print one line of JSON for vllm serve --kv-transfer-config; make the volume where there is none.

    What is not given here may come from REWARM_KV_... variables of the server's environment; all settings:
    rewarm config show.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if roots:
        given["roots"] = tuple(os.path.abspath(root) for root in roots)
    if host_tier is not None:
        given["host_bytes"] = size_option("--host-tier", host_tier)
    capacity_bytes = None if size is None else size_option("--size", size)
    asked = resolve(KvConfig, arguments={**given, "capacity_bytes": capacity_bytes}).config
    if not asked.roots:
        raise UsageError("no directory was named", hint="rewarm vllm config --root DIR --size 200GiB")
    ensure_volume(asked)
    transfer_config = {
        "kv_connector": "RewarmConnector",
        "kv_connector_module_path": "rewarm.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**given, "roots": list(asked.roots)},
    }
    click.echo(json.dumps(transfer_config, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class TierState:
    """What a server's /metrics say of the tier, since the server started."""

    is_there: bool
    lookup_tokens: int
    hit_tokens: int
    loads: dict[str, int]
    """Records by outcome."""
    stored_records: int
    stored_bytes: int

    @property
    def verdict(self) -> str:
        """One sentence; begins with ``hits`` where the tier hits."""
        if not self.is_there:
            return "no tier: this server runs without Rewarm's connector"
        if self.loads.get("hit"):
            return f"hits: {self.hit_tokens} of {self.lookup_tokens} prompt tokens looked up were on the volume"
        if self.hit_tokens:
            return "no hits: records were found, but none was loaded yet; see the outcomes"
        if self.lookup_tokens:
            return "no hits: nothing that was looked up is on the volume yet"
        return "no hits: no prompt was looked up yet"

    @property
    def hits(self) -> bool:
        """Whether at least one record was loaded."""
        return self.is_there and bool(self.loads.get("hit"))


_LINE = re.compile(r"^(rewarm_\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_OUTCOME = re.compile(r'outcome="(\w+)"')


def tier_state(metrics_text: str) -> TierState:
    """Read a server's metrics, summed over its engines."""
    sums: dict[tuple[str, str], float] = {}
    for name, outcome, value in _samples(metrics_text):
        sums[name, outcome] = sums.get((name, outcome), 0.0) + value

    def total(name: str, outcome: str = "") -> int:
        return int(sums.get((name, outcome), 0.0))

    loads = {
        outcome: int(value) for (name, outcome), value in sums.items() if name == "rewarm_kv_loads_total" and value
    }
    return TierState(
        is_there="rewarm_kv_" in metrics_text,
        lookup_tokens=total("rewarm_kv_lookup_tokens_total"),
        hit_tokens=total("rewarm_kv_hit_tokens_total"),
        loads=loads,
        stored_records=total("rewarm_kv_stores_total", "stored"),
        stored_bytes=total("rewarm_kv_store_bytes_total"),
    )


def _samples(metrics_text: str) -> Iterator[tuple[str, str, float]]:
    for match in _LINE.finditer(metrics_text):
        outcome = _OUTCOME.search(match.group(2) or "")
        with suppress(ValueError):  # no number
            value = float(match.group(3))
            if math.isfinite(value):
                yield match.group(1), outcome.group(1) if outcome else "", value


@command.command("check")
@click.argument("url")
@json_option
def check(url: str, as_json: bool) -> ExitCode:
    """Tell whether the tier of the server at URL hits. Exits 0 when it does, 1 when not."""
    state = tier_state(ask_server(url, "/metrics").decode(errors="replace"))
    if as_json:
        print_json(
            {
                "schema": "rewarm.vllm-check/1",
                "hits": state.hits,
                "verdict": state.verdict,
                "lookup_tokens": state.lookup_tokens,
                "hit_tokens": state.hit_tokens,
                "loads": state.loads,
                "stored_records": state.stored_records,
                "stored_bytes": state.stored_bytes,
            }
        )
    else:
        click.echo(state.verdict)
        if state.is_there:
            loads = ", ".join(f"{count} {outcome}" for outcome, count in sorted(state.loads.items())) or "none"
            rows = [
                ("records loaded", loads),
                ("records stored", f"{state.stored_records}, {format_size(state.stored_bytes)}"),
            ]
            print_table(("since the start", ""), rows)
    return ExitCode.DONE if state.hits else ExitCode.ANSWER_IS_NO
