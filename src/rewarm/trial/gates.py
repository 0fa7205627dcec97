"""Gates: a question with a threshold, and pass, fail or inconclusive for an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rewarm.platform.findings import Finding, Verdict
from rewarm.trial.blocks import Block, noise_pairs, of, pairs
from rewarm.trial.plan import Plan
from rewarm.trial.proofs import TokenCheck
from rewarm.trial.schedule import FS, RECOMPUTE, RECOVER, REWARM, baseline_arm
from rewarm.trial.stats import Outcome, Ratio, judge, more_mismatches, noise, paired_ratio, pairs_needed

NAMES = {
    "recompute": "recompute",
    "fs": "vLLM fs tier",
    "fs_limited": "vLLM fs tier, limited",
    "rewarm": "Rewarm",
}
"""Of arms, as people read them."""

UNLIKELY = 0.01
"""Mismatches that have a smaller probability than this under the server's own noise are not noise."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One question and its answer; point, low and high are in the unit of the threshold."""

    name: str
    title: str
    outcome: Outcome
    threshold: str
    found: str
    """The point in words."""
    reason: str = ""
    """Why it is not a pass, and what would settle it."""
    point: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    """The threshold as a number."""
    pairs: int = 0
    pairs_needed: int | None = None

    def as_json(self, *, required: bool) -> dict[str, Any]:
        """All fields as plain values; what has no bound is null."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        numbers = {name: _finite(fields[name]) for name in ("point", "low", "high", "limit")}
        return {**fields, **numbers, "outcome": self.outcome.value, "required": required}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def judge_all(plan: Plan, blocks: Sequence[Block], proofs: Sequence[Finding], tokens: TokenCheck) -> list[Gate]:
    """Every gate, in the order in which a report shows them."""
    table = plan.gates
    first = [_tokens(tokens), _cold(proofs)]
    doubt = "; ".join(gate.title for gate in first if gate.outcome is not Outcome.PASS)
    question = _Question(plan, blocks, doubt)
    return [
        *first,
        question.ask(
            "recovery",
            f"TTFT at least {table.recompute_times:g}x lower than recomputing",
            RECOMPUTE,
            1 / table.recompute_times,
        ),
        question.ask(
            "peer", f"TTFT at most {table.peer_ratio:g} of vLLM's own tier on the same drive", FS, table.peer_ratio
        ),
        question.ask(
            "g3_ttft",
            f"G3: TTFT at least {table.ttft_reduction:.0%} below the baseline tier",
            baseline_arm(plan),
            1 - table.ttft_reduction,
        ),
        question.ask(
            "g3_throughput",
            f"G3: throughput at least {table.throughput_gain:.0%} above the baseline tier",
            baseline_arm(plan),
            1 + table.throughput_gain,
        ),
    ]


def verdict_of(gates: Sequence[Gate], required: Sequence[str], *, complete: bool) -> Outcome:
    """Of the whole: fail if a required gate fails, pass if all pass; a trial cut short fails by a wrong token alone."""
    outcomes = {gate.outcome for gate in gates if gate.name in required and (complete or gate.name == "tokens")}
    if Outcome.FAIL in outcomes:
        return Outcome.FAIL
    return Outcome.PASS if complete and outcomes <= {Outcome.PASS} else Outcome.INCONCLUSIVE


def _tokens(check: TokenCheck) -> Gate:
    found = (
        f"{check.compared - check.mismatched} of {check.compared} answers equal; without a cache against itself "
        f"{check.noise_compared - check.noise_mismatched} of {check.noise_compared}"
    )
    outcome, reason = Outcome.PASS, ""
    if not check.compared or not check.noise_compared:
        outcome, reason = Outcome.INCONCLUSIVE, "nothing was compared"
    elif check.mismatched:
        chance = more_mismatches(check.mismatched, check.compared, check.noise_mismatched, check.noise_compared)
        if not check.noise_mismatched or chance < UNLIKELY:
            outcome, reason = Outcome.FAIL, "answers differ, and not by the server's own noise"
        else:
            outcome, reason = Outcome.INCONCLUSIVE, "answers differ, as they do without a cache"
    return Gate("tokens", "Every output token as without a cache", outcome, "all equal", found, reason)


def _cold(proofs: Sequence[Finding]) -> Gate:
    bad = [proof.name for proof in proofs if proof.verdict is Verdict.FAIL]
    unknown = [proof.name for proof in proofs if proof.verdict is Verdict.UNKNOWN]
    outcome = Outcome.FAIL if bad else Outcome.INCONCLUSIVE if unknown else Outcome.PASS
    reason = f"does not hold: {', '.join(bad)}" if bad else f"not known: {', '.join(unknown)}" if unknown else ""
    held = sum(proof.verdict is Verdict.OK for proof in proofs)
    return Gate("cold", "Cold proofs and controls hold", outcome, "all", f"{held} of {len(proofs)} hold", reason)


@dataclass(frozen=True, slots=True)
class _Question:
    plan: Plan
    blocks: Sequence[Block]
    doubt: str
    """Proofs that do not hold; with one, nothing passes."""

    def ask(self, name: str, title: str, baseline: str, threshold: float) -> Gate:
        at_most = name != "g3_throughput"
        found = pairs(self.blocks, REWARM, baseline)
        limit_text = f"ratio {'at most' if at_most else 'at least'} {threshold:.3g}"
        if not found:
            missing = f"no pairs of {NAMES[REWARM]} and {NAMES[baseline]}"
            return Gate(name, title, Outcome.INCONCLUSIVE, limit_text, "not measured", missing, limit=threshold)
        table = self.plan.gates
        figures = [(_figure(name, a), _figure(name, b)) for a, b in found]
        ratio = paired_ratio([a for a, _ in figures], [b for _, b in figures], table.confidence)
        outcome = judge(ratio, threshold, table.delta, at_most=at_most)
        needed = pairs_needed(ratio, threshold, table.delta, table.confidence, at_most=at_most)
        reason = self._reason(name, outcome, ratio, threshold, needed)
        too_noisy = self._noise_reason(ratio, threshold) if name.startswith("g3") else ""
        if too_noisy and outcome is not Outcome.INCONCLUSIVE:
            outcome, reason, needed = Outcome.INCONCLUSIVE, too_noisy, None
        if outcome is Outcome.PASS and self.doubt:
            outcome, reason = Outcome.INCONCLUSIVE, f"a proof does not hold: {self.doubt}"
        return Gate(
            name,
            title,
            outcome,
            limit_text,
            _in_words(name, ratio.point) + self._bandwidths(name, baseline),
            reason,
            ratio.point,
            ratio.low,
            ratio.high,
            threshold,
            ratio.num_pairs,
            needed if outcome is Outcome.INCONCLUSIVE else None,
        )

    def _reason(self, name: str, outcome: Outcome, ratio: Ratio, threshold: float, needed: int | None) -> str:
        if outcome is Outcome.PASS:
            return ""
        if outcome is Outcome.FAIL:
            return f"the whole interval lies on the wrong side of {threshold:.3g}"
        if needed is None:
            return "the point lies on the threshold: no number of pairs settles it"
        return f"{ratio.num_pairs} pairs leave it open; about {max(needed, ratio.num_pairs + 1)} would settle it"

    def _noise_reason(self, ratio: Ratio, threshold: float) -> str:
        """Why the noise of the arms forbids an answer, or nothing."""
        measured = [
            noise([a.mean_ttft_s for a, _ in found], [b.mean_ttft_s for _, b in found])
            for found in (noise_pairs(self.blocks, arm) for arm in (FS, REWARM))
            if found
        ]
        if not measured:
            return "the arms were not measured against themselves"
        left = max(measured) / math.sqrt(ratio.num_pairs)
        if left <= abs(math.log(threshold)) / 3:
            return ""
        return f"arms against themselves differ by {math.expm1(max(measured)):.0%} a pair: too noisy for this gate"

    def _bandwidths(self, name: str, baseline: str) -> str:
        if not name.startswith("g3"):
            return ""
        return f"; read rate: baseline {_rate(self.blocks, baseline)}, candidate {_rate(self.blocks, REWARM)}"


def _figure(name: str, block: Block) -> float:
    return block.tokens_per_s if name == "g3_throughput" else block.mean_ttft_s


def _in_words(name: str, point: float) -> str:
    if name == "recovery":
        return f"{1 / point:.1f}x lower"
    if name == "peer":
        return f"{point:.3f} of the peer's"
    change = point - 1
    return f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"


def _rate(blocks: Sequence[Block], arm: str) -> str:
    rates = [block.read_bytes_s for block in of(blocks, RECOVER, arm) if block.read_bytes_s]
    return f"{median(rates) / 1e9:.2f} GB/s" if rates else "unknown"
