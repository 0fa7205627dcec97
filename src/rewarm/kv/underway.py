"""What a server has under way, as far as is known: the steps it gave out, and the requests that load or compute.

What ranks tell of loads is old when it is heard: it comes with the output of a step, and is of the time when that step
was launched. What a load has brought since then is estimated. A load that was ordered behind a running step can put
nothing in place until that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewarm.kv.costs import Costs
from rewarm.kv.policy import Decision, Part, PrefixHit

_NEVER = float("-inf")


@dataclass(slots=True)
class Ask:
    """A request whose prompt is not all there."""

    hit: PrefixHit
    seen_at: float
    is_loading: bool = False
    position: int = 0
    """Tokens whose KV is there, or will be when the load ends."""
    chunks_left: float = 0.0
    """Of its load, when that was told last."""
    behind: int = 0
    """The step that was running when its load was ordered; 0: none was, or it has ended."""
    free_at: float = _NEVER
    """When that step ended."""
    held_at: float | None = None
    """When it was told to wait last."""
    is_alone: bool = False
    """Its load began when nothing else was under way, and nothing has come to be since."""
    was_cut: bool = False
    decision: Decision | None = None


class Underway:
    """See the head of this file."""

    def __init__(self, costs: Costs, clock: Callable[[], float]) -> None:
        """
        Args:
            costs: What is known of the server.
            clock: Seconds, never backwards.
        """
        self.active: dict[str, Ask] = {}
        """Loading or computing, in the order in which that began."""
        self._costs = costs
        self._clock = clock
        self._steps: dict[int, tuple[float, Sequence[Part]]] = {}
        self._last_end = _NEVER
        self._told_at = _NEVER

    # What it is told.

    def begin_step(self, step: int, parts: Sequence[Part]) -> None:
        """A step was given out, with the prompt tokens that it computes."""
        self._steps[step] = (self._clock(), parts)

    def end_step(self, step: int, told_at: float) -> tuple[Sequence[Part], float] | None:
        """Its results are here, with what ranks told at that time; its parts and its seconds, None for a step that
        nobody began. A rank's host may have another clock: a report is no older than its step, and no younger than now.
        """
        now = self._clock()
        begun = self._steps.pop(step, None)
        if begun is None:
            return None
        for old in [number for number in self._steps if number < step]:
            del self._steps[old]  # a step that never told its end
        started, parts = begun
        self._told_at = min(max(told_at, started), now)
        # With two steps in flight the second begins when the first has ended.
        seconds, self._last_end = now - max(started, self._last_end), now
        for ask in self.active.values():
            if 0 < ask.behind <= step:
                ask.behind, ask.free_at = 0, now
        return parts, seconds

    def order(self, ask: Ask, num_tokens: int) -> None:
        """A request begins to load so many tokens, or to compute."""
        hit = ask.hit
        self.active[hit.request_id] = ask
        ask.position = hit.num_resident_tokens + num_tokens
        ask.is_loading = num_tokens > 0
        ask.chunks_left = self._costs.chunks_of(hit, num_tokens)
        ask.behind = max((step for step, (_, parts) in self._steps.items() if parts), default=0)
        ask.free_at = self._clock()
        ask.is_alone = ask.is_loading and len(self.active) == 1
        if not ask.is_alone:
            for other in self.active.values():
                other.is_alone = False

    # What follows.

    def parts_of(self, request_id: str) -> list[Part]:
        """Of a request, the parts that are given out."""
        return [part for _, parts in self._steps.values() for part in parts if part[0] == request_id]

    def running_s(self) -> float:
        """How long the step that runs has been running; 0 where none does."""
        if not self._steps:
            return 0.0
        started = max(self._last_end, min(started for started, _ in self._steps.values()))
        return self._clock() - started

    def steps_s(self, last: int | None = None) -> float:
        """Until the steps that were given out have ended, those up to ``last``."""
        seconds = 0.0
        for step, (_, parts) in self._steps.items():
            if parts and (last is None or step <= last):
                own_s = sum(self._costs.prefill.seconds(begin, end) for _, begin, end in parts)
                seconds += self._costs.prefill.coefficients[0] + own_s
        return max(0.0, seconds - self.running_s())

    def rest_s(self, ask: Ask) -> float:
        """To compute what a load does not bring, or what is left of a computation."""
        return self._costs.compute_s(ask.position, ask.hit.num_request_tokens)

    def loads(self, pace: float) -> list[tuple[Ask, float]]:
        """Requests that load, in order, with the chunks that are left of each by now."""
        now = self._clock()
        read_until = self._told_at
        loads = []
        for ask in self.active.values():
            if not ask.is_loading:
                continue
            if ask.behind:
                read_until = now
            begin = max(read_until, ask.free_at)
            chunk_s = self._costs.chunk_s(ask.hit, pace)
            num_read = min(ask.chunks_left, max(0.0, now - begin) / chunk_s) if chunk_s else 0.0
            read_until = begin + num_read * chunk_s
            loads.append((ask, ask.chunks_left - num_read))
        return loads

    def load_ends_s(self, pace: float, without: Ask | None = None) -> list[tuple[Ask, float]]:
        """Requests that load, in order, with the time when each has its chunks."""
        ready_s = 0.0
        ends = []
        for ask, chunks_left in self.loads(pace):
            if ask is not without:
                if ask.behind:
                    ready_s = max(ready_s, self.steps_s(ask.behind))
                ready_s += chunks_left * self._costs.chunk_s(ask.hit, pace)
                ends.append((ask, ready_s))
        return ends

    def storage_s(self, pace: float) -> float:
        """When a load that is ordered now can begin."""
        ends = self.load_ends_s(pace)
        return max(ends[-1][1] if ends else 0.0, self.steps_s())

    def rests_end_s(self, pace: float, without: Ask | None = None) -> float:
        """When all loads that are under way have ended and what they leave is computed, if nothing else were."""
        end_s = 0.0
        for ask, ready_s in self.load_ends_s(pace, without):
            end_s = max(end_s, ready_s) + self.rest_s(ask)
        return end_s
