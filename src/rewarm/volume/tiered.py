"""Two volumes seen as one: flash, which has everything, and copies of what is used again in the memory of the host.

Stores go to flash alone. A record that is read from flash a second time is promoted: a thread copies it into the host
volume, behind all loads; what the host volume's own janitor evicts is demoted, which moves nothing. So the copies may
be lost at any time, all or some of them, damaged or not, and all that is lost is speed: what cannot be read there is
read from flash. All servers of a node share the host volume, as they share the other one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from rewarm.engine.base import Flow, Priority
from rewarm.errors import RewarmError
from rewarm.metrics import Counters
from rewarm.volume.handles import Again, LoadHandle, Outcome, Part, ProbeHandle, StoreHandle, outcome_of
from rewarm.volume.namespace import Namespace, Reads, Targets
from rewarm.volume.open_root import Root
from rewarm.volume.promote import Promoter
from rewarm.volume.usage import read_usage
from rewarm.volume.volume import Volume

_log = logging.getLogger(__name__)

HOST_ROOT = 0
"""Number of the host's root. Those of flash follow: roots are added to a volume while it is used."""
LOOK_S = 1.0
"""Between two looks at what other processes have put into the host volume, or removed."""
_LOOK_SHARE = 100
"""A look takes at most this part of the time: 16,000 names take 20 ms."""
_FEW_RECORDS = 8


class TieredVolume:
    """A volume whose copies lie in another one. Thread-safe; owns both from now on."""

    def __init__(self, flash: Volume, host: Volume, counters: Counters) -> None:
        """
        Args:
            flash: Has everything.
            host: Of one root, in memory; opened read-only, it is read and nothing is promoted.
            counters: Where loads by tier and promotions are counted.
        """
        self._flash = flash
        self._host = host
        self._counters = counters
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, TieredNamespace] = {}
        self._promoter = None if host.read_only or flash.read_only else Promoter(counters)
        self._seen = [(0, 0), (0, 0)]
        self._is_ending = threading.Event()
        threading.Thread(target=self._watch, name="rewarm-host-tier", daemon=True).start()

    @property
    def id(self) -> str:
        """Of the flash volume."""
        return self._flash.id

    @property
    def roots(self) -> list[Root]:
        """The host's, then those of flash; a root keeps its number."""
        return [*self._host.roots[:1], *self._flash.roots]

    @property
    def host_root(self) -> Root:
        """Where the copies lie."""
        return self._host.roots[0]

    @property
    def host_root_id(self) -> str:
        """Its root_id."""
        return self.host_root.file.root_id

    @property
    def capacity_bytes(self) -> int:
        """What flash may hold: copies add nothing."""
        return self._flash.capacity_bytes

    @property
    def policy_directory(self) -> str:
        """As Volume.policy_directory: on flash, which a reboot leaves as it is."""
        return self._flash.policy_directory

    @property
    def num_changes(self) -> int:
        """As Volume.num_changes."""
        return self._flash.num_changes

    @property
    def is_over_budget(self) -> bool:
        """As Volume.is_over_budget; memory does not wear."""
        return self._flash.is_over_budget

    def paused(self) -> set[str]:
        """As Volume.paused(), of flash: what memory lacks is on flash."""
        return self._flash.paused()

    def follow(self, paused: Collection[str]) -> None:
        """As Volume.follow()."""
        self._flash.follow(paused)

    def flow(self, root_number: int) -> Flow:
        """As Volume.flow(), of either; they are told apart where each has an engine of its own."""
        return self._host.flow(0) if root_number == HOST_ROOT else self._flash.flow(root_number - HOST_ROOT - 1)

    def root_name(self, root_id: str) -> str:
        """As Volume.root_name(), of either."""
        return self.host_root.name if root_id == self.host_root.file.root_id else self._flash.root_name(root_id)

    def shares(self) -> dict[str, float]:
        """The part of all chunks that lies on each root of flash, by root_id."""
        return self._flash.shares()

    def namespace(self, identity: Mapping[str, Any], *, payload_bytes: int) -> TieredNamespace:
        """As Volume.namespace(). A host volume that cannot have the namespace is done without."""
        flash = self._flash.namespace(identity, payload_bytes=payload_bytes)
        with self._lock:
            known = self._namespaces.get(flash.id)
        if known is not None:
            return known
        host = None
        try:
            host = self._host.namespace(identity, payload_bytes=payload_bytes)
        except RewarmError as error:
            _log.warning("nothing is kept in the host tier: %s", error.message)
        else:
            _warn_of_few(host, self.host_root)
        made = TieredNamespace(flash, host, self._promoter, self._counters)
        with self._lock:
            return self._namespaces.setdefault(flash.id, made)

    def wait_scanned(self, timeout_s: float | None = None) -> bool:
        """As Volume.wait_scanned(), for both."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        is_scanned = self._flash.wait_scanned(timeout_s)
        return self._host.wait_scanned(None if end is None else max(0.0, end - time.monotonic())) and is_scanned

    def wait_promoted(self, timeout_s: float | None = None) -> bool:
        """Whether nothing waits to be promoted, or is."""
        return self._promoter is None or self._promoter.wait_idle(timeout_s)

    def close(self) -> None:
        """As Volume.close(), for both. What waits to be promoted is not."""
        self._is_ending.set()
        if self._promoter is not None:
            self._promoter.close()
        self._host.close()
        self._flash.close()

    def look(self) -> None:
        """Learn what other processes did to the host volume. Called about once a second, by a thread of its own."""
        root = self.host_root
        if not root.is_member:
            return
        if not root.is_mounted():
            _log.warning("the host tier in %s is gone: all is read from flash until the server starts again", root.name)
            root.is_member = False
            root.health.retire()
            self._host.counters.forget(root.name)
            return
        usage = read_usage(root.paths.usage)
        now = (usage.reserved_bytes, usage.evicted_bytes)
        if [now, now] == self._seen:
            return  # looked at after the last change, and once more, since who reserved may have written after the look
        self._seen = [now, self._seen[0]]
        with self._lock:
            namespaces = list(self._namespaces.values())
        for namespace in namespaces:
            namespace.rescan()

    def _watch(self) -> None:
        pause_s = LOOK_S
        while not self._is_ending.wait(pause_s):
            started = time.monotonic()
            self.look()
            pause_s = max(LOOK_S, _LOOK_SHARE * (time.monotonic() - started))


class TieredNamespace:
    """Made by TieredVolume.namespace(); the calls are those of Namespace."""

    def __init__(self, flash: Namespace, host: Namespace | None, promoter: Promoter | None, counters: Counters) -> None:
        self.flash = flash
        self._host = host
        self._promoter = promoter
        self._counters = counters
        self.file = flash.file
        self.id = flash.id
        self.payload_bytes = flash.payload_bytes

    def __len__(self) -> int:
        """Records that this process knows to be on flash."""
        return len(self.flash)

    @property
    def index_bytes(self) -> int:
        """Memory that both indexes take."""
        return self.flash.index_bytes + (self._host.index_bytes if self._host else 0)

    def wait_scanned(self, timeout_s: float | None = None) -> bool:
        """As Namespace.wait_scanned(), for both."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        is_scanned = self.flash.wait_scanned(timeout_s)
        left_s = None if end is None else max(0.0, end - time.monotonic())
        return is_scanned and (self._host is None or self._host.wait_scanned(left_s))

    def contains(self, key: bytes) -> bool:
        """As Namespace.contains(), in either."""
        return self.flash.contains(key) or self.is_in_host(key)

    def is_in_host(self, key: bytes) -> bool:
        """Whether this process knows of a copy in the host tier; in memory only."""
        return self._host is not None and self._host.contains(key)

    def probe(self, keys: Sequence[bytes]) -> ProbeHandle:
        """As Namespace.probe(), in both."""
        parts = self.flash.look(keys)
        return ProbeHandle(len(keys), parts if self._host is None else [*parts, *self._host.look(keys)])

    def note_present(self, keys: Sequence[bytes], root_id: str = "") -> None:
        """As Namespace.note_present()."""
        self.flash.note_present(keys, root_id)

    def note_absent(self, keys: Sequence[bytes]) -> None:
        """As Namespace.note_absent(), in both."""
        self.flash.note_absent(keys)
        if self._host is not None:
            self._host.note_absent(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """As Namespace.touch(): a use of a copy is one of the record too, which flash is to keep."""
        self.flash.touch(keys)
        if self._host is not None:
            self._host.touch([key for key in keys if self._host.contains(key)])

    def own(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """As Namespace.own(): quotas are kept on flash."""
        self.flash.own(keys, tenant)

    def store(self, payloads: Sequence[tuple[bytes, int]]) -> StoreHandle:
        """As Namespace.store(), on flash."""
        return self.flash.store(payloads)

    def load(self, targets: Targets, deadline_s: float | None = None) -> LoadHandle:
        """As Namespace.load(): from the host tier what is known to be there, from flash the rest, at the same time.

        What the host tier turns out not to have, or not whole, is read from flash, and the handle is told so.
        """
        if self._host is None:
            in_host = []
        else:
            in_host = [position for position, (key, _) in enumerate(targets) if self._host.contains(key)]
        order = Reads(targets, deadline_s, Priority.LOAD)
        copies: list[Part] = []
        try:
            if self._host is not None:
                copies, refused = self._host.read(order, in_host)
                in_host = sorted(set(in_host) - set(refused))
            elsewhere = sorted(set(range(len(targets))) - set(in_host)) if in_host else range(len(targets))
            parts, refused = self.flash.read(order, elsewhere)
        except BaseException:
            for part in copies:
                part.completion.cancel()  # the targets are the caller's again
            raise
        handed = [*map(self._as_copy, copies), *(self._as_record(part, targets) for part in parts)]
        return LoadHandle(len(targets), handed, refused, self._finder(order, set(in_host)))

    def rescan(self) -> None:
        """Learn anew what the host volume has."""
        if self._host is not None:
            self._host.rescan()

    def _finder(self, order: Reads, in_host: set[int]) -> Again | None:
        """What looks on flash for what the host tier did not have."""
        again = self.flash.finder(order)
        if not in_host and again is None:
            return None

        def look(missed: Sequence[int]) -> list[Part]:
            not_copied = [position for position in missed if position in in_host]
            in_host.difference_update(not_copied)
            parts, _ = self.flash.read(order, not_copied) if not_copied else ([], ())
            not_first = sorted(set(missed) - set(not_copied))
            parts += again(not_first) if again is not None and not_first else []
            return [self._as_record(part, order.targets) for part in parts]

        return look

    def _as_copy(self, part: Part) -> Part:
        """A part that reads from the host volume, as one of this volume."""

        def note(ended: Sequence[tuple[int, int]]) -> None:
            part.note(ended)
            for _, result in ended:
                self._counters.add("rewarm_host_loads_total", 1, outcome_of(result).name.lower())

        return Part(part.completion, part.indices, note, HOST_ROOT, is_copy=True)

    def _as_record(self, part: Part, targets: Targets) -> Part:
        """A part that reads from flash, as one of this volume."""

        def note(ended: Sequence[tuple[int, int]]) -> None:
            part.note(ended)
            if self._promoter is not None and self._host is not None:
                used = [targets[index][0] for index, result in ended if outcome_of(result) is Outcome.HIT]
                self._promoter.put(self.flash, self._host, used)

        return Part(part.completion, part.indices, note, HOST_ROOT + 1 + part.root)


AnyVolume: TypeAlias = Volume | TieredVolume
AnyNamespace: TypeAlias = Namespace | TieredNamespace


def _warn_of_few(host: Namespace, root: Root) -> None:
    num_records = root.file.capacity_bytes // host.file.record_bytes
    if num_records < _FEW_RECORDS:
        _log.warning("the host tier has room for %d records of this model: raise kv.host_bytes", num_records)
