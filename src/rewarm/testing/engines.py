"""Engines around an engine: one counts, one breaks, one is slow. They can stand inside each other."""

from __future__ import annotations

import errno
import select
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rewarm.engine.base import BlockPlanes, Completion, Engine, Flow, Priority, Probe, ReadRecord, Times, Transfer
from rewarm.errors import BusyError, UsageError

Fault: TypeAlias = Callable[[int, Transfer], int]
"""(number of the transfer since the engine was made, from 1; the transfer) -> 0, or the errno with which it ends."""


class _Around:
    """An engine that does what the inner one does."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.name = engine.name

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        """See engine.base.Engine."""
        return self.inner.submit(transfers, priority=priority, deadline_s=deadline_s)

    def gather(self, planes: BlockPlanes, block_ids: array[int], address: int) -> None:
        """See engine.base.Engine."""
        self.inner.gather(planes, block_ids, address)

    def flow(self, root: int) -> Flow:
        """See engine.base.Engine."""
        return self.inner.flow(root)

    def close(self) -> None:
        """See engine.base.Engine."""
        self.inner.close()

    def __getattr__(self, name: str) -> object:
        """hold() and usage(), where the inner engine has them."""
        return getattr(self.inner, name)


class Counting(_Around):
    """Counts batches, and transfers by the name of their kind."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.batches = 0
        self.transfers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        """See engine.base.Engine."""
        completion = super().submit(transfers, priority=priority, deadline_s=deadline_s)
        with self._lock:
            self.batches += 1
            self.transfers.update(type(transfer).__name__ for transfer in transfers)
        return completion


class Faulty(_Around):
    """Some transfers are not done and end with an error.

    Args:
        engine: Does all the others.
        fail_at: Number of the transfer that fails, counted from 1, or a function that decides for each.
        error: The errno of a failure that ``fail_at`` names by number.
    """

    def __init__(self, engine: Engine, *, fail_at: int | Fault, error: int = errno.EIO) -> None:
        super().__init__(engine)
        self.count = 0
        self._fault: Fault = fail_at if callable(fail_at) else lambda number, _: error if number == fail_at else 0
        self._lock = threading.Lock()

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        """See engine.base.Engine."""
        with self._lock:
            first = self.count + 1
            self.count += len(transfers)
        faults = {i: error for i, transfer in enumerate(transfers) if (error := self._fault(first + i, transfer))}
        # A look at "/" stands in for what is not done: it ends in its place and its order, and touches nothing.
        done = [Probe("/") if i in faults else transfer for i, transfer in enumerate(transfers)]
        return _Changed(super().submit(done, priority=priority, deadline_s=deadline_s), faults)


class _Changed:
    """A completion of which some results of 0 are errors."""

    def __init__(self, inner: Completion, faults: dict[int, int]) -> None:
        self._inner = inner
        self._faults = faults

    def _result(self, index: int, result: int) -> int:
        return result or self._faults.get(index, 0)

    def done(self) -> bool:
        """See engine.base.Completion."""
        return self._inner.done()

    def take(self) -> list[tuple[int, int]]:
        """See engine.base.Completion."""
        return [(index, self._result(index, result)) for index, result in self._inner.take()]

    def results(self) -> list[int]:
        """See engine.base.Completion."""
        return [self._result(index, result) for index, result in enumerate(self._inner.results())]

    def wait(self, timeout_s: float | None = None) -> bool:
        """See engine.base.Completion."""
        return self._inner.wait(timeout_s)

    def cancel(self) -> None:
        """See engine.base.Completion."""
        self._inner.cancel()

    def times(self) -> Times:
        """See engine.base.Completion."""
        return self._inner.times()

    def fileno(self) -> int:
        """See engine.base.Completion."""
        return self._inner.fileno()

    def slot_address(self, index: int) -> int:
        """See engine.base.Completion."""
        return self._inner.slot_address(index)

    def release(self, index: int) -> None:
        """See engine.base.Completion."""
        self._inner.release(index)


class Slow(_Around):
    """Nothing of a batch is seen to end before ``delay_s`` after its submission; a deadline or a cancel is."""

    def __init__(self, engine: Engine, *, delay_s: float) -> None:
        super().__init__(engine)
        self.delay_s = delay_s
        self._spans: dict[int, tuple[float, float, float]] = {}
        """Root -> seconds that delays took, begin and end of the last one."""

    def flow(self, root: int) -> Flow:
        """See engine.base.Engine. A delay counts as time in which its records are being read."""
        before_s, begin, end = self._spans.get(root, (0.0, 0.0, 0.0))
        inner = self.inner.flow(root)
        return Flow(inner.num_bytes, max(inner.busy_s, before_s + min(end, time.monotonic()) - begin))

    def _note_delay(self, root: int, begin: float, end: float) -> None:
        before_s, last_begin, last_end = self._spans.get(root, (0.0, begin, begin))
        if begin <= last_end:
            self._spans[root] = (before_s, last_begin, max(end, last_end))
        else:
            self._spans[root] = (before_s + last_end - last_begin, begin, end)

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        """See engine.base.Engine."""
        is_late = deadline_s is not None and deadline_s < self.delay_s
        inner = super().submit(transfers, priority=priority, deadline_s=deadline_s)
        delay_s = deadline_s if is_late and deadline_s is not None else self.delay_s
        now = time.monotonic()
        for root in {transfer.root for transfer in transfers if isinstance(transfer, ReadRecord)}:
            self._note_delay(root, now, now + delay_s)
        return _Delayed(inner, len(transfers), time.monotonic() + delay_s, is_late=is_late)


class _Delayed(_Changed):
    """A completion that shows nothing before a time; a late one ends with ETIMEDOUT then, whatever was read."""

    def __init__(self, inner: Completion, count: int, visible_at: float, *, is_late: bool) -> None:
        super().__init__(inner, dict.fromkeys(range(count), errno.ETIMEDOUT) if is_late else {})
        self._visible_at = visible_at
        self._is_late = is_late
        self._poll: select.epoll | None = None
        self._timer: threading.Timer | None = None

    def _is_visible(self) -> bool:
        return time.monotonic() >= self._visible_at

    def done(self) -> bool:
        """See engine.base.Completion."""
        done = self._inner.done()
        return done and self._is_visible()

    def take(self) -> list[tuple[int, int]]:
        """See engine.base.Completion."""
        return super().take() if self._is_visible() else []

    def results(self) -> list[int]:
        """See engine.base.Completion."""
        if not self._is_visible():
            raise BusyError("the batch is not done", hint="wait() for it first")
        return super().results()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See engine.base.Completion."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._inner.wait(timeout_s):
            return False
        left = self._visible_at - time.monotonic()
        time.sleep(max(0.0, left if end is None else min(left, end - time.monotonic())))
        return self.done()

    def cancel(self) -> None:
        """See engine.base.Completion. What the inner engine had done already keeps its result."""
        self._inner.cancel()
        self._visible_at = min(self._visible_at, time.monotonic())
        self._show()

    def fileno(self) -> int:
        """See engine.base.Completion. An epoll descriptor that looks at the inner one once the time has come."""
        if self._poll is None:
            self._poll = select.epoll()
            left = self._visible_at - time.monotonic()
            if left <= 0:
                self._show()
            else:
                self._timer = threading.Timer(left, self._show)
                self._timer.daemon = True
                self._timer.start()
        return self._poll.fileno()

    def _show(self) -> None:
        if self._poll is not None and not self._poll.closed:
            try:
                self._poll.register(self._inner.fileno(), select.EPOLLIN)
            except FileExistsError:
                return

    def slot_address(self, index: int) -> int:
        """See engine.base.Completion."""
        self._refuse_early(index)
        return super().slot_address(index)

    def release(self, index: int) -> None:
        """See engine.base.Completion."""
        self._refuse_early(index)
        super().release(index)

    def _refuse_early(self, index: int) -> None:
        if self._is_late or not self._is_visible():
            raise UsageError(f"transfer {index} of this batch holds no ring slot")

    def __del__(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._poll is not None:
            self._poll.close()
