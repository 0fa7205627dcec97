"""A model server in simulated time, with the parts of vLLM's scheduler that matter to a policy.

In each step the prompts that are being computed take tokens first, oldest first; while some are left, waiting requests
are asked for in order of arrival, each at most once. A load takes no tokens. One step is in flight, or two (vLLM's
asynchronous scheduling): then the next one is given out when the oldest has ended and the other has just begun. What
ranks tell of loads comes with a step's output, and is as old as the step: it is of the time when the step was launched,
and of two in flight the second was launched when the first had just begun. A load that is ordered behind a running step
is put in place only when that has ended, and is read ahead only as far as the ring holds it. A step without tokens ends
when a load does, or after 5 ms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rewarm.bench.policy.world import Machine, Prompt, Root
from rewarm.errors import UsageError
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
    idle_at: list[float] = field(default_factory=list)
    """Steps in which nothing was computed or loaded though a request waited."""

    def makespan_s(self, prompts: Sequence[Prompt]) -> float:
        """From the first arrival of some prompts to the end of the last of them."""
        return max(self.end_s[prompt.name] for prompt in prompts) - min(prompt.arrival_s for prompt in prompts)

    def idle_share(self, prompts: Sequence[Prompt]) -> float:
        """Part of that in which nothing was computed or loaded though a request waited."""
        first_s = min(prompt.arrival_s for prompt in prompts)
        return sum(at_s >= first_s for at_s in self.idle_at) * EMPTY_STEP_S / self.makespan_s(prompts)


@dataclass(slots=True)
class _Live:
    prompt: Prompt
    position: int = 0
    """Tokens that are in place, or given out to a step."""
    num_decoding: int = 0
    """Tokens after the prompt that were given out to steps."""
    num_decoded: int = 0
    """Of them, those whose step has ended."""
    is_running: bool = False
    is_loaded: bool = False
    """Its load has ended and brought something: it is computed without being asked for again."""
    wanted: int = 0
    """Chunks of the load that is under way; 0: none is."""
    gate_s: float = 0.0
    """Nothing of it is in place before."""
    done: dict[int, float] = field(default_factory=dict)
    """Chunk -> when it was in place."""
    num_told: int = 0
    """Of those, chunks that the policy knows of."""
    cut_s: float | None = None
    """When its load was cut."""


@dataclass(slots=True)
class _Step:
    """One that was given out."""

    number: int
    parts: list[Part]
    decoding: list[str]
    end_s: float = 0.0
    moved: list[tuple[int, float, float]] = field(default_factory=list)
    """(root, chunks, busy seconds) that its report tells."""
    told_at_s: float = 0.0
    """What is in its report is of this time."""

    @property
    def has_work(self) -> bool:
        """Whether the device has something to do in it."""
        return bool(self.parts or self.decoding)


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
        self._coming: list[Prompt] = []
        self._steps: deque[_Step] = deque()
        self._device_free_s = 0.0
        self._outcome = Outcome()

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        """Serve all of them.

        Raises:
            UsageError: That takes too many steps.
        """
        self._coming = sorted(prompts, key=lambda prompt: prompt.arrival_s, reverse=True)
        for number in range(MAX_STEPS):
            while self._coming and self._coming[-1].arrival_s <= self._clock.now_s:
                self._arrive(self._coming.pop())
            if self._live:
                step = self._launch(number)
                self._steps.append(step)
                if len(self._steps) < self._machine.steps_in_flight and step.has_work:
                    continue
                while not step.has_work and len(self._steps) > 1:
                    self._finish(self._steps.popleft())
            elif not self._steps:
                if not self._coming:
                    return self._outcome
                self._clock.now_s = self._coming[-1].arrival_s
                continue
            self._finish(self._steps.popleft())
        raise UsageError(
            f"{len(self._live) + len(self._coming)} requests did not end in {MAX_STEPS:,} simulated steps",
            hint="fewer requests, or rates nearer to those of a machine",
        )

    def _arrive(self, prompt: Prompt) -> None:
        self._live[prompt.name] = _Live(prompt)
        self._policy.learn(self._hit(self._live[prompt.name]))

    def _hit(self, live: _Live) -> PrefixHit:
        tokens = live.prompt.num_chunks * self._machine.chunk_tokens
        return PrefixHit(live.prompt.name, live.prompt.num_tokens, 0, tokens, live.prompt.num_chunks)

    # Giving a step out.

    def _launch(self, number: int) -> _Step:
        parts, decoding = self._schedule()
        is_hurried = self._policy.is_hurried
        for name in self._policy.to_cut():
            self._cut(self._live[name])
        self._policy.step_begun(number, parts)
        step = _Step(number, parts, decoding)
        if step.has_work:
            compute_s = sum(self._machine.compute_s(self._live[name].prompt, begin, end) for name, begin, end in parts)
            begin_s = max(self._device_free_s, self._clock.now_s)
            step.end_s = self._device_free_s = begin_s + self._machine.base_s + compute_s
            self._advance(self._clock.now_s + self._machine.launch_s)
        else:
            self._advance(self._idle_end_s(is_hurried))
            step.end_s = self._clock.now_s
        self._take(step)
        return step

    def _schedule(self) -> tuple[list[Part], list[str]]:
        """(tokens of prompts, prompts that decode) of the next step."""
        budget = self._machine.step_tokens
        parts: list[Part] = []
        decoding: list[str] = []
        for live in self._running:
            if live.position == live.prompt.num_tokens:
                if live.num_decoding < self._machine.decode_tokens:
                    live.num_decoding += 1
                    decoding.append(live.prompt.name)
                    budget -= 1
                continue
            budget -= self._take_tokens(live, budget, parts)
        for live in self._live.values():
            if budget <= 0:
                break
            if live.is_running or live.wanted:
                continue
            if not live.is_loaded and not self._ask(live):
                continue
            live.is_running = True
            self._running.append(live)
            budget -= self._take_tokens(live, budget, parts)
        return parts, decoding

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

    def _take_tokens(self, live: _Live, budget: int, parts: list[Part]) -> int:
        begin = min(live.position, live.prompt.num_tokens - 1)  # the last token is computed in any case
        num_tokens = min(budget, self._machine.prefill_limit or budget, live.prompt.num_tokens - begin)
        if num_tokens > 0:
            parts.append((live.prompt.name, begin, begin + num_tokens))
            live.position = begin + num_tokens
        return num_tokens

    def _load(self, live: _Live, num_chunks: int) -> None:
        live.wanted = num_chunks
        live.gate_s = self._device_free_s
        for chunk in range(num_chunks):
            self._roots[self._machine.root_of(live.prompt.name, chunk)].add(live.prompt, chunk, live.gate_s)

    def _cut(self, live: _Live) -> None:
        for root in self._roots:
            root.cancel(live.prompt.name)
        live.cut_s = self._clock.now_s

    def _idle_end_s(self, is_hurried: bool) -> float:
        """The end of a step that computes nothing."""
        now_s = self._clock.now_s
        if self._steps:
            return now_s  # it ends while another one runs
        if not any(root.queue for root in self._roots):
            is_loading = any(live.wanted for live in self._live.values())
            if not is_loading:
                self._outcome.idle_at.append(now_s)
            return now_s + EMPTY_STEP_S
        chunk_s = self._machine.chunk_bytes / max(self._machine.root_bytes_a_s)
        # Slow ones need no finer steps.
        idle_s = EMPTY_STEP_S if is_hurried else max(IDLE_STEP_S, chunk_s / 4)
        next_arrival_s = self._coming[-1].arrival_s if self._coming else math.inf
        end_s = min(now_s + idle_s, *(root.next_end(now_s) for root in self._roots), next_arrival_s)
        return max(end_s, now_s + 1e-6)

    # Its end.

    def _advance(self, until_s: float) -> None:
        """Let time pass, if it has not passed yet."""
        for root in self._roots:
            for name, chunk, at_s in root.advance(self._clock.now_s, until_s):
                self._live[name].done[chunk] = at_s
        self._clock.now_s = max(self._clock.now_s, until_s)

    def _take(self, step: _Step) -> None:
        """What the ranks tell at this time goes with a step's output."""
        step.told_at_s = self._clock.now_s
        step.moved = [(number, *root.take()) for number, root in enumerate(self._roots)]

    def _finish(self, step: _Step) -> None:
        self._advance(step.end_s)
        for live in list(self._live.values()):
            self._report_load(live, step.told_at_s)
        for number, num_read, busy_s in step.moved:
            if busy_s > 0:
                self._policy.moved(number, num_read * self._machine.chunk_bytes, busy_s)
        self._policy.step_ended(step.number, step.told_at_s)
        for name, _, end in step.parts:
            if end == self._live[name].prompt.num_tokens:
                self._outcome.end_s[name] = self._clock.now_s
                if not self._machine.decode_tokens:
                    self._forget(name)
        for name in step.decoding:
            self._live[name].num_decoded += 1
            if self._live[name].num_decoded == self._machine.decode_tokens:
                self._forget(name)
        self._outcome.decisions += self._policy.ended
        self._policy.ended.clear()
        self._policy.made.clear()

    def _forget(self, name: str) -> None:
        self._policy.forget(name)
        self._running.remove(self._live.pop(name))

    def _report_load(self, live: _Live, told_at_s: float) -> None:
        if not live.wanted:
            return
        name = live.prompt.name
        placed = {chunk for chunk, at_s in live.done.items() if at_s <= told_at_s}
        has_all = len(placed) == live.wanted
        self._policy.loaded(name, len(placed) - live.num_told)
        live.num_told = len(placed)
        if not has_all and (live.cut_s is None or told_at_s < live.cut_s):
            return
        if has_all and told_at_s < max(live.done.values()) + self._machine.load_overhead_s:
            return
        good = next((chunk for chunk in range(live.wanted) if chunk not in placed), live.wanted)
        live.wanted, live.position = 0, good * self._machine.chunk_tokens
        live.is_loaded = good > 0
        self._policy.load_ended(name, live.position)
