"""An open volume: its roots, its namespaces, and what runs beside the server's thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rewarm.engine.base import NUM_ROOTS, Engine, Flow
from rewarm.errors import BusyError, DamageError, RewarmError, StorageError, UsageError, VolumeClosed
from rewarm.metrics import Counters
from rewarm.volume.gauges import Gauges
from rewarm.volume.handles import StoreHandle
from rewarm.volume.janitor.process import JanitorProcess
from rewarm.volume.layout import (
    NamespaceFile,
    find_roots,
    identity_id,
    read_namespace_file,
    read_root_file,
    write_namespace_file,
)
from rewarm.volume.live import LiveReport
from rewarm.volume.members import WatchedMembers, current_roots, members_of
from rewarm.volume.namespace import Namespace
from rewarm.volume.open_root import Root
from rewarm.volume.opening import close_root, open_root
from rewarm.volume.placement import Placement
from rewarm.volume.read_watch import ReadWatch
from rewarm.volume.session import Did
from rewarm.volume.store_thread import StoreItem, StoreThread
from rewarm.volume.usage import read_usage
from rewarm.volume.wear import Wear

_log = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0
LOOK_AT_ROOTS_S = 1.0
MIN_AHEAD_RECORDS = 3
"""A root for which more waits than for the one with the least does not keep up either: by more than half of what
waits for a root on the mean, and by more than so many records. One that is slow would else come to hold all the memory
in which a server stages what it stores, and the fast ones would have nothing to do."""
MAX_LAG_S = 0.5
"""A root whose oldest record has been waiting for longer does not keep up: others are stored on the key's next root."""
_MAX_DAMAGED = 10_000


class Volume:
    """Made by Volume.open(). Thread-safe; belongs to the process that opened it."""

    def __init__(
        self,
        roots: Sequence[Root],
        *,
        engine: Engine,
        counters: Counters,
        read_only: bool,
        durable: bool,
        janitor: JanitorProcess | None,
        away: Sequence[str] = (),
        store_bytes_per_day: int = 0,
        rated_dwpd: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use Volume.open()."""
        self.clock = clock
        self.roots = list(roots)
        self.engine = engine
        self.counters = counters
        self.read_only = read_only
        self.durable = durable
        self._store_bytes_per_day = store_bytes_per_day
        self.placement = _placement(self.roots)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        self._damaged: dict[tuple[bytes, bytes], None] = {}
        self._is_closed = False
        self._janitors = {} if janitor is None else {"": janitor}
        """One for the roots that were there at open, and one for each that was added, by root_id."""
        self._housekeeping = threading.Lock()
        self._away = list(away)
        self._watched = WatchedMembers()
        self._looking = threading.Lock()
        self._untold: set[str] = set()
        self.num_changes = 0
        """How often a root was added or removed since the volume was opened."""
        self._store_threads: list[StoreThread] = []
        self._gauges = Gauges(self, rated_dwpd)
        self._live = LiveReport(self)
        self.counters.watch(self._gauges.at_hand)
        if not read_only:
            self._store_threads = [StoreThread(self, number, self._housekeep) for number in range(len(self.roots))]
        self.read_watch = ReadWatch(self.roots, self.flow)
        self._is_ending = threading.Event()
        threading.Thread(target=self._watch, name="rewarm-roots", daemon=True).start()

    @classmethod
    def open(
        cls,
        roots: Sequence[str],
        *,
        engine: Engine,
        counters: Counters | None = None,
        read_only: bool = False,
        durable: bool = False,
        janitor: bool = True,
        may_be_away: bool = False,
        store_bytes_per_day: int = 0,
        rated_dwpd: float = 0.0,
    ) -> Volume:
        """Open a volume that create_volume() made.

        Args:
            roots: Its directories, in any order; roots that are left out hold nothing for this process, but for those
                that add_root() added since the volume was made. Those that remove_root() removed are left alone.
            engine: Moves the bytes; stays the caller's, and open until the volume is closed.
            counters: Where to count; default: a new one.
            read_only: Load only; nothing on the roots is changed, no trace is left.
            durable: fsync each record.
            janitor: Start a process that evicts while this one lives, if no other one does.
            may_be_away: Do without roots that are not there, as long as one is; they are used once they come back.
            store_bytes_per_day: What all processes together may have written in any 24 hours before this one stores no
                more; spread over the roots by their capacity. 0: no bound.
            rated_dwpd: Drive writes a day that the flash is rated for, for a metric; 0: not known.
        Raises:
            UsageError: No volume there, roots of different volumes, a root named twice.
            FormatVersionError: A newer format.
            DamageError: The file that names a root is damaged.
            StorageError: A root that cannot be read, or written to where that was asked for.
        """
        opened: list[Root] = []
        try:
            files, away = find_roots(roots)
            if away and not (files and may_be_away):
                raise next(iter(away.values()))
            for error in away.values():
                _log.warning("the volume is used without this root until it comes back: %s", error.message)
            for path, file in current_roots(files).items():
                opened.append(open_root(path, file, read_only=read_only))
            process = JanitorProcess([root.name for root in opened]) if janitor and not read_only else None
            return cls(
                opened,
                engine=engine,
                counters=counters or Counters(),
                read_only=read_only,
                durable=durable,
                janitor=process,
                away=list(away),
                store_bytes_per_day=store_bytes_per_day,
                rated_dwpd=rated_dwpd,
            )
        except BaseException:
            for root in opened:
                close_root(root)
            raise

    @property
    def id(self) -> str:
        """The volume's own name, 32 hexadecimal digits."""
        return self.roots[0].file.volume_id

    @property
    def capacity_bytes(self) -> int:
        """What the opened roots may hold."""
        return sum(root.file.capacity_bytes for root in self.roots if root.is_member)

    @property
    def host_root_id(self) -> str:
        """The root in memory that holds copies; a volume by itself has none."""
        return ""

    @property
    def policy_directory(self) -> str:
        """Where servers keep what they learned of their rates."""
        return self.roots[0].paths.policy

    def shares(self) -> dict[str, float]:
        """The part of all chunks that lies on each root, by root_id."""
        total = self.capacity_bytes
        return {root.file.root_id: root.file.capacity_bytes / total for root in self.roots if root.is_member}

    def paused(self) -> set[str]:
        """root_id of each root that is not read now: it fails, hangs, or delivers far less than it did."""
        return {root.file.root_id for root in self.roots if root.is_member and root.health.loads.is_on}

    def follow(self, paused: Collection[str]) -> None:
        """Do not count on roots that another process of the same server does not read now; told again at every step."""
        for root in self.roots if paused else ():
            if root.file.root_id in paused:
                root.health.loads.follow()

    def flow(self, root_number: int) -> Flow:
        """What the engine's reads of a root have brought so far."""
        return self.engine.flow(root_number % NUM_ROOTS)

    def root_name(self, root_id: str) -> str:
        """The directory of a root that is open here, or was; its root_id, if none was."""
        return next((root.name for root in reversed(self.roots) if root.file.root_id == root_id), root_id)

    @property
    def away(self) -> Sequence[str]:
        """Paths that were named, and hold no root that can be opened yet."""
        return self._away

    @property
    def num_records(self) -> int:
        """Records that the index of this process knows."""
        return sum(map(len, list(self._namespaces.values())))

    @property
    def is_full(self) -> bool:
        """Whether stores are paused because a root, or its disk, is full."""
        return any(thread.is_full for thread in self._threads_of_members())

    @property
    def is_over_budget(self) -> bool:
        """Whether every root's store budget is spent: what is stored now is refused."""
        used = self._threads_of_members()
        return bool(used) and all(thread.refused_bytes for thread in used)

    def store_budget_bytes(self, root_number: int) -> int:
        """What may be written to one root in any 24 hours; 0: no bound."""
        share = self.roots[root_number].file.capacity_bytes / self.capacity_bytes
        return max(1, int(self._store_bytes_per_day * share)) if self._store_bytes_per_day else 0

    def note_wear(self, root_number: int, wear: Wear, now_s: float) -> None:
        """What was written to a root by all processes: there may be room in its store budget again."""
        self._store_threads[root_number].note_wear(wear, now_s)

    def live_report(self) -> bytes:
        """What this process says of itself to whoever watches, as of now or half a second ago."""
        return self._live.content()

    def used_bytes(self) -> int:
        """What the opened roots hold, of all namespaces and processes; asks the file system."""
        return sum(read_usage(root.paths.usage).used_bytes for root in self.roots if root.is_member)

    def namespace(self, identity: Mapping[str, Any], *, payload_bytes: int) -> Namespace:
        """The namespace of an identity; made where it is new, and the same object for the same identity.

        Args:
            identity: Plain JSON: all that decides how a record's bytes are to be read.
            payload_bytes: Of every record in it.
        Raises:
            UsageError: The namespace is there with another payload size, or the identity is not JSON.
            StorageError: It could not be made.
        """
        self.check_usable()
        file = NamespaceFile(identity_id(identity), payload_bytes, dict(identity))
        with self._lock:
            known = self._namespaces.get(file.id)
            if known is None:
                for root in self.roots:
                    if root.is_member:
                        self._describe(root, file)
                known = self._namespaces[file.id] = Namespace(self, file)
            _check_payload(known.payload_bytes, payload_bytes)
            return known

    def wait_scanned(self, timeout_s: float | None = None) -> bool:
        """Whether every namespace that was asked for knows the records that were there at open."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            namespaces = list(self._namespaces.values())
        return all(n.wait_scanned(None if end is None else max(0.0, end - time.monotonic())) for n in namespaces)

    def close(self) -> None:
        """Write what is queued, as far as that takes a bounded time; end the janitor. Idempotent.

        Call before the engine is closed. Memory of stores that hang in a disk stays in use: their handles are not done.
        """
        with self._lock:
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
        self._is_ending.set()
        self.read_watch.close()
        self.counters.unwatch(self._gauges.at_hand)
        ended = [thread.close(CLOSE_WAIT_S) for thread in self._store_threads] or [True] * len(self.roots)
        for root, has_ended in zip(self.roots, ended, strict=True):
            if has_ended:
                close_root(root)
        for janitor in self._janitors.values():
            janitor.close()
            self._gauges.evicted(janitor)

    def look_at_roots(self) -> None:
        """Begin to use roots that were added to the volume, or have come back; stop using those that were removed.

        Called about once a second, by a thread of its own: a device that hangs holds nothing else up.
        """
        try:
            with self._looking:
                self._look_at_roots()
        except (OSError, RewarmError) as error:
            _log.warning("the roots of the volume stay as they are: %s", error)

    def _look_at_roots(self) -> None:
        paths = [root.name for root in self.roots if root.is_member]
        has_changed = self._watched.changed(paths)
        if not has_changed and not self._away and not self._untold:
            return
        known = members_of(paths)
        here = {root.file.root_id: number for number, root in enumerate(self.roots) if root.is_member}
        self._untold.clear()
        for root_id, member in known.items():
            if root_id in here and not member.is_member:
                self._drop_root(here[root_id])
            elif root_id not in here and member.is_member and not self._take_root(member.path, root_id):
                self._untold.add(root_id)
        gone = {root_id for root_id, member in known.items() if not member.is_member}
        left = {member.path for member in known.values() if not member.is_member}
        left -= {member.path for member in known.values() if member.is_member}
        self._away = [path for path in self._away if path not in left and not self._take_root(path, but=gone)]

    def check_usable(self) -> None:
        """Raises VolumeClosed, or BusyError in a forked child."""
        if self._is_closed:
            raise VolumeClosed("the volume is closed")
        if os.getpid() != self._pid:
            raise BusyError("this volume belongs to the parent process", hint="open the volume after fork()")

    # What follows is for the namespaces and the store threads of this volume.

    def number_of(self, root_id: str) -> int | None:
        """Of a root, in this process; None: it is not used here."""
        return next((n for n, root in enumerate(self.roots) if root.is_member and root.file.root_id == root_id), None)

    def queue_stores(self, namespace: Namespace, payloads: Sequence[tuple[bytes, int]], handle: StoreHandle) -> None:
        """Hand records to the threads of their roots."""
        if self.read_only:
            raise UsageError("this volume was opened read-only")
        now, placement = self.clock(), self.placement  # of these roots, whatever is added meanwhile
        lags_s = [thread.lag_s(now) for thread in self._store_threads]
        for index, (key, address) in enumerate(payloads):
            number = self._root_to_store_on(placement.order(key), lags_s, namespace.file.record_bytes)
            self._store_threads[number].put(StoreItem(namespace, key, address, handle, index, now))

    def _root_to_store_on(self, order: Sequence[int], lags_s: Sequence[float], record_bytes: int) -> int:
        """The first root of an order that works and keeps up with what it is to write; else the one least behind.

        So each root gets what its capacity asks for as long as it can write that, and what it can write where it
        cannot; a root that was behind is back as soon as it has nothing to write. What cannot be read now is not
        written to either, if there is another root.
        """
        writable = [number for number in order if not self.roots[number].health.stores.is_on]
        able = [number for number in writable if not self.roots[number].health.loads.is_on] or writable
        if not able:
            return order[0]
        prompt = [number for number in able if lags_s[number] <= MAX_LAG_S]
        if not prompt:
            return min(able, key=lags_s.__getitem__)
        queued = [self._store_threads[number].queued_bytes for number in prompt]
        most = min(queued) + max(MIN_AHEAD_RECORDS * record_bytes, sum(queued) // (2 * len(queued)))
        return next(number for number, waits in zip(prompt, queued, strict=True) if waits <= most)

    def note_damaged(self, root: Root, namespace_id: bytes, key: bytes) -> None:
        """A record failed its check: absent from now on, until it is written again."""
        self.counters.add("rewarm_damaged_records_total", 1, root.name)
        with self._lock:
            self._damaged[namespace_id, key] = None
            if len(self._damaged) > _MAX_DAMAGED:
                del self._damaged[next(iter(self._damaged))]
        if root.session is not None:
            root.session.note(Did.DAMAGED, namespace_id, (key,))

    def is_damaged(self, namespace_id: bytes, key: bytes) -> bool:
        """Whether a record failed its check and was not written since."""
        return (namespace_id, key) in self._damaged

    def note_written(self, namespace_id: bytes, key: bytes) -> None:
        """A record was written, whole."""
        if self._damaged:
            with self._lock:
                self._damaged.pop((namespace_id, key), None)

    def _describe(self, root: Root, file: NamespaceFile) -> None:
        """Make sure that ``namespace.json`` is there."""
        try:
            found = read_namespace_file(root.name, file.id)
        except (UsageError, DamageError):
            if not self.read_only:
                try:
                    write_namespace_file(root.name, file)
                except OSError as error:
                    raise StorageError(
                        f"{root.name}: {error.strerror}", path=root.name, errno=error.errno or 0
                    ) from error
        else:
            _check_payload(found.payload_bytes, file.payload_bytes)

    def _watch(self) -> None:
        while not self._is_ending.wait(LOOK_AT_ROOTS_S):
            self.look_at_roots()

    def _take_root(self, path: str, root_id: str = "", but: Collection[str] = ()) -> bool:
        """Begin to use a root; False: it is not there now.

        Args:
            path: Where it should be.
            root_id: Which it should be; empty: any of the volume.
            but: Those that it should not be, which were removed.
        """
        try:
            file = read_root_file(path)
            known = {root.file.root_id for root in self.roots if root.is_member}
            if (
                file.volume_id != self.id
                or (root_id or file.root_id) != file.root_id
                or file.root_id in known | set(but)
            ):
                return file.root_id in known
            root = open_root(path, file, read_only=self.read_only)
        except (UsageError, StorageError):
            return False
        described = list(self._namespaces.values())
        for namespace in described:
            self._describe(root, namespace.file)
        with self._lock:
            if self._is_closed:
                close_root(root)
                return True
            number = len(self.roots)
            self.roots.append(root)
            for namespace in self._namespaces.values():
                if namespace not in described:  # it was made since
                    self._describe(root, namespace.file)
                namespace.add_root(root)
            if not self.read_only:
                self._store_threads.append(StoreThread(self, number, self._housekeep))
            if self._janitors:
                self._janitors[file.root_id] = JanitorProcess([path])
            self._roots_changed()
        _log.warning("%s is a root of the volume now (root_id %s)", path, file.root_id)
        return True

    def _drop_root(self, number: int) -> None:
        """Stop using a root: what lies there is a miss from now on."""
        root = self.roots[number]
        root.health.retire()
        with self._lock:
            root.is_member = False
            for namespace in self._namespaces.values():
                namespace.drop_root(number)
            self._roots_changed()
            self._gauges.forget(root)
            janitor = self._janitors.pop(root.file.root_id, None)
        if janitor is not None:
            janitor.close()
        if self.read_only or self._store_threads[number].close(CLOSE_WAIT_S):
            close_root(root)
        _log.warning("%s is no root of the volume any more (root_id %s)", root.name, root.file.root_id)

    def _roots_changed(self) -> None:
        self.placement = _placement(self.roots)
        self.num_changes += 1

    def _threads_of_members(self) -> list[StoreThread]:
        return [thread for root, thread in zip(self.roots, self._store_threads, strict=False) if root.is_member]

    def _housekeep(self) -> None:
        """About once a second, from a store thread: gauges, and the janitor's life."""
        if not self._housekeeping.acquire(blocking=False):
            return
        try:
            janitors = list(self._janitors.values())
            if janitors and not self._is_closed:
                self.counters.set("rewarm_janitor_running", float(all(janitor.is_running for janitor in janitors)))
            for janitor in janitors:
                if not self._is_closed:
                    janitor.ensure()
                    self._gauges.evicted(janitor)
            for number, root in enumerate(list(self.roots)):
                if not root.health.stores.is_on:
                    self._gauges.look_at(number)
        finally:
            self._housekeeping.release()


def _placement(roots: Sequence[Root]) -> Placement:
    numbers = [number for number, root in enumerate(roots) if root.is_member]
    files = [roots[number].file for number in numbers]
    return Placement([file.root_id for file in files], [float(file.capacity_bytes) for file in files], numbers)


def _check_payload(there: int, asked: int) -> None:
    if there != asked:
        raise UsageError(f"this namespace has records of {there} bytes, not {asked}")
