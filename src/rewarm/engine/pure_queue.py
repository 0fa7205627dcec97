"""What waits in the pure engine: loads before stores, and each root's transfers in a queue of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rewarm.engine.base import Priority

B = TypeVar("B")


@dataclass(slots=True)
class Job(Generic[B]):
    """One transfer of a batch."""

    batch: B
    index: int
    root: int
    needs_slot: bool
    sequence: int = 0
    slot: int = -1
    """The ring slot it has been given; -1: none."""


@dataclass(slots=True)
class _Lane(Generic[B]):
    """Of one root."""

    queues: dict[tuple[Priority, bool], deque[Job[B]]] = field(default_factory=dict)
    """(priority, whether a ring slot is needed) -> what waits."""
    num_running: int = 0
    num_slots: int = 0


class Lanes(Generic[B]):
    """The queues, and the ring's slots. The caller holds a lock.

    Of several roots the one with the least under way is next, so that all their devices work at once. Half of the
    workers and of the slots is set aside in equal parts, one for each root: one that hangs cannot take those of others.
    """

    def __init__(self, num_workers: int, num_slots: int) -> None:
        self._num_workers = num_workers
        self._num_slots = num_slots
        self._lanes: dict[int, _Lane[B]] = {}
        self._slot_roots: dict[int, int] = {}
        self.free_slots = list(range(num_slots))
        self._sequence = 0

    @property
    def num_taken_slots(self) -> int:
        """Slots that a read or its caller holds."""
        return len(self._slot_roots)

    def __len__(self) -> int:
        """Jobs that wait."""
        return sum(len(jobs) for lane in self._lanes.values() for jobs in lane.queues.values())

    def put(self, job: Job[B], priority: Priority) -> None:
        """Queue a job behind those of its root."""
        job.sequence, self._sequence = self._sequence, self._sequence + 1
        lane = self._lanes.setdefault(job.root, _Lane())
        lane.queues.setdefault((priority, job.needs_slot), deque()).append(job)

    def take(self) -> Job[B] | None:
        """The next job, with its slot; None: nothing can be started now. The caller tells ended() when it is over."""
        for priority in Priority:
            found = [(lane, jobs) for lane in self._lanes.values() for jobs in self._startable(lane, priority)]
            if found:
                lane, jobs = min(found, key=lambda one: (one[0].num_running, one[1][0].sequence))
                job = jobs.popleft()
                lane.num_running += 1
                if job.needs_slot:
                    job.slot = self.free_slots.pop()
                    self._slot_roots[job.slot] = job.root
                    lane.num_slots += 1
                return job
        return None

    def ended(self, job: Job[B]) -> None:
        """A job that was taken is over; its slot may still be held."""
        self._lanes[job.root].num_running -= 1

    def free(self, slot: int) -> None:
        """A slot is free again."""
        self._lanes[self._slot_roots.pop(slot)].num_slots -= 1
        self.free_slots.append(slot)

    def drop(self, batch: B) -> None:
        """Forget what waits of a batch."""
        for lane in self._lanes.values():
            for kind, jobs in lane.queues.items():
                lane.queues[kind] = deque(job for job in jobs if job.batch is not batch)

    def _startable(self, lane: _Lane[B], priority: Priority) -> list[deque[Job[B]]]:
        """Queues of a root whose first job can start."""
        lanes = self._lanes.values()
        part = self._num_workers // (2 * len(lanes))
        num_idle = self._num_workers - sum(one.num_running for one in lanes)
        if lane.num_running >= part and num_idle <= sum(max(0, part - one.num_running) for one in lanes):
            return []
        part = self._num_slots // (2 * len(lanes))
        num_reserved = 0 if lane.num_slots < part else sum(max(0, part - one.num_slots) for one in lanes)
        kinds = (False, True) if len(self.free_slots) > num_reserved else (False,)
        return [jobs for kind in kinds if (jobs := lane.queues.get((priority, kind)))]
