"""A recorded server's requests once more, under each policy; a log of decisions (kv/decision_log.py) is the trace.

Only what the log says is used: when a request was seen first, its tokens, what of it was stored, and the rates that the
server had learned last, which are taken for the truth. Steps of requests that only decode are not in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rewarm.bench.policy.server import Clock, Outcome, Server
from rewarm.bench.policy.world import Machine, Prompt
from rewarm.config import POLICIES
from rewarm.errors import DamageError, UsageError
from rewarm.inputs import shown
from rewarm.kv.choose import LoadPolicy
from rewarm.kv.costs import Costs
from rewarm.kv.decision_log import SCHEMA
from rewarm.kv.rates import rates_from_json

MAX_TOKENS = 1 << 22
"""Of a prompt: more no server takes, and each step of it is simulated."""
MAX_CHUNKS = 1 << 16
"""Of a prompt: each of them is simulated, too."""
MAX_ROOTS = 256
MAX_S = 1e10


@dataclass(frozen=True, slots=True)
class Trace:
    """What a log holds of one server."""

    machine: Machine
    prompts: tuple[Prompt, ...]
    actual_s: tuple[float, ...]
    """Of those prompts whose end is in the log, from when they were seen first."""


def read_trace(lines: Iterable[Mapping[str, Any]]) -> Trace:
    """The requests of a log since its last server started.

    Raises:
        UsageError: No log of decisions, or none of a server that had learned its rates.
        DamageError: A line that lacks what it must have.
    """
    head: Mapping[str, Any] | None = None
    rates: dict[str, Any] = {}
    found: list[tuple[Prompt, float | None]] = []
    try:
        for line in lines:
            if "schema" in line:
                if line["schema"] != SCHEMA:
                    raise UsageError(
                        f"this log is {shown(line['schema'])}, not {SCHEMA!r}",
                        hint="a log of .rewarm/policy in a volume",
                    )
                head, found = line, []
            rates.update({name: line[name] for name in ("root_bytes_a_s", "prefill_s") if line.get(name)})
            if "request_id" in line and head is not None:
                found.append(_prompt(line, _count(head["chunk_tokens"], least=1), len(found)))
        if head is None or not found:
            raise UsageError(
                "there is no request of a server in this log", hint="rewarm kv explain shows what it holds"
            )
        machine = _machine(head, rates)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamageError(
            f"a line of the log is not as a server writes it: {error!r}",
            hint="docs/reference/decisions.md has its fields",
        ) from error
    found.sort(key=lambda pair: pair[0].arrival_s)
    return Trace(machine, tuple(prompt for prompt, _ in found), tuple(s for _, s in found if s is not None))


def _prompt(line: Mapping[str, Any], chunk_tokens: int, number: int) -> tuple[Prompt, float | None]:
    waited_s = _seconds(line["waited_s"])
    resident, stored = _count(line["num_resident_tokens"]), _count(line["num_stored_tokens"])
    # What was resident is neither loaded nor computed: the prompt is as long as what was left of it.
    prompt = Prompt(
        f"{number}",
        _seconds(line["at"]) - waited_s,
        max(1, _count(line["num_request_tokens"]) - resident),
        _count(stored // chunk_tokens, most=MAX_CHUNKS),
    )
    actual_s = line.get("actual_s")
    return prompt, None if actual_s is None else _seconds(actual_s) + waited_s


def _count(value: Any, *, least: int = 0, most: int = MAX_TOKENS) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{shown(value)} is not {least} to {most}")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_S:
        raise ValueError(f"{shown(value)} is no time in seconds")  # NaN is none either
    return float(value)


def _machine(head: Mapping[str, Any], rates: Mapping[str, Any]) -> Machine:
    shares = tuple(_seconds(share) for share in head["shares"])
    if not sum(shares) > 0 or len(shares) > MAX_ROOTS:
        raise ValueError(f"{len(shares)} shares that are {sum(shares)} together")
    storage, prefill = rates_from_json(shares, rates)
    if storage.seconds_a_byte() is None or not prefill.is_known:
        raise UsageError(
            "this server had not yet learned how fast it loads and computes",
            hint="a log of some minutes of work, hits among it, is needed",
        )
    known = [root.bytes_a_s for root in storage.roots if root.bytes_a_s > 0]
    base_s, token_s, pair_s = prefill.coefficients
    return Machine(
        root_bytes_a_s=tuple(root.bytes_a_s or min(known) for root in storage.roots),
        shares=shares,
        base_s=base_s,
        token_s=token_s,
        pair_s=pair_s,
        chunk_tokens=_count(head["chunk_tokens"], least=1),
        chunk_bytes=_count(head["chunk_bytes"], least=1, most=1 << 40),
        step_tokens=_count(head["step_tokens"], least=1),
        prefill_limit=_count(head.get("prefill_limit", 0)),
    )


@dataclass(frozen=True, slots=True)
class Replayed:
    """One policy on a trace."""

    policy: str
    mean_s: float
    """From a request's arrival until all of its prompt is there."""
    p99_s: float
    end_s: float
    """From the first arrival to the last end."""
    num_loads: int


def replay(trace: Trace) -> list[Replayed]:
    """Every policy on a trace; ``auto`` begins with the rates of the log."""
    return [_replay(trace, name) for name in POLICIES]


def _replay(trace: Trace, name: str) -> Replayed:
    clock = Clock()
    clock.now_s = trace.prompts[0].arrival_s
    outcome = Server(trace.machine, replay_policy(trace.machine, name, clock), clock).run(trace.prompts)
    waits = sorted(outcome.end_s[prompt.name] - prompt.arrival_s for prompt in trace.prompts)
    return Replayed(
        name,
        statistics.fmean(waits),
        waits[min(len(waits) - 1, int(len(waits) * 0.99))],
        outcome.makespan_s(trace.prompts),
        _num_loads(outcome),
    )


def replay_policy(machine: Machine, name: str, clock: Clock) -> LoadPolicy:
    """A policy that knows a machine's rates."""
    rates = {
        "root_bytes_a_s": list(machine.root_bytes_a_s),
        "prefill_s": [machine.base_s, machine.token_s, machine.pair_s],
    }
    storage, prefill = rates_from_json(machine.shares, rates)
    costs = Costs(
        storage=storage,
        prefill=prefill,
        chunk_tokens=machine.chunk_tokens,
        chunk_bytes=machine.chunk_bytes,
        step_tokens=machine.step_tokens,
    )
    return LoadPolicy(name, costs, prefill_limit=machine.prefill_limit, clock=clock)


def _num_loads(outcome: Outcome) -> int:
    return sum(decision.num_load_tokens > 0 for decision in outcome.decisions)
