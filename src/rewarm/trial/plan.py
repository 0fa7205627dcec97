"""The plan of a trial: what is compared, under which load, and which thresholds decide. TOML, or all defaults.

Each class is one table of the file. An unknown key names the nearest known one; a value that cannot be is refused
before anything starts. Thresholds and rules stand here, fixed before the first measurement, and are written into the
evidence.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from rewarm.errors import UsageError
from rewarm.inputs import read_input, shown
from rewarm.units import GIB, MAX_SIZE, MIB, format_size, parse_size

TINY_MODEL = "tiny"
LEAST_CONTEXT, PROBE_CONTEXT = 512, 4096
CONTEXT_CHOICES = ((16384, 1.5), (8192, 4.0), (PROBE_CONTEXT, float("inf")))
"""Where a plan names no length: the first one whose limit computing PROBE_CONTEXT tokens does not exceed, in
seconds. A trial computes some twenty contexts; the longer they are, the more computing weighs against loading.
"""
LONGEST_CONTEXT = CONTEXT_CHOICES[0][0]
ARMS = ("recompute", "fs", "rewarm")
GATES = ("tokens", "cold", "recovery", "peer", "g3_ttft", "g3_throughput")


MAX_FILE_BYTES = MIB
_EXAMPLE = "docs/guides/trial.md has a plan with each kind of value"


def _check(rule_holds: bool, message: str, hint: str) -> None:
    if not rule_holds:
        raise UsageError(message, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """What is compared, and where."""

    model: str = TINY_MODEL
    """A folder or hub name that `vllm serve` takes; `tiny` is a random model that is made when it is missing."""
    root: str = ""
    """Directory for the candidate's records. Empty: in the output folder, and removed after the trial."""
    baseline_root: str = ""
    """Directory for the baseline's files, on the drive to compare with. Empty: on the candidate's."""
    arms: tuple[str, ...] = ARMS
    """What is compared: recompute (no tier), fs (vLLM's own tier on a directory), rewarm."""
    servers: str = "auto"
    """together: all servers at once, one working at a time; in_turn: one lives at a time; auto: together on CPU."""
    seed: int = -1
    """Prompts, order and canaries follow from it. -1: drawn at the start and written down."""

    def __post_init__(self) -> None:
        for arm in self.arms:
            near = difflib.get_close_matches(arm, ARMS, n=1)
            suggestion = f"; did you mean {near[0]!r}?" if near else ""
            _check(arm in ARMS, f"trial.arms has {arm!r}{suggestion}", f"known: {', '.join(ARMS)}")
        _check(len(set(self.arms)) == len(self.arms), "trial.arms names an arm twice", "name each once")
        _check("recompute" in self.arms, "trial.arms lacks recompute", "every token is checked against it")
        _check(len(self.arms) > 1, "trial.arms has nothing to compare with recompute", f"known: {', '.join(ARMS)}")
        _check(self.servers in _SERVERS, f"trial.servers is {self.servers!r}", f"one of: {', '.join(_SERVERS)}")


_SERVERS = ("auto", "together", "in_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTable:
    """The load: `groups` times `concurrency` contexts are filled; a block recovers one group, all at once."""

    context_tokens: int = 0
    """Prompt tokens of each context. 0: 16384, 8192 or 4096, by the time that 4096 take to compute."""
    concurrency: int = 0
    """Requests at once in a block. 0: 2 on CPU, 8 elsewhere."""
    groups: int = 1
    """Groups of contexts that blocks take in turn."""
    output_tokens: int = 6
    """Tokens that each request asks for; every one is compared."""
    pairs: int = 12
    """Pairs of blocks, one of each arm, that the statistics rest on."""
    noise_pairs: int = 4
    """Pairs of the same arm against itself, measured first."""

    def __post_init__(self) -> None:
        at_hand = self.context_tokens == 0 or self.context_tokens >= LEAST_CONTEXT
        _check(at_hand, f"load.context_tokens is {self.context_tokens}", f"0 or {LEAST_CONTEXT} or more")
        for name, least in (("concurrency", 0), ("groups", 1), ("output_tokens", 1), ("pairs", 3), ("noise_pairs", 3)):
            _check(getattr(self, name) >= least, f"load.{name} is {getattr(self, name)}", f"{least} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTable:
    """What the baseline tier of gate G3 is."""

    throttle: float = 0.0
    """Limit its reads to this share of the bandwidth that the candidate was seen to read with. 0: no limit."""

    def __post_init__(self) -> None:
        _check(0 <= self.throttle <= 1, f"baseline.throttle is {self.throttle}", "0 to 1, like 0.66")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTable:
    """How the servers run; the same for every arm."""

    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables."""
    host_tier_bytes: int = 0
    """Host memory of vLLM's own tier; emptied before each block, and large enough for one block's contexts. 0: 1 GiB on
    CPU, 32 GiB elsewhere."""
    capacity_bytes: int = 0
    """Capacity of the candidate's volume. 0: 8 GiB on CPU, 128 GiB elsewhere, and at most half of what is free."""
    start_timeout_s: float = 600.0
    """A server that does not answer by then has failed."""

    def __post_init__(self) -> None:
        for name in ("host_tier_bytes", "capacity_bytes"):
            num_bytes = getattr(self, name)
            at_hand = num_bytes == 0 or num_bytes >= 64 * MIB
            _check(at_hand, f"server.{name} is {format_size(num_bytes)}", "0, or at least 64 MiB; like 16GiB")
        _check(self.start_timeout_s > 0, f"server.start_timeout_s is {self.start_timeout_s}", "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatesTable:
    """Thresholds, and the rule that decides: pass = the point meets the threshold and the interval stays within `delta`
    beyond it; fail = the interval lies wholly on the wrong side; else inconclusive.
    """

    recompute_times: float = 20.0
    """recovery: mean TTFT of recompute over that of the candidate, at least."""
    peer_ratio: float = 1.05
    """peer: mean TTFT of the candidate over that of vLLM's own tier, at most."""
    ttft_reduction: float = 0.25
    """g3_ttft: TTFT below the baseline tier's by this share, at least."""
    throughput_gain: float = 0.29
    """g3_throughput: output tokens a second above the baseline tier's by this share, at least."""
    delta: float = 0.05
    """How far beyond a threshold the interval may reach, as a share of the threshold."""
    confidence: float = 0.95
    """Of the intervals."""
    required: tuple[str, ...] = ("tokens", "cold", "recovery", "peer")
    """Gates that make the verdict; the others are judged and shown."""

    def __post_init__(self) -> None:
        for gate in self.required:
            near = difflib.get_close_matches(gate, GATES, n=1)
            suggestion = f"; did you mean {near[0]!r}?" if near else ""
            _check(gate in GATES, f"gates.required has {gate!r}{suggestion}", f"known: {', '.join(GATES)}")
        _check(0.5 < self.confidence < 1, f"gates.confidence is {self.confidence}", "between 0.5 and 1, like 0.95")
        _check(0 < self.delta < 1, f"gates.delta is {self.delta}", "between 0 and 1, like 0.05")
        _check(0 < self.ttft_reduction < 1, f"gates.ttft_reduction is {self.ttft_reduction}", "between 0 and 1")
        for name in ("recompute_times", "peer_ratio", "throughput_gain"):
            _check(getattr(self, name) > 0, f"gates.{name} is {getattr(self, name)}", "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All tables."""

    trial: TrialTable = field(default_factory=TrialTable)
    load: LoadTable = field(default_factory=LoadTable)
    baseline: BaselineTable = field(default_factory=BaselineTable)
    server: ServerTable = field(default_factory=ServerTable)
    gates: GatesTable = field(default_factory=GatesTable)

    def as_json(self) -> dict[str, Any]:
        """Tables of plain values, as they stand in the evidence; `from_document` reads them back."""
        return dataclasses.asdict(self)


def settle(plan: Plan, *, on_cpu: bool, free_bytes: int) -> Plan:
    """The plan with what it left open, besides the length of contexts.

    Args:
        plan: As written.
        on_cpu: The server computes on CPU.
        free_bytes: On the candidate's drive.
    """
    load, server = plan.load, plan.server
    capacity_bytes = min(8 * GIB if on_cpu else 128 * GIB, max(free_bytes // 2, 64 * MIB))
    return dataclasses.replace(
        plan,
        load=dataclasses.replace(load, concurrency=load.concurrency or (2 if on_cpu else 8)),
        server=dataclasses.replace(
            server,
            host_tier_bytes=server.host_tier_bytes or (GIB if on_cpu else 32 * GIB),
            capacity_bytes=server.capacity_bytes or capacity_bytes,
        ),
    )


_TABLES: dict[str, type[Any]] = {name: kind for name, kind in get_type_hints(Plan).items() if name != "return"}

PUBLISHED_SHARE = 0.66
"""6.8 GB/s of 10.3 GB/s: the disks of the published pair, baseline over candidate (published.toml)."""

DEMO: dict[str, Any] = {"baseline": {"throttle": PUBLISHED_SHARE}}
"""What `rewarm trial run` without a plan and without a model does: the tiny model, and a baseline slowed as in the
published pair, so that G3 is seen at work."""

OWN_MODEL: dict[str, Any] = {"gates": {"recompute_times": 1.0}}
"""What it does without a plan for a model of the user's: how many times sooner is found, not fixed beforehand."""


def load_plan(path: str) -> Plan:
    """The plan in a TOML file.

    Raises:
        StorageError: The file cannot be read.
        UsageError: Not TOML, an unknown table or key, or a value that cannot be.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(read_input(path, MAX_FILE_BYTES).decode())
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers without an end
        raise UsageError(f"{path} is not TOML: {error}", hint=_EXAMPLE) from error
    return from_document(document, where=path)


def from_document(document: Mapping[str, Any], *, where: str) -> Plan:
    """The plan in a parsed document.

    Raises:
        UsageError: An unknown table or key, or a value that cannot be.
    """
    tables = {}
    for name, table in document.items():
        _check_known(name, _TABLES, f"{where} has no table")
        _check(isinstance(table, Mapping), f"{where}: {name} is not a table", f"write [{name}] above its keys")
        kind = _TABLES[name]
        hints = get_type_hints(kind)
        values = {}
        for key, value in table.items():
            _check_known(key, [each.name for each in dataclasses.fields(kind)], f"{where}: [{name}] has no key")
            values[key] = _convert(hints[key], value, f"{where}: {name}.{key}")
        tables[name] = kind(**values)
    return Plan(**tables)


def _check_known(key: str, known: Any, message: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
        suggestion = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{message} {key!r}{suggestion}", hint=f"known: {', '.join(known)}")


def _convert(wanted: Any, value: Any, where: str) -> Any:
    if wanted is int and where.endswith("_bytes") and isinstance(value, str):
        return parse_size(value)
    _check(type(value) is not int or abs(value) <= MAX_SIZE, f"{where} is too large a number", _EXAMPLE)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted == tuple[str, ...]:
        if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            return tuple(value)
        raise UsageError(f"{where} is {shown(value)}, which is not a list of texts", hint=_EXAMPLE)
    if wanted == Mapping[str, str]:
        if isinstance(value, Mapping) and all(isinstance(part, str) for part in value.values()):
            return dict(value)
        raise UsageError(f"{where} is {shown(value)}, which is not a table of texts", hint=_EXAMPLE)
    if type(value) is not wanted:
        raise UsageError(f"{where} is {shown(value)}, which is not {_TYPE_NAMES[wanted]}", hint=_EXAMPLE)
    return value


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text"}
