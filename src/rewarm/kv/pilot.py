"""The policy beside a server: it counts, keeps a log, remembers rates for the next start, and never throws.

A policy that fails is switched off with one line in the server's log; what is stored is loaded from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rewarm.kv.choose import LoadPolicy
from rewarm.kv.chunks import LoadTimes
from rewarm.kv.costs import Costs
from rewarm.kv.decision_log import SCHEMA, DecisionLog
from rewarm.kv.policy import Decision, Part, PrefixHit, prediction_errors
from rewarm.kv.rates import rates_from_json, rates_to_json
from rewarm.kv.slow_loads import SlowLoads

if TYPE_CHECKING:
    from rewarm.kv.chunks import StepReport
    from rewarm.metrics import Counters

logger = logging.getLogger("vllm.rewarm")

KEEP_RATES_EVERY_S = 30.0

T = TypeVar("T")


class Pilot:
    """Called in the server's thread only; every method takes microseconds."""

    def __init__(
        self,
        policy: str,
        *,
        counters: Counters,
        shares: Mapping[str, float],
        chunk_tokens: int,
        chunk_bytes: int,
        step_tokens: int,
        prefill_limit: int = 0,
        log: DecisionLog | None = None,
        num_holders: int = 1,
        may_cut: bool = True,
        root_name: Callable[[str], str] = str,
        host_root_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            policy: ``auto``, ``always_load`` or ``never``.
            counters: Where decisions are counted.
            shares: Part of all chunks on each root, by root_id.
            chunk_tokens: Tokens a chunk.
            chunk_bytes: Bytes a chunk, of all ranks that store a part of it.
            step_tokens: Tokens that the server computes in one step at most.
            prefill_limit: Of them, what one prompt may take; 0: all.
            log: Where decisions and rates are kept; None: nowhere. Closed with this.
            num_holders: Ranks that store a part of each chunk; where others load the same bytes they count once.
            may_cut: Whether a load that is cut leaves what it had loaded by then.
            root_name: What metrics and the log call a root, from its root_id.
            host_root_id: The root of the host tier, which ``shares`` lacks; empty: there is none.
            clock: Seconds, never backwards.
        """
        self._counters = counters
        self._log = log
        self._num_holders = num_holders
        self._clock = clock
        self._roots = list(shares)
        storage, prefill = rates_from_json(list(shares.values()), log.read_rates() if log else {})
        self.costs = Costs(
            storage=storage,
            prefill=prefill,
            chunk_tokens=chunk_tokens,
            chunk_bytes=chunk_bytes,
            step_tokens=step_tokens,
        )
        self._policy = LoadPolicy(policy, self.costs, prefill_limit=prefill_limit, clock=clock)
        self._may_cut = may_cut
        self._is_off = False
        self._root_name = root_name
        self._host_root_id = host_root_id
        self._slow_loads = SlowLoads(root_name, clock)
        self._loading: dict[str, Decision] = {}
        """Request -> the decision that its load is under way for."""
        self._rates_kept_at = clock()
        self._add_line({"schema": SCHEMA, "policy": policy, "prefill_limit": prefill_limit, **self._begun(shares)})

    @property
    def is_asking(self) -> bool:
        """Whether it wants to know of requests before the server asks about them."""
        return self._policy.name == "auto" and not self._is_off

    @property
    def is_hurried(self) -> bool:
        """Whether a request was held back since the last step: the next one should come at once."""
        return self._policy.is_hurried

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """A root was added to the volume, or removed: what is known of the others stays."""
        self._guard(lambda: self._set_shares(shares), None)

    def learn(self, hit: PrefixHit) -> None:
        """A request that waits, and what of it is stored."""
        self._guard(lambda: self._policy.learn(hit), None)

    def decide(self, hit: PrefixHit) -> int | None:
        """As LoadPolicy.decide()."""
        otherwise: int | None = 0 if self._policy.name == "never" else hit.num_stored_tokens
        return self._guard(lambda: self._policy.decide(hit), otherwise)

    def ordered(self, hit: PrefixHit, num_tokens: int) -> None:
        """As LoadPolicy.ordered()."""
        self._guard(lambda: self._policy.ordered(hit, num_tokens), None)

    def begin_step(self, step: int, parts: Sequence[Part]) -> list[str]:
        """A step is given out with these prompt tokens; returns the requests whose load is to be cut in it."""
        return self._guard(lambda: self._begin_step(step, parts), [])

    def end_step(self, report: StepReport, ended: Mapping[str, int]) -> None:
        """A step's report is here.

        Args:
            report: Of all ranks together.
            ended: Requests whose load is over -> tokens from the start of the prompt that are there.
        """
        self._guard(lambda: self._end_step(report, ended), None)

    def forget(self, request_id: str) -> None:
        """As LoadPolicy.forget()."""
        self._loading.pop(request_id, None)
        self._guard(lambda: self._policy.forget(request_id), None)

    def close(self) -> None:
        """Keep the rates, and close the log."""
        if self._log is not None:
            self._guard(self._keep_rates, None)
            self._log.close()

    def _begun(self, shares: Mapping[str, float]) -> dict[str, Any]:
        """What stands at the head of a log, besides the policy."""
        costs = self.costs
        return {
            "chunk_tokens": costs.chunk_tokens,
            "chunk_bytes": costs.chunk_bytes,
            "step_tokens": costs.step_tokens,
            "shares": list(shares.values()),
            **rates_to_json(costs.storage, costs.prefill),
        }

    def _set_shares(self, shares: Mapping[str, float]) -> None:
        rates = dict(zip(self._roots, self.costs.storage.roots, strict=True))
        self._roots = list(shares)
        self.costs.storage.change(list(shares.values()), [rates.get(root_id) for root_id in shares])
        self._policy.storage_changed()

    def _begin_step(self, step: int, parts: Sequence[Part]) -> list[str]:
        cuts = self._policy.to_cut() if self._may_cut else []
        self._policy.step_begun(step, parts)
        for reason, decision in self._policy.made:
            self._counters.add("rewarm_kv_decisions_total", 1, reason.value)
            if decision is not None and decision.num_load_tokens:
                self._loading[decision.request_id] = decision
        self._policy.made.clear()
        return cuts

    def _end_step(self, report: StepReport, ended: Mapping[str, int]) -> None:
        for root_id, flow in report.delivered.items():
            num_bytes, busy_s = flow.num_bytes * self._num_holders / report.num_ranks, flow.busy_s / report.num_ranks
            if root_id == self._host_root_id:
                self._policy.host_moved(num_bytes, busy_s)
                rate = self.costs.storage.host.bytes_a_s
            elif root_id in self._roots:
                root = self._roots.index(root_id)
                self._policy.moved(root, num_bytes, busy_s)
                rate = self.costs.storage.roots[root].bytes_a_s
            else:
                continue  # it was removed meanwhile
            self._counters.set("rewarm_root_read_bytes_per_second", rate, self._root_name(root_id))
        for request_id, num_parts in report.placed.items():
            self._policy.loaded(request_id, num_parts / report.num_ranks)
        for request_id, num_good_tokens in ended.items():
            self._policy.load_ended(request_id, num_good_tokens)
            decided = self._loading.pop(request_id, None)
            if decided is not None:
                self._note_times(
                    decided, report.times.get(request_id, LoadTimes()), self._num_holders / report.num_ranks
                )
        self._policy.step_ended(report.step, report.told_at)
        for decision in self._policy.ended:
            self._add_line(decision.to_json())
            self._count_ended(decision)
        self._policy.ended.clear()
        if self._clock() - self._rates_kept_at > KEEP_RATES_EVERY_S:
            self._keep_rates()

    def _note_times(self, decided: Decision, times: LoadTimes, share: float) -> None:
        """Where a load's time went, and what of its bytes came from memory; ``share`` of what was told counts."""
        decided.host_bytes = round(times.root_bytes.get(self._host_root_id, 0) * share)
        if self._slow_loads.ended(decided, times):
            self._counters.add("rewarm_kv_slow_loads_total")

    def _count_ended(self, decision: Decision) -> None:
        predicted_s, compute_s, actual_s = decision.predicted_s, decision.predicted_compute_s, decision.actual_s
        if predicted_s is None or compute_s is None or not actual_s or decision.was_cut:
            return
        add, reason = self._counters.add, decision.reason.value
        add("rewarm_kv_decisions_ended_total", 1, reason)
        add("rewarm_kv_decision_predicted_seconds_total", predicted_s, reason)
        add("rewarm_kv_decision_compute_seconds_total", compute_s, reason)
        add("rewarm_kv_decision_actual_seconds_total", actual_s, reason)
        (error,) = prediction_errors([decision])
        self._counters.observe("rewarm_kv_decision_error_ratio", error)

    def _keep_rates(self) -> None:
        self._rates_kept_at = self._clock()
        rates = rates_to_json(self.costs.storage, self.costs.prefill)
        if self._log is not None and (rates["prefill_s"] or any(rates["root_bytes_a_s"])):
            self._log.keep_rates(rates)
            self._add_line({"at": round(self._clock(), 6), **rates})

    def _add_line(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.add({"time": round(time.time(), 3), **line})

    def _guard(self, call: Callable[[], T], otherwise: T) -> T:
        if self._is_off:
            return otherwise
        try:
            return call()
        except Exception:
            # An exception here would end the server; a decision is worth less than that.
            self._is_off = True
            logger.exception("Rewarm: the load policy failed and is off: what is stored is loaded")
            return otherwise
