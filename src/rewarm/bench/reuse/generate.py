"""Reuse traces by rule: chats, documents that people ask about, coding agents. The same seed gives the same trace.

A session is a stream of tokens that grows: a shared beginning (a system prompt, a document), then turns. A request asks
for the whole stream so far; what it answers is appended. Numbers and where they come from:

- Turns of a chat: geometric, mean 3.5 (ShareGPT has 3.5, WildChat 2.5, ShareChat 4.6: arXiv 2512.17843, table 1).
- Answers: log-normal, mean 340 tokens (Mooncake's conversation trace: 343 on average; FAST'25, trace release).
- Think time: log-normal, median 100 s, and one in ten pauses is of hours. About 80 % of reuses then come within ten
  minutes (arXiv 2506.02634, chats of a cloud provider).
- A file or a long paste in the first message of every third chat, median 8,000 tokens (assumed): requests have 7,600
  tokens on average with it. Mooncake's conversation trace has 12,000.
- System prompts: Zipf over a few dozen, since reuse is skewed: 10 % of the blocks have 77 % of it (arXiv 2506.02634).
- Documents: Zipf(0.8) over thousands, median 10,000 tokens, 1 to 3 questions a visit (assumed; LooGLE and other
  long-document sets have a few questions a document).
- Coding agents: sessions of about 10 requests by a person, each of about 9 steps; a step appends 800 tokens in the
  median and has a heavy tail; 520 tokens of output; tools answer in seconds, people in minutes; contexts up to 128 Ki
  tokens, then summed up and begun anew (TraceLab, arXiv 2606.30560 and tracelab.cs.washington.edu). They begin with
  16,000 tokens of system prompt and tools, the same for all users of a version.
- Arrivals: Poisson, three times as many at the day's peak as at night (assumed).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from rewarm.bench.reuse.trace import BLOCK_TOKENS, Trace, TraceRequest, merged
from rewarm.errors import UsageError
from rewarm.inputs import shown

DAY_S = 86_400.0
MAX_SCALE = 1000.0
_PEAK = 0.5
"""Arrivals swing by this around their mean."""
_LAST_THINK_S = 12 * 3600.0


class _Stream:
    """The tokens of one session, as ids of its full blocks."""

    def __init__(self, ids: Iterator[int], beginning: Sequence[int] = ()) -> None:
        self._ids = ids
        self.blocks = list(beginning)
        self.num_tokens = len(beginning) * BLOCK_TOKENS

    def append(self, num_tokens: int) -> None:
        """Grow; blocks that become full get new ids."""
        self.num_tokens += num_tokens
        while len(self.blocks) < self.num_tokens // BLOCK_TOKENS:
            self.blocks.append(next(self._ids))

    def ask(self, time_s: float, output_tokens: int) -> TraceRequest:
        """The request for all of it; its answer is appended."""
        blocks, input_tokens = tuple(self.blocks), self.num_tokens
        self.append(output_tokens)
        return TraceRequest(time_s, input_tokens, output_tokens, blocks, tuple(self.blocks[len(blocks) :]))


class _Generator:
    """Draws from the distributions of the module's docstring."""

    def __init__(self, seed: int, days: float) -> None:
        self.random = random.Random(seed)
        self.seconds = days * DAY_S
        self.ids = count()

    def lognormal(self, median: float, sigma: float, most: float = math.inf) -> float:
        """Of a median and the deviation of its logarithm."""
        return min(most, self.random.lognormvariate(math.log(median), sigma))

    def tokens(self, median: float, sigma: float, most: int) -> int:
        """At least one."""
        return max(1, round(self.lognormal(median, sigma, most)))

    def geometric(self, mean: float) -> int:
        """1, 2, 3 ... with this mean."""
        return 1 + int(math.log(1 - self.random.random()) / math.log(1 - 1 / mean)) if mean > 1 else 1

    def arrivals(self, per_day: float) -> Iterator[float]:
        """Times of a Poisson process that follows the day."""
        time_s, greatest = 0.0, per_day / DAY_S * (1 + _PEAK)
        while (time_s := time_s + self.random.expovariate(greatest)) < self.seconds:
            rate = 1 + _PEAK * math.sin(2 * math.pi * time_s / DAY_S)
            if self.random.random() * (1 + _PEAK) < rate:
                yield time_s

    def think_s(self) -> float:
        """Until a person goes on."""
        if self.random.random() < 0.1:
            return min(_LAST_THINK_S, self.random.expovariate(1 / (3 * 3600)))
        return self.lognormal(100, 1.1)

    def new_blocks(self, num_tokens: int) -> list[int]:
        """Blocks of a text that several sessions begin with."""
        return [next(self.ids) for _ in range(num_tokens // BLOCK_TOKENS)]


class _Popular:
    """N texts, chosen by Zipf's law."""

    def __init__(self, generator: _Generator, texts: list[list[int]], exponent: float) -> None:
        self._random, self._texts = generator.random, texts
        self._weights = list(accumulate(1 / rank**exponent for rank in range(1, len(texts) + 1)))

    def choose(self) -> list[int]:
        """One of them."""
        return self._random.choices(self._texts, cum_weights=self._weights)[0]


def _prompts(generator: _Generator, number: int, median: float, exponent: float) -> _Popular:
    texts = [generator.new_blocks(generator.tokens(median, 0.7, 16_384)) for _ in range(number)]
    return _Popular(generator, texts, exponent)


def _chats(generator: _Generator, per_day: float) -> Iterator[TraceRequest]:
    prompts = _prompts(generator, 40, 1500, 1.0)
    for start_s in generator.arrivals(per_day):
        time_s, stream = start_s, _Stream(generator.ids, prompts.choose())
        if generator.random.random() < 0.33:
            stream.append(generator.tokens(8000, 1.0, 100_000))
        for _ in range(generator.geometric(3.5)):
            stream.append(generator.tokens(80, 1.2, 8000))
            yield stream.ask(time_s, generator.tokens(240, 0.85, 4000))
            time_s += generator.think_s()


def _documents(generator: _Generator, per_day: float) -> Iterator[TraceRequest]:
    prompt = generator.new_blocks(1024)
    texts = [[*prompt, *generator.new_blocks(generator.tokens(10_000, 0.9, 120_000))] for _ in range(3000)]
    popular = _Popular(generator, texts, 0.8)
    for start_s in generator.arrivals(per_day):
        time_s, stream = start_s, _Stream(generator.ids, popular.choose())
        for _ in range(generator.geometric(1.8)):
            stream.append(generator.tokens(60, 0.8, 2000))
            yield stream.ask(time_s, generator.tokens(240, 0.85, 4000))
            time_s += generator.think_s()


_CONTEXT_TOKENS = 131_072
_SUMMARY_TOKENS = 6000


def _agents(generator: _Generator, per_day: float) -> Iterator[TraceRequest]:
    versions = _Popular(generator, [generator.new_blocks(16_384) for _ in range(4)], 1.0)
    for start_s in generator.arrivals(per_day):
        beginning = versions.choose()
        time_s, stream = start_s, _Stream(generator.ids, beginning)
        stream.append(generator.tokens(3000, 1.0, 30_000))  # the repository's own instructions and state
        for _ in range(generator.geometric(9.6)):
            stream.append(generator.tokens(120, 1.0, 8000))
            for _ in range(generator.geometric(8.8)):
                output_tokens = generator.tokens(300, 1.0, 8000)
                if stream.num_tokens + output_tokens > _CONTEXT_TOKENS:
                    stream = _Stream(generator.ids, beginning)
                    stream.append(_SUMMARY_TOKENS)
                yield stream.ask(time_s, output_tokens)
                stream.append(generator.tokens(800, 1.3, 30_000))
                time_s += output_tokens / 60 + generator.lognormal(2, 1.5, 600)
            time_s += generator.think_s()


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kind of trace, and how much of it fills a bench of a few minutes."""

    make: Callable[[_Generator, float], Iterator[TraceRequest]]
    per_day: float
    """Sessions."""
    days: float


RECIPES = {
    "chat": Recipe(_chats, 4000, 2.0),
    "documents": Recipe(_documents, 5000, 2.0),
    "agents": Recipe(_agents, 60, 2.0),
}


def generate(kind: str, *, seed: int = 1, scale: float = 1.0) -> Trace:
    """A trace of one kind.

    Args:
        kind: chat, documents or agents.
        seed: Of all that is drawn.
        scale: Sessions a day as a multiple of the recipe's.
    Raises:
        UsageError: No such kind; a scale that is no number above 0, and at most 1000, or so small that nobody asks.
    """
    if kind not in RECIPES:
        raise UsageError(f"no trace is called {shown(kind)}", hint=f"one of: {', '.join(RECIPES)}")
    if not 0 < scale <= MAX_SCALE:  # of a number that is none, nothing holds
        raise UsageError(f"--scale is {scale:g}", hint=f"above 0, at most {MAX_SCALE:g}")
    recipe = RECIPES[kind]
    generator = _Generator(seed, recipe.days)
    made = merged(kind, recipe.make(generator, recipe.per_day * scale))
    if made.seconds <= 0 or not any(request.input_blocks for request in made.requests):
        raise UsageError(f"--scale {scale:g} leaves no request of this trace", hint="like 0.1")
    return made
