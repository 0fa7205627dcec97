"""The policy: ``auto`` loads where that is faster, computes where that is, and uses both lanes where many wait.
``always_load`` and ``never`` do as they are called; they measure and predict all the same, so that a server tells what
``auto`` would have to go by.

Event-driven, with a clock that is passed in; no thread, no I/O, nothing that waits. docs/guides/policy.md says for
users what it does; the planner is in ``plan.py``, what is learned in ``rates.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewarm.kv.costs import Costs
from rewarm.kv.plan import MAX_PLANNED, TIE, Job, Lanes, lane_ends_s, spread
from rewarm.kv.policy import Decision, Part, PrefixHit, Reason
from rewarm.kv.rates import pairs_of
from rewarm.kv.underway import Ask, Underway

CUT_GAIN = 0.15
"""A load is cut where computing its rest ends at least this much sooner: predictions are wrong by about as much."""
MIN_CUT_GAIN_S = 0.01
PROBE_AFTER_S = 10.0
"""A lane that was not seen for so long is probed ..."""
PROBE_SHARE = 0.01
"""... once that costs no more than this part of what requests took since then, which all went the other way."""
PROBE_BYTES = 64 << 20
"""What a probe of storage loads at least, where so much is stored."""
PACE_CHANGE = 0.05
"""A plan is made anew when storage has become this much faster or slower."""
MIN_HOLD_GAIN_S = 0.015
"""A request is held back for loads behind it only where they would else wait this long: it costs an empty step."""
MIN_GROUP_S = 0.5
"""Requests that compute so long are held back for others that may come with them ..."""
QUIET_SHARE, QUIET_S = 0.003, 0.02
"""... until none has come for this part of what one computes, or for so long ..."""
GROUP_SHARE, GROUP_S = 0.01, 0.1
"""... or until it has waited for this. What comes once a long one is computed is asked for only when that is done: four
that came 5 ms apart took 1.25 times as long."""

_Answer = tuple[Reason, "float | None", "float | None", "float | None"]
"""Why, and the predicted seconds: loading all, computing all, as chosen."""


@dataclass(slots=True)
class _Unseen:
    """A lane since it last told something."""

    since: float
    work_s: float = 0.0
    """What requests have taken since then that went the other way."""


@dataclass(slots=True)
class _View:
    """What a plan was made from, kept up to date until the next one."""

    pace: float
    """Seconds a byte of a load."""
    backlog_s: float
    """What the server has taken on and not computed, as of ``at``."""
    at: float
    shares: dict[str, float]
    """Request -> the share of its stored prefix that is to be loaded."""
    to_load: set[str]
    """Requests that wait and are to be loaded."""
    waiting_s: float
    """What waiting requests have yet to compute, if the plan is followed."""
    is_single: bool
    """Whether there is only one request at all."""
    ends_s: dict[str, float] | None = None
    """Request that waits -> when it has its KV, if the plan is followed; None: not asked for yet."""


class LoadPolicy:
    """See the head of this file. Called in the server's thread only.

    A request passes through ``learn`` (its lookup is known, before the server asks), ``decide``, ``ordered`` and
    ``forget``; one whose load brought nothing is asked for again.
    """

    def __init__(
        self,
        name: str,
        costs: Costs,
        *,
        prefill_limit: int = 0,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            name: ``auto``, ``always_load`` or ``never``.
            costs: What is known of the server; learns.
            prefill_limit: Of the tokens of a step, what one prompt may take; 0: all.
            clock: Seconds, never backwards.
        """
        self.name = name
        self.made: list[tuple[Reason, Decision | None]] = []
        """Decisions since they were last taken; no Decision: the request has to wait. Emptied by the caller."""
        self.ended: list[Decision] = []
        """Decisions whose outcome is known; emptied by the caller."""
        self.is_hurried = False
        """Whether a request was held back since the last step: the next one should come at once."""
        self.costs = costs
        self._prefill_limit = prefill_limit or costs.step_tokens
        self._clock = clock
        self._waiting: dict[str, Ask] = {}
        self._underway = Underway(costs, clock)
        self._active = self._underway.active
        self._last_loaded = True
        self._unseen = {True: _Unseen(clock()), False: _Unseen(clock())}
        """Of storage, and of compute."""
        self._view: _View | None = None
        """None: to be made anew."""
        self._promised: dict[str, float] = {}
        """Requests that others were held back for in this pass, with their shares: whatever is planned meanwhile, they
        load, so that a server never waits for a load that is not ordered.
        """
        self._answers: dict[str, _Answer] = {}

    # What it is told.

    def learn(self, hit: PrefixHit) -> None:
        """A request that waits, and what of it is stored."""
        if hit.request_id not in self._waiting and hit.request_id not in self._active:
            self._waiting[hit.request_id] = Ask(hit, self._clock())
            self._view = None

    def ordered(self, hit: PrefixHit, num_tokens: int) -> None:
        """The server took the answer: it loads ``num_tokens``, or computes where that is 0."""
        ask = self._waiting.pop(hit.request_id, None) or Ask(hit, self._clock())
        ask.hit = hit
        self._underway.order(ask, num_tokens)
        if self._view is not None:
            self._view.to_load.discard(hit.request_id)
            rest_s = self._underway.rest_s(ask)
            self._view.backlog_s += rest_s
            self._view.waiting_s -= rest_s
        answer = self._answers.pop(hit.request_id, (Reason.NOT_STORED, None, None, None))
        if ask.was_cut:
            return
        ask.decision = self._decision(answer, ask)
        self.made.append((ask.decision.reason, ask.decision))
        if ask.decision.reason in (Reason.LOAD_FASTER, Reason.COMPUTE_FASTER):
            self._last_loaded = num_tokens > 0

    def step_begun(self, step: int, parts: Sequence[Part]) -> None:
        """A step was given out, with the prompt tokens that it computes."""
        self._underway.begin_step(step, parts)
        self._promised.clear()
        self.is_hurried = False

    def step_ended(self, step: int, told_at: float = math.inf) -> None:
        """Its results are here; what was told of loads with them is of that time, now at the latest."""
        now = self._clock()
        ended = self._underway.end_step(step, told_at)
        if ended is None:
            return
        parts, seconds = ended
        if not parts:
            return
        tokens = sum(end - begin for _, begin, end in parts)
        self.costs.prefill.observe(tokens, sum(pairs_of(begin, end) for _, begin, end in parts), seconds)
        if tokens >= self.costs.chunk_tokens:
            self._unseen[False] = _Unseen(now)
        self._view = None
        for request_id, _, end in parts:
            ask = self._active.get(request_id)
            if ask is not None:
                ask.position = max(ask.position, end)
                if ask.position >= ask.hit.num_request_tokens:
                    self._end(request_id, now)

    def moved(self, root: int, num_bytes: float, busy_s: float) -> None:
        """What a root delivered within ``busy_s`` seconds, as RootRate.observe() takes it."""
        self.costs.storage.roots[root].observe(num_bytes, busy_s)
        self._unseen[True] = _Unseen(self._clock())
        if self._view is not None:
            pace = self.costs.storage.seconds_a_byte() or 0.0
            if abs(pace - self._view.pace) > PACE_CHANGE * self._view.pace:
                self._view = None

    def host_moved(self, num_bytes: float, busy_s: float) -> None:
        """The same of the host tier."""
        before = self.costs.storage.host.bytes_a_s
        self.costs.storage.host.observe(num_bytes, busy_s)
        if abs(self.costs.storage.host.bytes_a_s - before) > PACE_CHANGE * before:
            self._view = None

    def storage_changed(self) -> None:
        """Chunks lie on other roots from now on."""
        self._view = None

    def loaded(self, request_id: str, num_chunks: float) -> None:
        """More chunks of a load are in place."""
        ask = self._active.get(request_id)
        if ask is not None and ask.is_loading:
            ask.chunks_left -= min(num_chunks, ask.chunks_left)

    def load_ended(self, request_id: str, num_good_tokens: int) -> None:
        """A load is over; this many tokens from the start of the prompt are there."""
        ask = self._active.get(request_id)
        if ask is None or not ask.is_loading:
            return
        if ask.decision is not None:
            ask.decision.load_s = self._clock() - ask.decision.at
            if ask.is_alone and num_good_tokens == ask.position:
                num_chunks = self.costs.chunks_of(ask.hit, ask.decision.num_load_tokens)
                self.costs.observe_load(ask.hit, num_chunks, ask.decision.load_s)
        ask.is_loading = False
        ask.position, ask.chunks_left = num_good_tokens, 0.0
        if not num_good_tokens:  # the server asks again
            self._waiting[request_id] = self._active.pop(request_id)
        self._view = None

    def forget(self, request_id: str) -> None:
        """The server has finished a request, or dropped it."""
        self._answers.pop(request_id, None)
        # A server may finish a request before it tells of the step that brought its last token.
        parts = self._underway.parts_of(request_id)
        ask = self._active.get(request_id)
        if ask is not None and any(end >= ask.hit.num_request_tokens for _, _, end in parts):
            self._end(request_id, self._clock())
            self._view = None
        if self._waiting.pop(request_id, None) or self._active.pop(request_id, None):
            self._view = None

    def _end(self, request_id: str, now: float) -> None:
        decision = self._active.pop(request_id).decision
        if decision is not None:
            decision.actual_s = now - decision.at
            self._unseen[not decision.num_load_tokens].work_s += decision.actual_s
            self.ended.append(decision)

    def _decision(self, answer: _Answer, ask: Ask) -> Decision:
        reason, load_s, compute_s, chosen_s = answer
        hit = ask.hit
        return Decision(
            hit.request_id,
            self._clock(),
            self._clock() - ask.seen_at,
            reason,
            hit.num_request_tokens,
            hit.num_resident_tokens,
            hit.num_stored_tokens,
            ask.position - hit.num_resident_tokens,
            round(ask.chunks_left * self.costs.chunk_bytes),
            load_s,
            compute_s,
            chosen_s,
        )

    # What it answers.

    def decide(self, hit: PrefixHit) -> int | None:
        """Tokens to load after the resident ones: 0, or up to num_stored_tokens where a chunk ends. None: ask again."""
        ask = self._waiting_ask(hit)
        if not hit.num_chunks or ask.was_cut:
            return 0
        pace = self.costs.pace()
        if pace is None:
            return self._decide_unmeasured(hit)
        view = self._look(pace)
        backlog_s = self._backlog_s(view)
        own_s = self.costs.compute_s(hit.num_resident_tokens, hit.num_request_tokens)
        load_s, compute_s = self._load_end_s(hit, hit.num_chunks, view, backlog_s), backlog_s + own_s
        if self.name != "auto":
            loads = self.name == "always_load"
            reason = Reason(self.name)
            self._answers[hit.request_id] = (reason, load_s, compute_s, load_s if loads else compute_s)
            return hit.num_stored_tokens if loads else 0
        share = self._promised.pop(hit.request_id, view.shares.get(hit.request_id, 0.0))
        num_chunks = planned = int(share * hit.num_chunks + 1e-9)
        if view.is_single:
            num_chunks = self._stay(num_chunks, hit, load_s, compute_s)
        num_chunks, reason = self._probe(num_chunks, hit, view, load_s, compute_s)
        if num_chunks < hit.num_chunks and self._should_hold(ask, view, own_s):
            ask.held_at = self._clock()
            self.is_hurried = True
            self._promised.update((name, view.shares[name]) for name in view.to_load)
            self.made.append((Reason.HOLD, None))
            return None
        if num_chunks == planned:
            ends_s = self._predict(view)
            chosen_s = ends_s.get(hit.request_id, compute_s) - (self._clock() - view.at)
        else:
            chosen_s = self._load_end_s(hit, num_chunks, view, backlog_s) if num_chunks else compute_s
        self._answers[hit.request_id] = (reason, load_s, compute_s, chosen_s)
        return self.costs.tokens_of(hit, num_chunks)

    def _should_hold(self, ask: Ask, view: _View, own_s: float) -> bool:
        """Whether a request that is to be computed is better asked for again: once, so that the loads of those behind
        it are ordered before it takes all tokens of a step; while others arrive; and as long as the step has next to
        no tokens for it.
        """
        has_loads_behind = len(view.to_load) > (ask.hit.request_id in view.to_load)
        if has_loads_behind and ask.held_at is None and own_s > MIN_HOLD_GAIN_S:
            return True
        if own_s > MIN_GROUP_S and all(other.is_loading for other in self._active.values()):
            now = self._clock()
            quiet_s = now - max(other.seen_at for other in self._waiting.values())
            if quiet_s < min(QUIET_SHARE * own_s, QUIET_S) and now - ask.seen_at < min(GROUP_SHARE * own_s, GROUP_S):
                return True
        taken = sum(
            min(self._prefill_limit, other.hit.num_request_tokens - other.position)
            for other in self._active.values()
            if not other.is_loading
        )
        return 0 < self.costs.step_tokens - taken < min(self.costs.step_tokens // 16, ask.hit.num_request_tokens)

    def _waiting_ask(self, hit: PrefixHit) -> Ask:
        self.learn(hit)
        ask = self._active.pop(hit.request_id, None)
        if ask is not None:  # preempted: it begins again
            ask.is_loading, ask.decision = False, None
            self._waiting[hit.request_id] = ask
            self._view = None
        ask = self._waiting[hit.request_id]
        if ask.hit != hit:
            ask.hit = hit
            self._view = None
        return ask

    def _decide_unmeasured(self, hit: PrefixHit) -> int | None:
        """One load and one computation tell of both lanes; whoever comes meanwhile waits for what they tell."""
        if self.name != "auto":
            self._answers[hit.request_id] = (Reason(self.name), None, None, None)
            return hit.num_stored_tokens if self.name == "always_load" else 0
        loads = [ask.is_loading for ask in self._active.values()]
        if any(loads) and not all(loads):
            self.made.append((Reason.HOLD, None))
            return None
        self._answers[hit.request_id] = (Reason.UNMEASURED, None, None, None)
        return 0 if any(loads) else hit.num_stored_tokens

    def _look(self, pace: float) -> _View:
        """The present view; made anew where something has changed."""
        if self._view is None:
            self._view = self._plan(pace)
        return self._view

    def _plan(self, pace: float) -> _View:
        backlog_s = sum(self._underway.rest_s(ask) for ask in self._active.values())
        view = _View(pace, backlog_s, self._clock(), {}, set(), 0.0, len(self._waiting) == 1)
        view.is_single &= not self._active
        hits, jobs, prefixes = [], [], set()
        for ask in itertools.islice(self._waiting.values(), MAX_PLANNED):
            hit = ask.hit
            compute_s = self.costs.compute_s(hit.num_resident_tokens, hit.num_request_tokens)
            if not hit.num_chunks or ask.was_cut:
                view.waiting_s += compute_s
                continue
            tail_s = self.costs.rest_s(hit, hit.num_chunks)
            if hit.prefix and hit.prefix in prefixes:
                view.waiting_s += tail_s  # the load of the one before it will serve it
                continue
            prefixes.add(hit.prefix)
            hits.append(hit)
            jobs.append(Job(self.costs.load_s(hit, hit.num_chunks) - self.costs.overhead_s, compute_s, tail_s))
        lanes = Lanes(
            self._underway.storage_s(pace),
            self._backlog_s(view) + view.waiting_s,
            self.costs.overhead_s,
            self._underway.rests_end_s(pace),
        )
        chosen = spread(jobs, lanes, lambda index, seconds: self.costs.split(hits[index], seconds))
        for hit, share in zip(hits, chosen, strict=True):
            view.shares[hit.request_id] = share
            view.waiting_s += self.costs.rest_s(hit, int(share * hit.num_chunks + 1e-9))
            if share > 0:
                view.to_load.add(hit.request_id)
        return view

    def _stay(self, num_chunks: int, hit: PrefixHit, load_s: float, compute_s: float) -> int:
        """Loading goes before computing; and nothing is gained by going to and fro between lanes that are as fast as
        each other.
        """
        if load_s <= compute_s or (self._last_loaded and load_s <= compute_s * (1 + TIE)):
            return hit.num_chunks
        return num_chunks

    def _probe(
        self, num_chunks: int, hit: PrefixHit, view: _View, load_s: float, compute_s: float
    ) -> tuple[int, Reason]:
        """The choice, turned where that costs little and tells of a lane that was not seen for a while; and why."""
        if not num_chunks:
            size = min(hit.num_chunks, -(-PROBE_BYTES // self.costs.chunk_bytes))
            if self._may_probe(self.costs.load_s(hit, size), storage=True):
                return size, Reason.PROBE_LOAD
            return 0, Reason.COMPUTE_FASTER if view.is_single else Reason.SPREAD_COMPUTE
        loss_s = compute_s - load_s
        if view.is_single and loss_s <= TIE * load_s and self._may_probe(loss_s, storage=False):
            return 0, Reason.PROBE_COMPUTE
        if num_chunks < hit.num_chunks:
            return num_chunks, Reason.SPLIT
        return num_chunks, Reason.LOAD_FASTER if view.is_single else Reason.SPREAD_LOAD

    def _may_probe(self, cost_s: float, *, storage: bool) -> bool:
        unseen = self._unseen[storage]
        return self._clock() - unseen.since >= PROBE_AFTER_S and cost_s <= PROBE_SHARE * unseen.work_s

    # Cutting.

    def to_cut(self) -> list[str]:
        """Requests whose load is to be ended now, since computing the rest ends sooner; each is named once.

        The load that was ordered last goes first: the others before it are served sooner, too.
        """
        if self.name != "auto":
            return []
        last = next((ask for ask in reversed(self._active.values()) if ask.is_loading and not ask.was_cut), None)
        pace = self.costs.pace()
        if last is None or pace is None:
            return []
        view = self._look(pace)
        lane_s = self._backlog_s(view) + view.waiting_s
        chunks_left = next(left for ask, left in self._underway.loads(pace) if ask is last)
        loaded = last.position - round(chunks_left * self.costs.chunk_tokens)
        rest_s = self.costs.compute_s(max(last.hit.num_resident_tokens, loaded), last.hit.num_request_tokens)
        end_s = max(self._underway.rests_end_s(pace), lane_s)
        lane_if_cut_s = lane_s - self._underway.rest_s(last) + rest_s
        end_if_cut_s = max(self._underway.rests_end_s(pace, without=last), lane_if_cut_s)
        if end_s - end_if_cut_s <= max(CUT_GAIN * end_s, MIN_CUT_GAIN_S):
            return []
        last.was_cut = True
        self.made.append((Reason.CUT, last.decision))
        if last.decision is not None:
            last.decision.was_cut = True
        return [last.hit.request_id]

    # Seconds.

    def _predict(self, view: _View) -> dict[str, float]:
        """When each request that waited has its KV, from the time of the plan on."""
        if view.ends_s is None:
            names, jobs = [], []
            for ask, ready_s in self._underway.load_ends_s(view.pace):
                names.append(ask.hit.request_id)
                jobs.append((ready_s, self._underway.rest_s(ask)))
            running_s = sum(self._underway.rest_s(ask) for ask in self._active.values() if not ask.is_loading)
            ready_s = self._underway.storage_s(view.pace)
            for name, ask in self._waiting.items():
                num_chunks = int(view.shares.get(name, 0.0) * ask.hit.num_chunks + 1e-9)
                if num_chunks:
                    ready_s += self.costs.load_s(ask.hit, num_chunks)
                names.append(name)
                jobs.append((ready_s if num_chunks else 0.0, self.costs.rest_s(ask.hit, num_chunks)))
                if len(names) >= 2 * MAX_PLANNED:
                    break
            elapsed_s = view.backlog_s - self._backlog_s(view)
            view.ends_s = dict(zip(names, lane_ends_s(max(0.0, running_s - elapsed_s), jobs), strict=True))
        return view.ends_s

    def _load_end_s(self, hit: PrefixHit, num_chunks: int, view: _View, backlog_s: float) -> float:
        ready_s = self._underway.storage_s(view.pace) + self.costs.load_s(hit, num_chunks)
        return max(ready_s, backlog_s) + self.costs.rest_s(hit, num_chunks)

    def _backlog_s(self, view: _View) -> float:
        """What the server has taken on and not computed, less what the step that runs has done of it."""
        return max(0.0, view.backlog_s - self._underway.running_s())
