"""Which namespaces of a volume hold objects of a group, and in which layout.

LMCache looks up by name alone. So the catalog keeps, for each group, the namespaces that the volume has of it: one a
layout, and more than one only after somebody changed the server's dtype, chunk size or serde. A thread of its own reads
what is on the disk, so that a root that hangs holds up no lookup for longer than OPEN_WAIT_S, and that once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from rewarm.adapters.lmcache.names import Group, Layout, Naming, family_of, group_of
from rewarm.errors import RewarmError
from rewarm.volume import Namespace, Volume
from rewarm.volume.layout import NamespaceFile, namespace_ids, read_namespace_file

logger = logging.getLogger("lmcache.rewarm")

MAX_LAYOUTS = 16
"""Of one group. A server has one, or two with a serde; a tier serves no objects whose sizes differ from one to the
next."""
LOOK_EVERY_S = 5.0
"""How often the volume is asked for namespaces that other processes made."""
OPEN_WAIT_S = 5.0
"""How long the first lookup of a group waits for what the volume has of it."""


@dataclass(slots=True)
class _Family:
    """The namespaces of a group."""

    text: str
    """What family() calls it."""
    entries: dict[Layout, Namespace] = field(default_factory=dict)
    current: Layout | None = None
    """What was stored or loaded last: lookups ask for no other."""
    is_open: threading.Event = field(default_factory=threading.Event)
    """Set once what the volume had of it is among the entries."""
    wait_until: float = field(default_factory=lambda: time.monotonic() + OPEN_WAIT_S)
    """Nobody waits for that any longer."""


class Catalog:
    """Of one open volume and one server. Thread-safe."""

    def __init__(self, volume: Volume, naming: Naming) -> None:
        self._volume = volume
        self._naming = naming
        self._lock = threading.Lock()
        """Held for a few instructions, never over I/O."""
        self._seen: set[bytes] = set()
        self._on_disk: dict[str, dict[Layout, NamespaceFile]] = {}
        self._families: dict[tuple[Group, int], _Family] = {}
        self._refused: set[Group] = set()
        self._wanted: queue.SimpleQueue[_Family | None] = queue.SimpleQueue()
        self._look()
        self._thread = threading.Thread(target=self._run, name="rewarm-lmcache-catalog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it does not hang in a disk."""
        self._wanted.put(None)
        self._thread.join(1.0)

    def groups(self) -> list[tuple[Group, int]]:
        """(group, length of its hashes) of all that this server can name: those asked for, and those of no tenant."""
        with self._lock:
            found = dict.fromkeys(self._families)
            identities = [next(iter(files.values())).identity for files in self._on_disk.values()]
        for identity in identities:
            group = group_of(identity, "")
            hash_bytes = identity["hashing"].get("hash_bytes") if isinstance(identity.get("hashing"), dict) else None
            if group is None or not isinstance(hash_bytes, int):
                continue
            if self._naming.family(group, hash_bytes) == family_of(identity):
                found[group, hash_bytes] = None
        return list(found)

    def namespaces(self, group: Group, hash_bytes: int) -> list[tuple[Layout, Namespace]]:
        """What the volume has of a group in the layout that the server has now, else in any."""
        family = self._family(group, hash_bytes)
        current = family.current
        return list(family.entries.items()) if current is None else [(current, family.entries[current])]

    def all_namespaces(self, group: Group, hash_bytes: int) -> list[tuple[Layout, Namespace]]:
        """Those of every layout."""
        return list(self._family(group, hash_bytes).entries.items())

    def use(self, group: Group, hash_bytes: int, layout: Layout, *, make: bool) -> Namespace | None:
        """The namespace for objects of a layout, which the server has from now on; None: there is none, or too many.

        Args:
            group: Whose objects.
            hash_bytes: Length of their hashes.
            layout: Theirs.
            make: Whether to make it where it is not there, which waits for the disk.
        Raises:
            RewarmError, OSError: It cannot be made or opened.
        """
        family = self._family(group, hash_bytes)
        found = family.entries.get(layout)
        if found is None and make:
            if len(family.entries) >= MAX_LAYOUTS:
                self._refuse(group, layout)
                return None
            identity = self._naming.identity(group, hash_bytes, layout)
            found = self._volume.namespace(identity, payload_bytes=layout.payload_bytes)
            with self._lock:
                family.entries[layout] = found
        if found is not None:
            family.current = layout
        return found

    def _family(self, group: Group, hash_bytes: int) -> _Family:
        family = self._families.get((group, hash_bytes))
        if family is None:
            made = _Family(self._naming.family(group, hash_bytes))
            with self._lock:
                family = self._families.setdefault((group, hash_bytes), made)
            if family is made:
                self._wanted.put(family)
        if not family.is_open.is_set():
            family.is_open.wait(max(0.0, family.wait_until - time.monotonic()))
        return family

    def _run(self) -> None:
        while True:
            try:
                family = self._wanted.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self._look()
                with self._lock:
                    families = list(self._families.values())
                for known in families:
                    self._open(known)
                continue
            if family is None:
                return
            self._look()
            self._open(family)
            family.is_open.set()

    def _open(self, family: _Family) -> None:
        """Open the namespaces that the volume has of a family and that are not open yet."""
        with self._lock:
            files = dict(self._on_disk.get(family.text, {}))
        for layout, file in files.items():
            if layout in family.entries or len(family.entries) >= MAX_LAYOUTS:
                continue
            with suppress(RewarmError, OSError):
                namespace = self._volume.namespace(file.identity, payload_bytes=file.payload_bytes)
                with self._lock:
                    family.entries[layout] = namespace

    def _look(self) -> None:
        """Read the descriptions of namespaces that are new since the last look."""
        for root in list(self._volume.roots):
            if root.is_member and not root.health.loads.is_on:
                with suppress(OSError):
                    for namespace_id in namespace_ids(root.name):
                        if namespace_id not in self._seen:
                            self._learn(root.name, namespace_id)

    def _learn(self, root: str, namespace_id: bytes) -> None:
        try:
            file = read_namespace_file(root, namespace_id)
        except RewarmError:
            return  # it is being written, or no longer whole
        self._seen.add(namespace_id)
        server = file.identity.get("server")
        layout = Layout.of(file.identity.get("layout"), file.payload_bytes)
        if layout is not None and isinstance(server, dict) and server.get("kind") == self._naming.seat:
            with self._lock:
                self._on_disk.setdefault(family_of(file.identity), {})[layout] = file

    def _refuse(self, group: Group, layout: Layout) -> None:
        if group not in self._refused:
            self._refused.add(group)
            logger.warning(
                "Rewarm: %s has objects of more than %d layouts; those of %d bytes and further ones are not stored",
                group.model,
                MAX_LAYOUTS,
                layout.payload_bytes,
            )
