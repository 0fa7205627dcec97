"""A model server in simulated time, with the parts of vLLM's scheduler that matter to a policy.

In each step the prompts that are being computed take tokens first, oldest first; while some are left, waiting requests
are asked for in order of arrival, each at most once. A load takes no tokens and its end is seen at the end of a step.
A step without tokens ends when a load does, or after 5 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rewarm.bench.policy.world import Machine, Prompt, Root
from rewarm.kv.choose import LoadPolicy
from rewarm.kv.policy import Decision, Part, PrefixHit

IDLE_STEP_S = 0.005
EMPTY_STEP_S = 0.001
"""A step with nothing at all to do: every request was told to wait."""
MAX_STEPS = 200_000


class Clock:
    """Time that moves when the simulation says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Outcome:
    """What became of a run."""

    end_s: dict[str, float] = field(default_factory=dict)
    """Prompt -> when all of it was there."""
    decisions: list[Decision] = field(default_factory=list)
    num_waits: int = 0
    """Answers that were None."""
    idle_waits: int = 0
    """Steps in which nothing was computed or loaded though a request waited."""

    def makespan_s(self, prompts: Sequence[Prompt]) -> float:
        """From the first arrival of some prompts to the end of the last of them."""
        return max(self.end_s[prompt.name] for prompt in prompts) - min(prompt.arrival_s for prompt in prompts)


@dataclass(slots=True)
class _Live:
    prompt: Prompt
    position: int = 0
    is_running: bool = False
    is_loaded: bool = False
    """Its load has ended and brought something: it is computed without being asked for again."""
    wanted: int = 0
    """Chunks of the load that is under way; 0: none is."""
    done: set[int] = field(default_factory=set)
    num_told: int = 0
    """Of those, chunks that the policy knows of."""
    ended_s: float = 0.0
    is_cut: bool = False


class Server:
    """Runs prompts through a policy."""

    def __init__(self, machine: Machine, policy: LoadPolicy, clock: Clock, *, width: int = 4) -> None:
        """
        Args:
            machine: The truth.
            policy: What is tried; made with the same clock.
            clock: Moved by run().
            width: Chunks that a root reads at a time.
        """
        self._machine = machine
        self._policy = policy
        self._clock = clock
        self._roots = [Root(machine, width) for _ in machine.root_bytes_a_s]
        self._live: dict[str, _Live] = {}
        self._running: list[_Live] = []
        self._is_hurried = False
        self._outcome = Outcome()

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        """Serve all of them."""
        coming = sorted(prompts, key=lambda prompt: prompt.arrival_s, reverse=True)
        for step in range(MAX_STEPS):
            while coming and coming[-1].arrival_s <= self._clock.now_s:
                self._arrive(coming.pop())
            if not self._live:
                if not coming:
                    return self._outcome
                self._clock.now_s = coming[-1].arrival_s
                continue
            parts = self._schedule()
            self._is_hurried = self._policy.is_hurried
            for name in self._policy.to_cut():
                self._cut(self._live[name])
            self._policy.step_begun(step, parts)
            self._pass_time(parts, coming[-1].arrival_s if coming else math.inf)
            self._report(step, parts)
        raise RuntimeError(f"{len(self._live)} requests did not end in {MAX_STEPS} steps")

    def _arrive(self, prompt: Prompt) -> None:
        self._live[prompt.name] = _Live(prompt)
        self._policy.learn(self._hit(self._live[prompt.name]))

    def _hit(self, live: _Live) -> PrefixHit:
        tokens = live.prompt.num_chunks * self._machine.chunk_tokens
        return PrefixHit(live.prompt.name, live.prompt.num_tokens, 0, tokens, live.prompt.num_chunks)

    def _schedule(self) -> list[Part]:
        budget = self._machine.step_tokens
        parts: list[Part] = []
        for live in self._running:
            budget -= self._take(live, budget, parts)
        for live in self._live.values():
            if budget <= 0:
                break
            if live.is_running or live.wanted:
                continue
            if not live.is_loaded and not self._ask(live):
                continue
            live.is_running = True
            self._running.append(live)
            budget -= self._take(live, budget, parts)
        return parts

    def _ask(self, live: _Live) -> bool:
        """Whether a request is to be computed now."""
        hit = self._hit(live)
        num_tokens = self._policy.decide(hit)
        if num_tokens is None:
            self._outcome.num_waits += 1
            return False
        self._policy.ordered(hit, num_tokens)
        if num_tokens:
            self._load(live, num_tokens // self._machine.chunk_tokens)
        return not num_tokens

    def _take(self, live: _Live, budget: int, parts: list[Part]) -> int:
        begin = min(live.position, live.prompt.num_tokens - 1)  # the last token is computed in any case
        num_tokens = min(budget, self._machine.prefill_limit or budget, live.prompt.num_tokens - begin)
        if num_tokens > 0:
            parts.append((live.prompt.name, begin, begin + num_tokens))
        return num_tokens

    def _load(self, live: _Live, num_chunks: int) -> None:
        live.wanted = num_chunks
        for chunk in range(num_chunks):
            self._roots[self._machine.root_of(live.prompt.name, chunk)].add(live.prompt, chunk)

    def _cut(self, live: _Live) -> None:
        for root in self._roots:
            root.cancel(live.prompt.name)
        live.is_cut = True

    def _pass_time(self, parts: Sequence[Part], next_arrival_s: float) -> None:
        now_s = self._clock.now_s
        if parts:
            compute_s = sum(self._machine.compute_s(self._live[name].prompt, begin, end) for name, begin, end in parts)
            end_s = now_s + self._machine.base_s + compute_s
        elif any(root.queue for root in self._roots):
            chunk_s = self._machine.chunk_bytes / max(self._machine.root_bytes_a_s)
            idle_s = (
                EMPTY_STEP_S if self._is_hurried else max(IDLE_STEP_S, chunk_s / 4)
            )  # slow ones need no finer steps
            end_s = min(now_s + idle_s, *(root.next_end(now_s) for root in self._roots), next_arrival_s)
            end_s = max(end_s, now_s + 1e-6)
        else:
            end_s = now_s + EMPTY_STEP_S
            is_loading = any(live.wanted for live in self._live.values())
            self._outcome.idle_waits += not is_loading
        for root in self._roots:
            for name, chunk, at_s in root.advance(now_s, end_s):
                self._live[name].done.add(chunk)
                self._live[name].ended_s = at_s
        self._clock.now_s = end_s

    def _report(self, step: int, parts: Sequence[Part]) -> None:
        for number, root in enumerate(self._roots):
            num_read, busy_s = root.take()
            if busy_s > 0:
                self._policy.moved(number, num_read * self._machine.chunk_bytes, busy_s, ran_dry=False)
        for live in list(self._live.values()):
            self._report_load(live)
        self._policy.step_ended(step)
        for name, _, end in parts:
            live = self._live[name]
            live.position = end
            if end == live.prompt.num_tokens:
                self._outcome.end_s[name] = self._clock.now_s
                self._policy.forget(name)
                self._running.remove(self._live.pop(name))
        self._outcome.decisions += self._policy.ended
        self._policy.ended.clear()
        self._policy.made.clear()

    def _report_load(self, live: _Live) -> None:
        if not live.wanted:
            return
        name = live.prompt.name
        has_all = len(live.done) == live.wanted
        if not has_all and not live.is_cut:
            self._policy.loaded(name, len(live.done) - live.num_told)
            live.num_told = len(live.done)
            return
        if has_all and self._clock.now_s < live.ended_s + self._machine.load_overhead_s:
            return
        good = next((chunk for chunk in range(live.wanted) if chunk not in live.done), live.wanted)
        live.wanted, live.position = 0, good * self._machine.chunk_tokens
        live.is_loaded = good > 0
        self._policy.load_ended(name, live.position)
