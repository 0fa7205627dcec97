"""What moves bytes between files and host memory: the promise that every engine keeps.

One call carries a batch of transfers; each ends with 0 or an errno. Engines: ``native`` (io_uring or C threads, one
ctypes call in and one out, no GIL while bytes move) and ``pure`` (Python threads). ``rewarm.testing.EngineContract`` is
the suite that all of them pass; wrappers (Faulty, Counting, Slow) are engines too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

NUM_ROOTS = 256
"""Numbers that a transfer's root may have: 0 to 255."""


class Priority(IntEnum):
    """Loads go before stores; stores wait while loads are queued."""

    LOAD = 0
    STORE = 1


@dataclass(frozen=True, slots=True)
class Read:
    """Plain read of ``length_bytes`` at ``offset_bytes`` of a file into the caller's memory."""

    path: str
    offset_bytes: int
    address: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """Plain write from the caller's memory into a file that exists (no truncation, no rename, no fsync)."""

    path: str
    offset_bytes: int
    address: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class BlockPlanes:
    """Host memory laid out as P planes of KV blocks, each plane an array of pages of equal size.

    The bytes of KV block b in plane p are ``page_bytes`` at ``plane_addresses[p] + b * page_bytes``. A chunk of n
    blocks is stored [plane][block][page]: the page of plane p and the i-th block lies at ``(p * n + i) * page_bytes``
    of the payload.
    """

    plane_addresses: array[int]
    """array('Q'), one address a plane; the memory stays the caller's and must outlive the engine's use of it."""
    page_bytes: int


@dataclass(frozen=True, slots=True)
class ToMemory:
    """The checked payload lies in the caller's memory: address aligned to 4096, room for the padded payload.

    Read in place, with no copy: until the transfer is final its I/O may touch these bytes, good or bad.
    """

    address: int


@dataclass(frozen=True, slots=True)
class ToBlocks:
    """The checked payload is scattered into KV blocks by the worker that checked it; not a byte before the check."""

    planes: BlockPlanes
    block_ids: array[int]
    """array('q') of the chunk's blocks after the first ``skip_blocks``, in chunk order."""
    skip_blocks: int = 0
    """Leading blocks of the chunk that are resident already and are left alone."""


@dataclass(frozen=True, slots=True)
class ToSlot:
    """The checked payload stays in a ring slot that the caller reads (Completion.slot_address) and then releases."""


RecordTarget: TypeAlias = "ToMemory | ToBlocks | ToSlot"


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read one record, check header page, name and every piece, then deliver the payload.

    Result: 0; ENOENT no such file; EBADMSG damage or another record's bytes; else the errno of the I/O.
    """

    path: str
    key: bytes
    namespace_id: bytes
    payload_bytes: int
    target: RecordTarget
    root: int = 0
    """The caller's number for the device that the file lies on, below NUM_ROOTS. Each has a queue of its own: they work
    side by side, and what hangs on one takes no more of the workers and of the ring than others can do without.
    Engine.flow() counts reads by it."""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write one record to ``temporary_path``, then rename it to ``path``; the directories exist or are made.

    Checksums are taken from the payload in the worker. A failure leaves neither name behind. Result: 0 or errno.
    """

    path: str
    temporary_path: str
    key: bytes
    namespace_id: bytes
    address: int
    """Payload, aligned to 4096, room for the padded payload (the engine zeroes the padding); ours until final."""
    payload_bytes: int
    created_ns: int
    durable: bool = False
    """fsync the file before, and its directory after, the rename."""
    root: int = 0
    """See ReadRecord."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a file is there: 0 or ENOENT, never opened."""

    path: str
    root: int = 0
    """See ReadRecord."""


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a file. Result: 0, ENOENT where it was gone already."""

    path: str


Transfer: TypeAlias = "Read | Write | ReadRecord | WriteRecord | Probe | Unlink"


@dataclass(frozen=True, slots=True)
class Times:
    """Where a batch's time went."""

    waited_s: float = 0.0
    """Of the total: none of its I/O was under way. It waited for workers, for ring slots, for those before it."""
    total_s: float = 0.0
    """Since the submit, until the last transfer became final, or until now."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What reads of records brought, and how long that took."""

    num_bytes: float = 0
    """Of record files, read and checked."""
    busy_s: float = 0.0
    """While one of them at least was under way. One that waits for a worker or a ring slot is not."""

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.num_bytes + other.num_bytes, self.busy_s + other.busy_s)

    def __sub__(self, other: Flow) -> Flow:
        return Flow(self.num_bytes - other.num_bytes, self.busy_s - other.busy_s)


class Completion(Protocol):
    """A submitted batch of N transfers.

    Its calls never block on I/O, except wait() and the cancel of in-place reads.
    """

    def done(self) -> bool:
        """True once every transfer is final: no I/O can touch the caller's memory any more. Checks the deadline too."""

    def take(self) -> list[tuple[int, int]]:
        """(index, result) of transfers that became final since the last take, in the order in which they ended."""

    def results(self) -> list[int]:
        """N results, 0 or errno. Call when done; BusyError before."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done, without the GIL. Returns done()."""

    def cancel(self) -> None:
        """Make the batch final: what was not final yet ends with ECANCELED.

        ToBlocks, ToSlot: at once, whatever a device does; the ring slot of a read that hangs is lost until it returns.
        ToMemory, Read, Write: pieces not yet submitted are dropped, submitted ones are waited for.
        """

    def times(self) -> Times:
        """Where the time went, so far; once done, it stays as it is."""

    def fileno(self) -> int:
        """An eventfd that is readable when a take() would return something. Closed with the completion."""

    def slot_address(self, index: int) -> int:
        """Address of the payload of a ToSlot transfer that ended with 0; the caller's until release(index)."""

    def release(self, index: int) -> None:
        """Give the slot of a ToSlot transfer back to the ring."""


class Engine(Protocol):
    """Moves batches. Thread-safe. After fork() the child's calls raise BusyError: make a new engine there."""

    name: str
    """"io_uring", "threads" or "pure"."""

    def submit(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.LOAD, deadline_s: float | None = None
    ) -> Completion:
        """Queue a batch; returns at once.

        Args:
            transfers: N transfers; their memory is the engine's until final.
            priority: LOAD before STORE; within one priority, in order of submission.
            deadline_s: Seconds from now after which what is not final ends with ETIMEDOUT, by the rules of cancel().
        Raises:
            VolumeClosed: The engine was closed.
            UsageError: A transfer is malformed (misaligned address, payload larger than a ring slot).
        """

    def gather(self, planes: BlockPlanes, block_ids: array[int], address: int) -> None:
        """Copy a chunk's blocks out of host memory to ``address``, [plane][block][page], before returning.

        The GIL is not held.
        """

    def flow(self, root: int) -> Flow:
        """What ReadRecord transfers of one root have brought since the engine was opened, piece by piece."""

    def close(self) -> None:
        """Cancel what is queued, wait for what is not abandoned, free the ring. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is made; see engine.open_engine()."""

    kind: str = "auto"
    """auto | io_uring | threads | pure. Asked for by name and missing: UnsupportedError with the reason."""
    num_workers: int = 0
    """I/O workers; 0: chosen from the cores and the device."""
    ring_bytes: int = 0
    """Host memory for ToBlocks and ToSlot reads; 0: none, such reads are refused."""
    slot_bytes: int = 0
    """Largest record file (header and padding included) that a slot holds."""
    ring_address: int = 0
    """Use this memory (pinned by the caller, aligned to 4096, ring_bytes long) instead of allocating; 0: allocate.

    It must outlive the slots that abandoned reads hold: a read that hangs may still write there after close()."""
