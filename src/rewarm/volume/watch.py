"""Watching a volume that servers use: what their processes say of themselves, what its roots' files and devices say.

Reads only, and waits for no root: each is looked at in a thread of its own, and one that does not answer is said to.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from rewarm.errors import RewarmError, StorageError, UsageError
from rewarm.volume.layout import RootFile, RootPaths, read_root_file
from rewarm.volume.live import Live, Numbers, RootNumbers, read_live
from rewarm.volume.members import Members, newest, read_members
from rewarm.volume.session import SessionReader, session_directories
from rewarm.volume.usage import Usage, read_usage

STALE_S = 5.0
"""Who has said nothing new for so long is shown as it is, but with no rates: processes say something once a second."""
SETTLE_S = 4.0
"""After that whoever has not spoken twice will not."""
_SETTLE_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class Device:
    """Counts of the block device below a root, of all that use it, since the machine started."""

    reads: int
    writes: int
    in_flight: int
    """Reads and writes that it is at now."""


@dataclass(slots=True)
class RootLook:
    """What one look at a root found."""

    path: str
    at_s: float
    file: RootFile | None = None
    trouble: RewarmError | None = None
    """Why it cannot be read; None: it can."""
    usage: Usage = field(default_factory=Usage)
    device: Device | None = None
    """None: not known, for instance of a network file system."""
    members: Members = field(default_factory=dict)
    lives: list[Live] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Files of sessions that say nothing sensible, and why."""


def look_at(path: str, clock: Callable[[], float] = time.monotonic) -> RootLook:
    """Look at a root now; waits for it as long as it takes."""
    look = RootLook(path, clock())
    try:
        look.file = read_root_file(path)
        paths = RootPaths(path)
        look.usage = read_usage(paths.usage)
        look.device = _device(path)
        look.members = read_members(path)
        for directory in session_directories(paths):
            _add_session(look, directory)
    except RewarmError as error:
        look.trouble = error
    except OSError as error:
        look.trouble = StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0)
    look.at_s = clock()
    return look


def _add_session(look: RootLook, directory: str) -> None:
    try:
        if not _is_over(directory) and (live := read_live(directory)) is not None:
            look.lives.append(live)
    except RewarmError as error:
        look.skipped.append(error.message)
    except OSError as error:
        look.skipped.append(f"{error.filename or directory}: {error.strerror}")


def _is_over(directory: str) -> bool:
    """Whether the process of a session is gone; where one may not try its lock, its silence will tell."""
    try:
        return SessionReader(directory).is_dead()
    except OSError as error:
        if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
            return False
        raise


def _device(path: str) -> Device | None:
    number = os.stat(path).st_dev
    try:
        counts = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text(encoding="ascii").split()
        return Device(int(counts[0]), int(counts[4]), int(counts[8]))
    except (OSError, ValueError, IndexError):
        return None


@dataclass(slots=True)
class RootRates:
    """One root, as it is shown."""

    path: str
    root_id: str = ""
    trouble: str = ""
    """Why it cannot be read here, or who leaves it alone; empty: it works."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    wanted_bytes: int = 0
    """For which there was no room: the janitor evicts as many."""
    evicted_bytes_s: float = 0.0
    read_bytes_s: float = 0.0
    written_bytes_s: float = 0.0
    read_share: float = 0.0
    """Part of the time in which a process was reading; of several they add up."""
    device_reads_s: float | None = None
    """Of the whole device; None: not known."""
    device_writes_s: float | None = None
    device_in_flight: int | None = None
    damaged_records: int = 0
    io_errors: int = 0


@dataclass(slots=True)
class ProcessRates:
    """One process, or several sides of one, as it is shown."""

    host: str
    pid: int
    title: str
    started_s: float
    """Unix time at which it opened the volume."""
    age_s: float = 0.0
    """Since it last said something new."""
    totals: Numbers = field(default_factory=Numbers)
    """Since it opened the volume."""
    gains: Numbers = field(default_factory=Numbers)
    """A second, of what counts up."""
    read_bytes_s: float = 0.0
    written_bytes_s: float = 0.0

    @property
    def is_stale(self) -> bool:
        """Whether it has said nothing for long."""
        return self.age_s > STALE_S


@dataclass(slots=True)
class Picture:
    """The volume at one moment."""

    volume_id: str
    roots: list[RootRates]
    processes: list[ProcessRates]
    skipped: list[str]
    """What could not be read, and why."""


@dataclass(slots=True)
class _Told:
    """What one opening of the volume said last, and before."""

    live: Live
    heard_s: float
    before: Live | None = None


class Watch:
    """Looks at a volume again and again. For one thread."""

    def __init__(
        self,
        roots: Sequence[str],
        *,
        look: Callable[[str], RootLook] = look_at,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """
        Args:
            roots: Directories of the volume; those that were added to it are found, those that were removed left out.
            look: Looks at one root, and may hang.
            clock: Seconds, never backwards.
            wall_clock: Unix time.
            sleep: Waits.
        """
        self._paths = list(dict.fromkeys(os.path.realpath(root) for root in roots))
        self._look = look
        self._clock = clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._looking: dict[str, _Look] = {}
        self._looks: dict[str, tuple[RootLook, RootLook | None]] = {}
        self._told: dict[str, _Told] = {}

    def settle(self, wait_s: float) -> Picture:
        """The first picture with rates: every process has spoken twice, or has had the time to.

        Raises:
            UsageError, FormatVersionError, DamageError, StorageError: No root can be looked at, or they belong to
                different volumes.
        """
        end = self._clock() + SETTLE_S
        picture = self.poll(wait_s)
        self._check()
        while self._clock() < end and not self._is_settled():
            self._sleep(_SETTLE_STEP_S)
            picture = self.poll(wait_s)
        return picture

    def _check(self) -> None:
        looks = [look for look, _ in self._looks.values()]
        first = next((look for look in looks if look.file is not None), None)
        if first is None:
            raise next(
                (look.trouble for look in looks if look.trouble is not None),
                StorageError(f"{self._paths[0]} does not answer", path=self._paths[0]),
            )
        for look in looks:
            if look.file is not None and first.file is not None and look.file.volume_id != first.file.volume_id:
                raise UsageError(
                    f"{first.path} and {look.path} belong to two different volumes",
                    hint="rewarm volume info DIR shows which; name the roots of one",
                )

    def _is_settled(self) -> bool:
        looked_twice = all(before is not None for _, before in self._looks.values())
        silent_since = self._clock() - STALE_S
        return looked_twice and all(
            told.before is not None or told.heard_s < silent_since for told in self._told.values()
        )

    def poll(self, wait_s: float) -> Picture:
        """Look at every root, wait at most ``wait_s`` for all of them together, and say what is known by then."""
        for path in self._paths:
            if path not in self._looking:
                self._looking[path] = _Look(self._look, path)
        end = self._clock() + wait_s
        for path, looking in list(self._looking.items()):
            found = looking.result(max(0.0, end - self._clock()))
            if found is not None:
                del self._looking[path]
                self._take(found)
        self._follow_members()
        return self._picture()

    def _take(self, look: RootLook) -> None:
        self._looks[look.path] = (look, self._looks[look.path][0] if look.path in self._looks else None)
        now_s = self._clock()
        for live in look.lives:
            told = self._told.get(live.instance)
            if told is None:
                self._told[live.instance] = _Told(live, now_s - self._silence_s(live))
            elif live.clock_s > told.live.clock_s:
                told.before, told.live, told.heard_s = told.live, live, now_s

    def _silence_s(self, live: Live) -> float:
        """Of a process that is heard of for the first time; the clock of another host says nothing."""
        if live.host != os.uname().nodename:
            return 0.0
        return max(0.0, self._wall_clock() - live.written_ns / 1e9)

    def _follow_members(self) -> None:
        """Roots that were added are looked at too, those that were removed no more."""
        known = newest(*(look.members for look, _ in self._looks.values()))
        gone = {root_id for root_id, member in known.items() if not member.is_member}
        here = {look.file.root_id for look, _ in self._looks.values() if look.file is not None}
        for path, (look, _) in list(self._looks.items()):
            if look.file is not None and look.file.root_id in gone and path in self._paths:
                self._paths.remove(path)
                del self._looks[path]
        for root_id, member in known.items():
            path = os.path.realpath(member.path) if member.is_member else ""
            if member.is_member and root_id not in here and path not in self._paths:
                self._paths.append(path)

    def _picture(self) -> Picture:
        now_s = self._clock()
        running = {live.instance for look, _ in self._looks.values() for live in look.lives}
        self._told = {instance: told for instance, told in self._told.items() if instance in running}
        roots = [self._root(path, now_s) for path in self._paths]
        shown = {root.root_id for root in roots}
        unnamed = {
            root_id: path
            for told in self._told.values()
            for root_id, (path, _) in told.live.roots.items()
            if root_id not in shown
        }
        for root_id, path in unnamed.items():
            roots.append(RootRates(path, root_id, "not named: what its processes say"))
            self._add_told(roots[-1], now_s)
        files = [look.file for look, _ in self._looks.values() if look.file is not None]
        skipped = [line for look, _ in self._looks.values() for line in look.skipped]
        return Picture(files[0].volume_id if files else "", roots, self._processes(now_s), skipped)

    def _root(self, path: str, now_s: float) -> RootRates:
        look, before = self._looks.get(path, (None, None))
        root = RootRates(path)
        if path in self._looking:
            root.trouble = "does not answer"
        if look is None or look.file is None:
            root.root_id = self._told_id(path)
            if look is not None and look.trouble is not None:
                root.trouble = root.trouble or look.trouble.message
            self._add_told(root, now_s)
            return root
        if look.trouble is not None:
            root.trouble = root.trouble or look.trouble.message
        root.used_bytes, root.wanted_bytes = look.usage.used_bytes, look.usage.pressure_bytes
        root.root_id, root.capacity_bytes = look.file.root_id, look.file.capacity_bytes
        if look.device is not None:
            root.device_in_flight = look.device.in_flight
        if before is not None and look.at_s > before.at_s:
            seconds = look.at_s - before.at_s
            root.evicted_bytes_s = max(0, look.usage.evicted_bytes - before.usage.evicted_bytes) / seconds
            if look.device is not None and before.device is not None:
                root.device_reads_s = max(0, look.device.reads - before.device.reads) / seconds
                root.device_writes_s = max(0, look.device.writes - before.device.writes) / seconds
        self._add_told(root, now_s)
        return root

    def _told_id(self, path: str) -> str:
        """The root_id of a root that does not say itself, by what processes call it."""
        for told in self._told.values():
            for root_id, (name, _) in told.live.roots.items():
                if name == path:
                    return root_id
        return ""

    def _add_told(self, root: RootRates, now_s: float) -> None:
        """Add what processes say of a root."""
        leave_it = []
        for told in self._told.values():
            _, numbers = told.live.roots.get(root.root_id, ("", None))
            if numbers is None:
                continue
            root.damaged_records += int(numbers.damaged_records)
            root.io_errors += int(numbers.io_errors)
            if now_s - told.heard_s > STALE_S:
                continue
            gain = _root_gain(told, root.root_id)
            root.read_bytes_s += gain.read_bytes
            root.written_bytes_s += gain.written_bytes
            root.read_share += gain.read_s
            if not numbers.is_read:
                leave_it.append(told.live.pid)
        if leave_it and not root.trouble:
            root.trouble = f"left alone by {', '.join(map(str, sorted(set(leave_it))))}"

    def _processes(self, now_s: float) -> list[ProcessRates]:
        shown: dict[tuple[str, int], ProcessRates] = {}
        for told in self._told.values():
            live = told.live
            process = shown.setdefault(
                (live.host, live.pid), ProcessRates(live.host, live.pid, live.title, live.started_ns / 1e9)
            )
            process.started_s = min(process.started_s, live.started_ns / 1e9)
            process.age_s = max(process.age_s, now_s - told.heard_s)
            process.totals = _added(process.totals, live.numbers)
            if now_s - told.heard_s <= STALE_S:
                process.gains = _added(process.gains, _gain(told))
                for root_id in live.roots:
                    gain = _root_gain(told, root_id)
                    process.read_bytes_s += gain.read_bytes
                    process.written_bytes_s += gain.written_bytes
        return sorted(shown.values(), key=lambda process: (process.host, process.pid))


class _Look:
    """One look at a root, in a thread that nobody waits for longer than he wants."""

    def __init__(self, look: Callable[[str], RootLook], path: str) -> None:
        self._found: list[RootLook] = []
        self._thread = threading.Thread(target=self._run, args=(look, path), name="rewarm-look", daemon=True)
        self._thread.start()

    def result(self, wait_s: float) -> RootLook | None:
        """What was found; None: it does not answer yet."""
        self._thread.join(wait_s)
        return self._found[0] if self._found else None

    def _run(self, look: Callable[[str], RootLook], path: str) -> None:
        self._found.append(look(path))


def _added(one: Numbers, other: Numbers) -> Numbers:
    """Sums; of the records that an index knows the most, since the sides of a server know the same ones."""
    sums = Numbers(*map(sum, zip(astuple(one), astuple(other), strict=True)))
    return replace(sums, records=max(one.records, other.records))


def _gain(told: _Told) -> Numbers:
    """Growth a second between the last two times that a process spoke."""
    if told.before is None:
        return Numbers()
    return Numbers(*_growth(told, astuple(told.live.numbers), astuple(told.before.numbers)))


def _root_gain(told: _Told, root_id: str) -> RootNumbers:
    if told.before is None or root_id not in told.before.roots:
        return RootNumbers()
    return RootNumbers(*_growth(told, astuple(told.live.roots[root_id][1]), astuple(told.before.roots[root_id][1])))


def _growth(told: _Told, now: Iterable[float], before: Iterable[float]) -> list[float]:
    assert told.before is not None
    seconds = told.live.clock_s - told.before.clock_s
    return [max(0.0, new - old) / seconds for new, old in zip(now, before, strict=True)]
