"""What a namespace's load, store and probe give back."""

from __future__ import annotations

import errno
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum

from rewarm.engine.base import Completion, Times
from rewarm.errors import BusyError, RewarmError


class Outcome(IntEnum):
    """How a load of one record ended, worst last. Only HIT delivered a byte."""

    HIT = 0
    MISS = 1
    """No such record."""
    DAMAGED = 2
    """The file's bytes are not the record's: the same as a miss to the caller, and a counter."""
    IO_ERROR = 3
    TIMEOUT = 4
    """Given up at the deadline, or cancelled."""


_OUTCOMES = {
    0: Outcome.HIT,
    errno.ENOENT: Outcome.MISS,
    errno.EBADMSG: Outcome.DAMAGED,
    errno.ETIMEDOUT: Outcome.TIMEOUT,
    errno.ECANCELED: Outcome.TIMEOUT,
}


_FINAL = {Outcome.HIT, Outcome.TIMEOUT}
"""Nothing is looked for elsewhere after these: it is there, or there is no time left."""


def outcome_of(result: int) -> Outcome:
    """What an engine's result means for a record."""
    return _OUTCOMES.get(result, Outcome.IO_ERROR)


Note = Callable[[Sequence[tuple[int, int]]], None]
"""Learns the (index, result) of transfers that ended."""
Again = Callable[[Sequence[int]], "Sequence[Part]"]
"""Looks for records on their next roots where the last one had none; those that have no next root are in no part."""


class Part:
    """The transfers of a handle that one completion carries."""

    def __init__(
        self, completion: Completion, indices: Sequence[int], note: Note, root: int = 0, *, is_copy: bool = False
    ) -> None:
        """
        Args:
            completion: Carries the transfers.
            indices: Of the handle's records, one for each transfer.
            note: Called with what ended.
            root: Number of the root that they are read from.
            is_copy: What cannot be read here is looked for elsewhere, whatever is wrong with it.
        """
        self.completion = completion
        self.root = root
        self.indices = indices
        self.note = note
        self.is_copy = is_copy

    def may_be_elsewhere(self, result: int) -> bool:
        """Whether another root may have the record of a transfer that ended like this."""
        return result == errno.ENOENT or (self.is_copy and outcome_of(result) not in _FINAL)


class _Handle:
    """Several completions seen as one. One thread calls it."""

    def __init__(self, count: int, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self._results = [errno.ENOENT] * count
        self._taken: list[int] = []
        self._epoll: select.epoll | None = None
        self._may_grow = False

    def done(self) -> bool:
        """True once no I/O can touch the caller's memory any more."""
        while True:
            num_parts, is_done = len(self._parts), self._are_done()
            self._collect()
            # What ended may go on elsewhere; and what ended just now was taken: nothing would tell of it again.
            if num_parts == len(self._parts) and is_done == self._are_done():
                return is_done

    def _are_done(self) -> bool:
        return all(part.completion.done() for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done, without the GIL. Returns done()."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for part in self._parts:
            if not part.completion.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
            self._collect()
        return True

    def cancel(self) -> None:
        """End what has not ended, by the rules of engine.base.Completion.cancel."""
        for part in self._parts:
            part.completion.cancel()

    def fileno(self) -> int:
        """A descriptor that is readable when something ended; -1: nothing is under way. Closed with the handle."""
        if len(self._parts) <= 1 and not self._may_grow:
            return self._parts[0].completion.fileno() if self._parts else -1
        if self._epoll is None:
            self._epoll = select.epoll()
            for part in self._parts:
                self._epoll.register(part.completion.fileno(), select.EPOLLIN)
        return self._epoll.fileno()

    def _collect(self) -> None:
        for part in self._parts:  # grows meanwhile where records are looked for elsewhere
            indices = part.indices
            ended = [(indices[position], result) for position, result in part.completion.take()]
            if ended:
                part.note(ended)
                elsewhere = self._look_elsewhere(part, ended)
                for index, result in ended:
                    if index not in elsewhere:
                        self._results[index] = result
                        self._taken.append(index)

    def _look_elsewhere(self, _part: Part, _ended: Sequence[tuple[int, int]]) -> Collection[int]:
        """Those of a part's transfers that ended that go on in another part."""
        return ()

    def _final(self) -> list[int]:
        if not self.done():
            raise BusyError("the batch is not done", hint="wait() for it first")
        self._collect()
        return self._results


class LoadHandle(_Handle):
    """A load of N records that is under way."""

    def __init__(self, count: int, parts: Sequence[Part], refused: Sequence[int], again: Again | None = None) -> None:
        """
        Args:
            count: Records asked for.
            parts: Those that are being read.
            refused: Indices that no root could be asked for now; they end as IO_ERROR.
            again: Looks for records on other roots than the first one; None: nobody knows of any that may be there.
        """
        super().__init__(count, parts)
        self._again = again
        self._may_grow = again is not None
        for index in refused:
            self._results[index] = errno.EIO
        self._taken += refused
        self._roots = [-1] * count
        for part in parts:
            for index in part.indices:
                self._roots[index] = part.root

    def cancel(self) -> None:
        """See _Handle; nothing is looked for elsewhere after that."""
        self._again = None
        super().cancel()

    def _look_elsewhere(self, part: Part, ended: Sequence[tuple[int, int]]) -> Collection[int]:
        missed = [index for index, result in ended if part.may_be_elsewhere(result)]
        if not missed or self._again is None:
            return ()
        elsewhere: set[int] = set()
        for other in self._again(missed):
            for index in other.indices:
                self._roots[index] = other.root
                elsewhere.add(index)
            self._parts.append(other)
            if self._epoll is not None:
                self._epoll.register(other.completion.fileno(), select.EPOLLIN)
        return elsewhere

    def root_of(self, index: int) -> int:
        """Number of the root that a record is read from; -1: none was asked."""
        return self._roots[index]

    def times(self) -> Times:
        """Where the time went: of parts from one root that add up, of several roots the longest. They run at once."""
        total_s = 0.0
        moved_s: dict[int, float] = {}
        for part in self._parts:
            times = part.completion.times()
            total_s = max(total_s, times.total_s)
            moved_s[part.root] = moved_s.get(part.root, 0.0) + times.total_s - times.waited_s
        return Times(max(0.0, total_s - max(moved_s.values(), default=0.0)), total_s)

    def take(self) -> list[tuple[int, Outcome]]:
        """(index, outcome) of records that ended since the last take, in the order in which they ended."""
        self._collect()
        taken, self._taken = self._taken, []
        return [(index, outcome_of(self._results[index])) for index in taken]

    def results(self) -> list[Outcome]:
        """N outcomes. Call when done; BusyError before."""
        return [outcome_of(result) for result in self._final()]

    def slot_address(self, index: int) -> int:
        """Address of the payload of a ToSlot record that is a HIT; the caller's until release(index)."""
        part, position = self._find(index)
        return part.completion.slot_address(position)

    def release(self, index: int) -> None:
        """Give the slot of a ToSlot record back to the ring."""
        part, position = self._find(index)
        part.completion.release(position)

    def _find(self, index: int) -> tuple[Part, int]:
        for part in reversed(self._parts):  # the last one that looked for it has it
            if index in part.indices:
                return part, part.indices.index(index)
        raise IndexError(index)


class ProbeHandle(_Handle):
    """A look into the file system that is under way; what it finds is in the index once it is done."""


class StoreHandle:
    """A store of N records that is under way; a thread of the volume brings it to its end."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._results: list[bool | None] = [None] * count
        self._ended: list[tuple[int, bool, bool]] = []
        self._open = count
        self.elsewhere: dict[bytes, str] = {}
        """Key -> root_id, of those that are on another root than their first one: that one fails, or cannot keep up."""

    def done(self) -> bool:
        """True once all of the payload memory is the caller's again."""
        return self._open == 0

    def take(self) -> list[tuple[int, bool, bool]]:
        """What came to its end since the last take, in that order.

        Returns:
            (index, whether the record is in the volume now, whether this store wrote it: else it was there already).
            Its payload memory is the caller's again.
        """
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done. Returns done()."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def results(self) -> list[bool]:
        """Whether each of the N records is in the volume now. Call when done; BusyError before."""
        if self._open:
            raise BusyError("the batch is not done", hint="wait() for it first")
        return [bool(result) for result in self._results]

    def settle(self, index: int, *, is_stored: bool, is_written: bool = False) -> None:
        """The volume's: one record has come to its end."""
        with self._changed:
            if self._results[index] is None:
                self._results[index] = is_stored
                self._ended.append((index, is_stored, is_written))
                self._open -= 1
                if not self._open:
                    self._changed.notify_all()


def as_they_end(completion: Completion, count: int) -> Iterator[tuple[int, int]]:
    """(index, result) of each of a batch's N transfers as soon as it is final. Blocks in between, without the GIL."""
    ended = select.poll()
    try:
        ended.register(completion.fileno(), select.POLLIN)
    except (OSError, RewarmError):  # this process has no descriptor left: all of them at the end, then
        completion.wait()
    while count:
        found = completion.take()
        count -= len(found)
        yield from found
        if count:
            ended.poll()
