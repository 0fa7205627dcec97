"""The best schedule of a few prompts when everything is known beforehand, as a measure for policies that know nothing.

Storage and compute are two machines; a prompt passes through the first with the part of its prefix that it loads, then
through the second with the rest. Every choice of parts on a grid and every order is tried, then each part is moved
chunk by chunk while that helps. Steps cost nothing for their boundaries here, and are asked for nothing, so that no
server can be expected to reach the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rewarm.bench.policy.world import Machine, Prompt

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


class _Job:
    """Seconds of one prompt for each number of chunks that it may load."""

    def __init__(self, machine: Machine, prompt: Prompt) -> None:
        self.arrival_s = prompt.arrival_s
        self.overhead_s = machine.load_overhead_s
        self.num_chunks = prompt.num_chunks
        num_roots = len(machine.root_bytes_a_s)
        self.loads: list[tuple[float, ...]] = [(0.0,) * num_roots]
        for chunk in range(prompt.num_chunks):
            root = machine.root_of(prompt.name, chunk)
            before = self.loads[-1]
            self.loads.append((*before[:root], before[root] + machine.read_s(prompt, chunk), *before[root + 1 :]))
        self.computes = []
        for chunk in range(prompt.num_chunks + 1):
            begin = min(chunk * machine.chunk_tokens, prompt.num_tokens - 1)
            steps = (prompt.num_tokens - begin) / machine.step_tokens
            self.computes.append(machine.compute_s(prompt, begin, prompt.num_tokens) + machine.base_s * min(1.0, steps))


def best_makespan_s(machine: Machine, prompts: Sequence[Prompt]) -> float:
    """Seconds from the first arrival until all KV is there, under the best schedule found."""
    jobs = [_Job(machine, prompt) for prompt in prompts]
    first_s = min(job.arrival_s for job in jobs)
    is_batch = all(job.arrival_s == first_s for job in jobs)
    best, best_counts, best_order = float("inf"), [0] * len(jobs), tuple(range(len(jobs)))
    for shares in itertools.product(GRID, repeat=len(jobs)):
        counts = [int(share * job.num_chunks) for share, job in zip(shares, jobs, strict=True)]
        for order in _orders(jobs, counts, is_batch=is_batch):
            end_s = _end_s(jobs, counts, order)
            if end_s < best:
                best, best_counts, best_order = end_s, counts, tuple(order)
    return _refine(jobs, best_counts, best_order, best) - first_s


def _orders(jobs: Sequence[_Job], counts: Sequence[int], *, is_batch: bool) -> Sequence[Sequence[int]]:
    """Johnson's order, the best for two machines where all is there from the start; else every order."""
    if not is_batch:
        return list(itertools.permutations(range(len(jobs))))
    loads = [max(job.loads[count]) for job, count in zip(jobs, counts, strict=True)]
    computes = [job.computes[count] for job, count in zip(jobs, counts, strict=True)]

    def key(index: int) -> tuple[int, float]:
        return (0, loads[index]) if loads[index] < computes[index] else (1, -computes[index])

    return [sorted(range(len(jobs)), key=key)]


def _end_s(jobs: Sequence[_Job], counts: Sequence[int], order: Sequence[int]) -> float:
    """When the last prompt is done if both lanes take them in this order."""
    roots_s = [0.0] * len(jobs[0].loads[0])
    compute_s = 0.0
    for index in order:
        job = jobs[index]
        ready_s = job.arrival_s
        for root, load_s in enumerate(job.loads[counts[index]]):
            if load_s:
                roots_s[root] = max(roots_s[root], job.arrival_s) + load_s
                ready_s = max(ready_s, roots_s[root] + job.overhead_s)
        compute_s = max(compute_s, ready_s) + job.computes[counts[index]]
    return compute_s


def _refine(jobs: Sequence[_Job], counts: list[int], order: Sequence[int], end_s: float) -> float:
    counts = list(counts)
    stride = max(1, max(job.num_chunks for job in jobs) // 4)
    while stride:
        has_gained = False
        for index, move in itertools.product(range(len(jobs)), (-stride, stride)):
            count = counts[index] + move
            if not 0 <= count <= jobs[index].num_chunks:
                continue
            tried = [*counts[:index], count, *counts[index + 1 :]]
            tried_s = _end_s(jobs, tried, order)
            if tried_s < end_s * (1 - 1e-9):
                end_s, counts, has_gained = tried_s, tried, True
        if not has_gained:
            stride //= 2
    return end_s
