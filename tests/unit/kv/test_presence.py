"""Presence of chunks over all shards, probes, and what is worth storing."""

from __future__ import annotations

from collections.abc import Sequence

from rewarm.kv.chunks import StepReport
from rewarm.kv.keys import group_chunk
from rewarm.kv.presence import COOL_S, PROBE_LIMIT_S, ChunkPresence, Shard
from rewarm.volume import Outcome

CHUNKS = [bytes([number]) * 32 for number in range(6)]


class Probe:
    def __init__(self, on_disk: set[bytes], known: set[bytes], keys: Sequence[bytes]) -> None:
        self.is_done = False
        self._end = lambda: known.update(on_disk & set(keys))

    def finish(self) -> None:
        self._end()
        self.is_done = True

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.is_done


class Namespace:
    """A namespace whose file system answers when the test says so."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.on_disk: set[bytes] = set()
        self.probes: list[Probe] = []
        self.touched: list[bytes] = []
        self.places: dict[bytes, str] = {}

    def contains(self, key: bytes) -> bool:
        return key in self.known

    def probe(self, keys: Sequence[bytes]) -> Probe:
        self.probes.append(Probe(self.on_disk, self.known, keys))
        return self.probes[-1]

    def note_present(self, keys: Sequence[bytes], root_id: str = "") -> None:
        self.known.update(keys)
        self.places.update(dict.fromkeys(keys, root_id))

    def note_absent(self, keys: Sequence[bytes]) -> None:
        self.known.difference_update(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched += keys


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(num_ranks: int = 1, store: str = "always") -> tuple[ChunkPresence, list[Shard], list[Namespace], Clock]:
    namespaces = [Namespace() for _ in range(num_ranks)]
    shards = [Shard(namespace, rank) for rank, namespace in enumerate(namespaces)]
    clock = Clock()
    return ChunkPresence(shards, store=store, clock=clock), shards, namespaces, clock


def test_a_chunk_is_present_when_every_ranks_record_is() -> None:
    presence, shards, namespaces, _ = make(num_ranks=2)
    for chunk in CHUNKS[:3]:
        namespaces[0].known.add(shards[0].key(chunk))
    for chunk in CHUNKS[:2]:
        namespaces[1].known.add(shards[1].key(chunk))
    assert presence.count_present(CHUNKS, 0) == 2
    assert presence.look_up(CHUNKS[:2], 0).end() == 2


def test_a_lookup_waits_for_its_probe_and_remembers_the_answer() -> None:
    presence, shards, (namespace,), _ = make()
    namespace.on_disk.update(shards[0].key(chunk) for chunk in CHUNKS[:4])
    lookup = presence.look_up(CHUNKS, 0)
    assert lookup.end() is None
    assert lookup.end() is None
    assert len(namespace.probes) == 1
    namespace.probes[0].finish()
    assert lookup.end() == 4
    namespace.known.clear()
    assert lookup.end() == 4


def test_a_slow_probe_is_given_up_and_what_is_known_counts() -> None:
    presence, shards, (namespace,), clock = make()
    namespace.known.add(shards[0].key(CHUNKS[0]))
    lookup = presence.look_up(CHUNKS, 0)
    assert lookup.end() is None
    clock.now += PROBE_LIMIT_S + 0.01
    assert lookup.end() == 1


def test_a_chunk_that_failed_to_load_is_absent_until_it_is_stored_again_or_time_has_passed() -> None:
    presence, shards, (namespace,), clock = make()
    keys = [shards[0].key(chunk) for chunk in CHUNKS]
    namespace.known.update(keys)
    namespace.on_disk.update(keys)
    presence.take(StepReport(failed={CHUNKS[1]: Outcome.IO_ERROR, CHUNKS[2]: Outcome.DAMAGED}))
    assert presence.count_present(CHUNKS, 0) == 1
    assert keys[1] in namespace.known, "an I/O error says nothing of the record"
    assert keys[2] not in namespace.known
    assert presence.wants_store(CHUNKS[1])
    presence.take(StepReport(stored={CHUNKS[1]: 1}))
    assert presence.count_present(CHUNKS, 0) == 2
    clock.now += COOL_S + 1
    presence.look_up(CHUNKS, 2).end()
    namespace.probes[-1].finish()
    assert presence.count_present(CHUNKS, 0) == len(CHUNKS)


def test_a_chunk_is_stored_once_and_again_after_it_was_given_up() -> None:
    presence, _, _, _ = make(num_ranks=2)
    chunk = CHUNKS[0]
    assert presence.wants_store(chunk)
    assert not presence.wants_store(chunk)
    presence.take(StepReport(stored={chunk: 1}))
    assert not presence.wants_store(chunk)
    presence.take(StepReport(dropped={chunk: 1}))
    assert presence.wants_store(chunk)
    presence.take(StepReport(stored={chunk: 2}))
    assert presence.is_present(chunk)
    assert not presence.wants_store(chunk)


def test_a_late_report_of_a_store_that_was_given_up_changes_nothing() -> None:
    presence, _, _, _ = make(num_ranks=2)
    assert presence.wants_store(CHUNKS[0])
    presence.take(StepReport(put_off={CHUNKS[0]: 1}))
    presence.take(StepReport(stored={CHUNKS[0]: 1}))
    assert presence.wants_store(CHUNKS[0])


def test_on_reuse_stores_what_is_computed_a_second_time() -> None:
    presence, _, _, _ = make(store="on_reuse")
    assert not presence.wants_store(CHUNKS[0])
    assert presence.wants_store(CHUNKS[0])


def test_touch_reaches_every_shard() -> None:
    presence, shards, namespaces, _ = make(num_ranks=2)
    presence.touch(CHUNKS[:2])
    for shard, namespace in zip(shards, namespaces, strict=True):
        assert namespace.touched == [shard.key(chunk) for chunk in CHUNKS[:2]]


def test_a_store_is_under_way_until_every_rank_has_told_its_end() -> None:
    presence, _, _, _ = make(num_ranks=2)
    assert not presence.is_storing(CHUNKS[0])
    for last in (
        StepReport(stored={CHUNKS[0]: 1}),
        StepReport(put_off={CHUNKS[1]: 1}),
        StepReport(dropped={CHUNKS[2]: 1}),
    ):
        (chunk,) = (*last.stored, *last.put_off, *last.dropped)
        assert presence.wants_store(chunk)
        presence.take(StepReport(stored={chunk: 1}))
        assert presence.is_storing(chunk), "the other rank is still at it"
        presence.take(last)
        assert not presence.is_storing(chunk)


def test_a_group_with_a_window_is_asked_for_the_chunks_before_the_end_only() -> None:
    namespace = Namespace()
    shard = Shard(namespace, 0)
    presence = ChunkPresence([shard], store="always", windows=(0, 2), clock=Clock())
    chunks = CHUNKS[:4]
    namespace.known.update(shard.key(chunk) for chunk in chunks)

    def with_window(*present: int) -> int:
        keys = {shard.key(group_chunk(chunks[index], 1)) for index in present}
        namespace.known.update(keys)
        end = presence.count_present(chunks, 0)
        namespace.known -= keys
        return end

    assert with_window() == 0
    assert with_window(2, 3) == 4
    assert with_window(0, 3) == 1
    assert with_window(1, 2) == 3
    assert with_window(0, 1, 3) == 2
    assert presence.count_present(chunks, 4) == 4
    namespace.known.add(shard.key(group_chunk(chunks[3], 1)))
    assert presence.count_present(chunks, 3) == 4, "what lies before is resident, its window too"


def test_where_records_lie_is_kept_until_every_rank_has_stored_its_part() -> None:
    namespaces = [Namespace(), Namespace()]
    shards = [Shard(namespace, rank) for rank, namespace in enumerate(namespaces)]
    presence = ChunkPresence(shards, store="always")
    chunk = b"c" * 32
    keys = [shard.key(chunk) for shard in shards]
    assert presence.wants_store(chunk)
    presence.take(StepReport(stored={chunk: 1}, elsewhere={keys[1]: "an id"}))
    assert not namespaces[1].places
    presence.take(StepReport(stored={chunk: 1}))
    assert [namespace.places for namespace in namespaces] == [{keys[0]: ""}, {keys[1]: "an id"}]
    assert not presence._elsewhere
