"""What a simulated server is made of: prompts, and a machine whose true rates no policy is told."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, with what of it is stored."""

    name: str
    arrival_s: float
    num_tokens: int
    num_chunks: int
    """Leading chunks that are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """True rates."""

    root_bytes_a_s: tuple[float, ...]
    shares: tuple[float, ...]
    """Part of all chunks that lies on each root."""
    base_s: float
    """Of each step that computes."""
    token_s: float
    pair_s: float
    """Of each (token, earlier token) pair."""
    chunk_tokens: int
    chunk_bytes: int
    step_tokens: int
    prefill_limit: int = 0
    """Tokens of a step that one prompt may take; 0: all."""
    load_overhead_s: float = 0.0
    steps_in_flight: int = 1
    """2: the server gives a step out while the one before it runs."""
    launch_s: float = 0.0
    """To give a step out that computes, with two in flight."""
    ring_chunks: int = 0
    """Chunks of each root that are read at most and not in place yet; 0: no bound."""
    decode_tokens: int = 0
    """Tokens that each request decodes after its prompt."""
    read_noise: float = 0.0
    """Spread of what a chunk takes to read: sigma of a lognormal factor."""
    compute_noise: float = 0.0
    """The same of what a prompt takes to compute."""
    changes: tuple[tuple[float, float], ...] = ()
    """(second, factor) in order: from then on storage delivers its rate times this."""
    seed: int = 0

    def _factor(self, sigma: float, *what: object) -> float:
        """The noise of one thing, the same in every run."""
        return math.exp(random.Random(repr((self.seed, *what))).gauss(0.0, sigma)) if sigma else 1.0

    def root_of(self, name: str, chunk: int) -> int:
        """The root that a chunk lies on."""
        return random.Random(repr((self.seed, "root", name, chunk))).choices(range(len(self.shares)), self.shares)[0]

    def compute_s(self, prompt: Prompt, begin: int, end: int) -> float:
        """To compute tokens of a prompt, without what a step costs by itself."""
        pairs = (end - begin) * (begin + end) / 2
        return (self.token_s * (end - begin) + self.pair_s * pairs) * self._factor(
            self.compute_noise, "compute", prompt.name
        )

    def read_s(self, prompt: Prompt, chunk: int) -> float:
        """To read a chunk while storage keeps its first rate."""
        root = self.root_of(prompt.name, chunk)
        return self.chunk_bytes / self.root_bytes_a_s[root] * self._factor(self.read_noise, "read", prompt.name, chunk)

    def speed(self, at_s: float) -> tuple[float, float]:
        """(factor of storage's rate at a time, until when it holds)."""
        index = bisect.bisect_right(self.changes, (at_s, math.inf))
        until = self.changes[index][0] if index < len(self.changes) else math.inf
        return (self.changes[index - 1][1] if index else 1.0), until


@dataclass(slots=True)
class _Read:
    prompt: str
    chunk: int
    total_s: float
    left_s: float
    """Of reading at the root's first rate."""
    gate_s: float
    """It is in place no sooner."""


@dataclass(slots=True)
class Root:
    """A queue that is read in order; as many chunks at a time as ``width``, which share the rate."""

    machine: Machine
    width: int = 1
    queue: deque[_Read] = field(default_factory=deque)
    busy_s: float = 0.0
    """Since it was last asked."""
    num_read: float = 0.0
    """Chunks since it was last asked, those begun by what is done of them."""
    _held: list[float] = field(default_factory=list)
    """When chunks that are read can be put in place, of those that cannot yet."""

    def next_end(self, now_s: float) -> float:
        """When the next chunk is read if nothing is added."""
        reads = self._reads(now_s)
        if not reads:
            return min(self._held, default=math.inf)
        need_s = min(read.left_s for read in reads) * len(reads)
        while True:
            speed, until = self.machine.speed(now_s)
            if now_s + need_s / speed <= until:
                return now_s + need_s / speed
            need_s -= (until - now_s) * speed
            now_s = until

    def advance(self, begin_s: float, end_s: float) -> list[tuple[str, int, float]]:
        """Read from one time to another; (prompt, chunk, when it is in place) of what was read."""
        ended = []
        now_s = begin_s
        while self.queue and now_s < end_s:
            stop_s = min(self.next_end(now_s), end_s, self.machine.speed(now_s)[1])
            reads = self._reads(now_s)
            done_s = (stop_s - now_s) * self.machine.speed(now_s)[0] / max(1, len(reads))
            self.busy_s += stop_s - now_s if reads else 0.0
            for read in reads:
                self.num_read += min(done_s, read.left_s) / read.total_s
                read.left_s -= done_s
                if read.left_s <= 1e-12:
                    self.queue.remove(read)
                    ended.append((read.prompt, read.chunk, max(stop_s, read.gate_s)))
                    if read.gate_s > stop_s:
                        self._held.append(read.gate_s)
            now_s = stop_s
        return ended

    def _reads(self, now_s: float) -> list[_Read]:
        """What is being read: no more than the ring has room for."""
        if self._held:
            self._held = [gate_s for gate_s in self._held if gate_s > now_s]
        room = self.width
        if self.machine.ring_chunks:
            room = min(room, self.machine.ring_chunks - len(self._held))
        return list(itertools.islice(self.queue, max(0, room)))

    def add(self, prompt: Prompt, chunk: int, gate_s: float = 0.0) -> None:
        """Queue a chunk."""
        read_s = self.machine.read_s(prompt, chunk)
        self.queue.append(_Read(prompt.name, chunk, read_s, read_s, gate_s))

    def cancel(self, name: str) -> None:
        """Drop what is queued for a prompt."""
        self.queue = deque(read for read in self.queue if read.prompt != name)

    def take(self) -> tuple[float, float]:
        """(chunks, busy seconds) since the last call."""
        taken = self.num_read, self.busy_s
        self.num_read = self.busy_s = 0.0
        return taken
