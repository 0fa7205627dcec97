"""A rank's worker over a real volume: what it stores and loads, what it reports, what it never touches."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this environment")

from rewarm.config import KvConfig  # noqa: E402
from rewarm.engine import Engine, EngineConfig, open_engine  # noqa: E402
from rewarm.engine.base import Probe  # noqa: E402
from rewarm.engine.record import record_bytes  # noqa: E402
from rewarm.errors import UnsupportedError, VolumeClosed  # noqa: E402
from rewarm.kv import rank as rank_module  # noqa: E402
from rewarm.kv.chunks import ChunkLoad, LoadOrder, StepOrders, StoreOrder  # noqa: E402
from rewarm.kv.planes import find_planes  # noqa: E402
from rewarm.kv.rank import RankSide  # noqa: E402
from rewarm.kv.worker import HostWorker, RankSetup, RankWorker, StoreBuffer  # noqa: E402
from rewarm.metrics import LOAD_PARTS, Counters  # noqa: E402
from rewarm.volume import LoadHandle, Namespace, Outcome, StoreHandle, Volume, create_volume  # noqa: E402
from rewarm.volume.host_tier import HostCounters  # noqa: E402
from rewarm.volume.tiered import AnyVolume, TieredVolume  # noqa: E402

NUM_BLOCKS, CHUNK_BLOCKS, LAYERS = 32, 4, 3
IDENTITY = '{"kv":{}}'
CHUNKS = [bytes([number]) * 32 for number in range(1, 6)]
WAIT_S = 30.0

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class Rank:
    """A KV cache, an engine, a volume and the worker over them."""

    def __init__(self, root: Path, device: str, host: Path | None = None, **changes: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_BLOCKS, 2, 16, 24)
        self.caches = {f"layers.{n}": torch.rand(shape, generator=generator).to(device) for n in range(LAYERS)}
        planes = find_planes(self.caches, NUM_BLOCKS)
        slot_bytes = record_bytes(planes.block_bytes * CHUNK_BLOCKS)
        ring: Any = None
        if device != "cpu":
            from rewarm.kv.staged import PinnedMemory

            ring = PinnedMemory(4 * slot_bytes)
        self.engine, host_engine = (
            open_engine(
                EngineConfig(
                    ring_bytes=2 * slot_bytes,
                    slot_bytes=slot_bytes,
                    ring_address=ring.address + number * 2 * slot_bytes if ring else 0,
                )
            )
            for number in range(2)
        )
        self._engines = (self.engine, host_engine)
        self.counters = Counters()
        flash = Volume.open([str(root)], engine=self.engine, counters=self.counters, janitor=False)
        self.volume: AnyVolume = flash
        if host is not None:
            counters = HostCounters(self.counters)
            copies = Volume.open([str(host)], engine=host_engine, counters=counters, janitor=False)
            self.volume = TieredVolume(flash, copies, self.counters)
        values = {"rank": 0, "may_store": True, "store_buffer_bytes": 8 * slot_bytes, "load_deadline_s": 30.0}
        setup = RankSetup(
            planes=planes,
            chunk_blocks=CHUNK_BLOCKS,
            volume=self.volume,
            engine=self.engine,
            counters=self.counters,
            **{**values, **changes},
        )
        self.worker: RankWorker
        if ring is None:
            self.worker = HostWorker(setup)
        else:
            from rewarm.kv.staged import StagedWorker

            self.worker = StagedWorker(setup, ring)

    def blocks(self, ids: list[int]) -> Any:
        return torch.stack([cache[ids].cpu() for cache in self.caches.values()])

    def forget(self) -> None:
        for cache in self.caches.values():
            cache.fill_(-7)

    def store(self, orders: dict[bytes, list[int]]) -> None:
        stores = [StoreOrder(chunk, array("q", ids)) for chunk, ids in orders.items()]
        step = StepOrders(stores=stores, identity=IDENTITY)
        self.worker.start(step)
        self.worker.save(step)

    def load(self, loads: list[ChunkLoad], request_id: str = "r") -> None:
        self.worker.start(StepOrders(loads=[LoadOrder(request_id, loads)], identity=IDENTITY))

    def poll_until(self, holds: Callable[[], bool], what: str) -> set[str]:
        ended: set[str] = set()
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            ended |= self.worker.poll(0.01)
            if holds():
                return ended
            time.sleep(0.002)
        raise AssertionError(f"not within {WAIT_S} s: {what}")

    def close(self) -> None:
        self.worker.close()
        self.volume.close()
        for engine in self._engines:
            engine.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    create_volume([str(tmp_path / "root")], capacity_bytes=64 << 20)
    return tmp_path / "root"


@pytest.fixture
def rank(root: Path, request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(root, getattr(request, "param", "cpu"))
    yield made
    made.close()


def ids_of(number: int) -> list[int]:
    """Blocks of a chunk: neither in order nor next to each other."""
    return [(5 * (CHUNK_BLOCKS * number + index)) % NUM_BLOCKS for index in range(CHUNK_BLOCKS)]


def wait_loaded(rank: Rank, request_id: str = "r") -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if request_id in rank.worker.poll(0.01):
            return
    raise AssertionError(f"the load did not end within {WAIT_S} s")


def stored_chunks(rank: Rank, count: int) -> dict[bytes, int]:
    stored: dict[bytes, int] = {}

    def all_reported() -> bool:
        stored.update(rank.worker.take_report().stored)
        return len(stored) >= count

    rank.poll_until(all_reported, f"{count} chunks stored")
    return stored


@pytest.mark.parametrize("rank", DEVICES, indirect=True)
def test_what_was_stored_is_loaded_into_other_blocks(rank: Rank) -> None:
    before = {number: rank.blocks(ids_of(number)) for number in range(3)}
    rank.store({CHUNKS[number]: ids_of(number) for number in range(3)})
    assert stored_chunks(rank, 3) == {CHUNKS[number]: 1 for number in range(3)}
    rank.forget()
    others = [list(range(CHUNK_BLOCKS * n, CHUNK_BLOCKS * (n + 1))) for n in range(4, 7)]
    rank.load([ChunkLoad(CHUNKS[n], array("q", others[n])) for n in range(3)])
    wait_loaded(rank)
    for number in range(3):
        assert torch.equal(rank.blocks(others[number]), before[number])
    assert not rank.worker.take_invalid_blocks()
    assert rank.counters.value("rewarm_kv_loads_total", "hit") == 3
    untouched = [block for block in range(NUM_BLOCKS) if block not in {b for ids in others for b in ids}]
    assert bool((rank.blocks(untouched) == -7).all())


@pytest.mark.parametrize("rank", DEVICES, indirect=True)
def test_resident_blocks_of_a_chunk_are_left_alone(rank: Rank) -> None:
    before = rank.blocks(ids_of(0))
    rank.store({CHUNKS[0]: ids_of(0)})
    stored_chunks(rank, 1)
    rank.forget()
    rank.load([ChunkLoad(CHUNKS[0], array("q", [20, 21]), skip_blocks=2)])
    wait_loaded(rank)
    assert torch.equal(rank.blocks([20, 21]), before[:, 2:])
    assert bool((rank.blocks([block for block in range(NUM_BLOCKS) if block not in (20, 21)]) == -7).all())


def test_only_what_is_written_counts_as_stored(rank: Rank) -> None:
    def counted() -> list[float]:
        names = ("stored", "skipped", "failed")
        return [rank.counters.value("rewarm_kv_stores_total", name) for name in names]

    rank.store({CHUNKS[0]: ids_of(0)})
    stored_chunks(rank, 1)
    assert counted() == [1, 0, 0]
    written = rank.counters.value("rewarm_kv_store_bytes_total")
    rank.store({CHUNKS[0]: ids_of(0), CHUNKS[1]: ids_of(1)})  # the first lies there, as another server's would
    assert stored_chunks(rank, 2) == {CHUNKS[0]: 1, CHUNKS[1]: 1}
    assert counted() == [2, 1, 0]
    assert rank.counters.value("rewarm_kv_store_bytes_total") == 2 * written


def test_room_comes_back_record_by_record_and_a_buffer_tells_how_long_none_did() -> None:
    now = 100.0
    buffer = StoreBuffer(4096, 3, 4096, clock=lambda: now)
    assert buffer.stuck_s() == 0
    slots = [buffer.take() for _ in range(3)]
    handles = StoreHandle(2), StoreHandle(1)
    buffer.write(handles[0], list(zip(CHUNKS, slots[:2], strict=False)))
    now = 103.0
    buffer.write(handles[1], [(CHUNKS[2], slots[2])])
    assert (buffer.stuck_s(), buffer.num_free, buffer.reap()) == (3, 0, [])
    handles[0].settle(1, is_stored=True, is_written=True)
    assert buffer.reap() == [(CHUNKS[1], handles[0], True, True)]
    assert (buffer.stuck_s(), buffer.num_free) == (0, 1)
    now = 104.5
    assert buffer.stuck_s() == 1.5
    assert buffer.take() == slots[1]
    handles[1].settle(0, is_stored=False)
    handles[0].settle(0, is_stored=True)
    assert buffer.reap() == [(CHUNKS[0], handles[0], True, False), (CHUNKS[2], handles[1], False, False)]
    now = 200.0
    assert (buffer.stuck_s(), buffer.num_free, buffer.reap()) == (0, 2, []), "nothing is under way"


def test_a_rank_that_cannot_be_made_leaves_nothing_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    def keep(config: EngineConfig) -> Engine:
        engines.append(open_engine(config))
        return engines[-1]

    def refuse(setup: RankSetup, ring: Any) -> RankWorker:
        raise UnsupportedError("no memory may be locked")

    monkeypatch.setattr(rank_module, "open_engine", keep)
    planes = find_planes({"layer": torch.zeros(NUM_BLOCKS, 2, 16, 24)}, NUM_BLOCKS)
    kv, options = KvConfig(roots=(str(root),)), {"rank": 0, "may_store": True, "step_bytes": 0}
    with pytest.raises(UnsupportedError, match="no memory may be locked"):
        RankSide(planes, CHUNK_BLOCKS, kv, Counters(), worker=refuse, **options)
    (engine,) = engines
    with pytest.raises(VolumeClosed):
        engine.submit([Probe(str(root))])


@pytest.mark.parametrize("rank", DEVICES, indirect=True)
def test_a_store_holds_what_the_blocks_held_in_its_own_step(rank: Rank) -> None:
    before = rank.blocks(ids_of(0))
    rank.store({CHUNKS[0]: ids_of(0)})
    rank.forget()  # the server reuses the blocks at once
    stored_chunks(rank, 1)
    rank.load([ChunkLoad(CHUNKS[0], array("q", ids_of(1)))])
    wait_loaded(rank)
    assert torch.equal(rank.blocks(ids_of(1)), before)


@pytest.mark.parametrize("rank", DEVICES, indirect=True)
def test_missing_and_damaged_chunks_are_reported_and_the_others_are_good(rank: Rank, root: Path) -> None:
    before = rank.blocks(ids_of(0))
    rank.store({CHUNKS[0]: ids_of(0), CHUNKS[1]: ids_of(1)})
    stored_chunks(rank, 2)
    damaged = next(path for path in root.glob("*/??/*.rec") if path.stem == rank.worker._key(CHUNKS[1]).hex())
    data = bytearray(damaged.read_bytes())
    data[-100] ^= 1
    damaged.write_bytes(data)
    rank.forget()
    targets = [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    rank.load([ChunkLoad(CHUNKS[n], array("q", targets[n])) for n in range(3)])
    wait_loaded(rank)
    assert torch.equal(rank.blocks(targets[0]), before)
    assert rank.worker.take_invalid_blocks() == {*targets[1], *targets[2]}
    assert rank.worker.take_report().failed == {CHUNKS[1]: Outcome.DAMAGED, CHUNKS[2]: Outcome.MISS}
    assert bool((rank.blocks(targets[1]) == -7).all()), "nothing of a damaged record is served"


@pytest.mark.parametrize("rank", DEVICES, indirect=True)
def test_a_load_that_the_server_gives_up_ends_and_is_reported(rank: Rank) -> None:
    rank.store({CHUNKS[0]: ids_of(0)})
    stored_chunks(rank, 1)
    rank.load([ChunkLoad(CHUNKS[0], array("q", ids_of(1)))], "gone")
    ended = rank.worker.poll(0.0, ["gone", "never known"])
    if not ended:
        wait_loaded(rank, "gone")
    assert not rank.worker.poll(0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_that_finds_no_room_is_put_off(root: Path, device: str) -> None:
    rank = Rank(root, device, store_buffer_bytes=1)
    try:
        rank.store({CHUNKS[number]: ids_of(number) for number in range(4)})
        stored, put_off = {}, {}

        def all_reported() -> bool:
            report = rank.worker.take_report()
            stored.update(report.stored)
            put_off.update(report.put_off)
            return len(stored) + len(put_off) == 4

        rank.poll_until(all_reported, "4 chunks stored or put off")
        assert stored
        assert not set(stored) & set(put_off)
    finally:
        rank.close()


def test_the_layout_is_told_once_and_a_reader_stores_nothing(root: Path) -> None:
    rank = Rank(root, "cpu", may_store=False)
    try:
        layouts = rank.worker.take_report().layouts
        assert list(layouts) == [0]
        assert not rank.worker.take_report().layouts
        rank.store({CHUNKS[0]: ids_of(0)})
        report = rank.worker.take_report()
        assert report.stored == report.dropped == report.put_off == {}
        assert not list(root.glob("*/??/*.rec"))
    finally:
        rank.close()


def test_a_load_has_begun_before_its_reads(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a read that ends before the call that submits it returns seems to take no time."""
    submitted: list[float] = []
    load = Namespace.load

    def note(*arguments: Any, **options: Any) -> LoadHandle:
        submitted.append(time.monotonic())
        return load(*arguments, **options)

    monkeypatch.setattr(Namespace, "load", note)
    rank.load([ChunkLoad(CHUNKS[0], array("q", ids_of(0)))])
    assert rank.worker._loads["r"].started <= submitted[0]
    wait_loaded(rank)


@pytest.mark.parametrize("rank", DEVICES, indirect=True)
def test_a_load_tells_where_its_time_went_and_a_root_what_it_moved(rank: Rank, root: Path) -> None:
    name, payload = str(root), rank.worker._setup.payload_bytes
    rank.store({CHUNKS[number]: ids_of(number) for number in range(3)})
    stored_chunks(rank, 3)
    assert rank.counters.value("rewarm_root_written_bytes_total", name) == 3 * record_bytes(payload)
    assert rank.counters.value("rewarm_root_write_seconds_total", name) > 0
    rank.load([ChunkLoad(CHUNKS[n], array("q", ids_of(n))) for n in range(3)])
    rank.worker.take_report()
    queued = rank.counters.value("rewarm_kv_load_queue_bytes")
    assert queued in {0, payload, 2 * payload, 3 * payload}
    wait_loaded(rank)
    before = time.monotonic()
    report = rank.worker.take_report()
    assert before <= report.told_at <= time.monotonic()
    times = report.times["r"]
    (opened,) = rank.worker._setup.volume.roots
    assert times.root_bytes == {opened.file.root_id: 3 * payload}
    assert all(seconds >= 0 for seconds in times.parts)
    assert times.parts[1] > 0, "reading takes time"
    counted = {name: values for name, labels, values in rank.counters.samples() if not labels}
    assert sum(times.parts) == pytest.approx(counted["rewarm_kv_load_seconds"][-1])
    for part in LOAD_PARTS:
        assert rank.counters.value("rewarm_kv_load_part_seconds", part) == 1
    assert rank.counters.value("rewarm_root_read_bytes_total", name) == 3 * record_bytes(payload)
    assert rank.counters.value("rewarm_root_read_seconds_total", name) > 0
    assert rank.counters.value("rewarm_kv_load_queue_bytes") == rank.counters.value("rewarm_kv_store_queue_bytes") == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_from_both_tiers_is_right_and_each_root_is_told_what_it_moved(
    root: Path, tmp_path: Path, device: str
) -> None:
    host = tmp_path / "host"
    create_volume([str(host)], capacity_bytes=64 << 20)
    rank = Rank(root, device, host)
    try:
        payload, volume = rank.worker._setup.payload_bytes, rank.volume
        assert isinstance(volume, TieredVolume)
        before = {number: rank.blocks(ids_of(number)) for number in range(3)}
        rank.store({CHUNKS[number]: ids_of(number) for number in range(3)})
        stored_chunks(rank, 3)

        def load_all(count: int) -> dict[str, int]:
            """Root -> records that came from it."""
            rank.forget()
            rank.load([ChunkLoad(CHUNKS[n], array("q", ids_of(n))) for n in range(count)])
            wait_loaded(rank)
            assert all(torch.equal(rank.blocks(ids_of(n)), before[n]) for n in range(count))
            assert not rank.worker.take_invalid_blocks()
            report = rank.worker.take_report()
            told = {root_id: num_bytes // payload for root_id, num_bytes in report.times["r"].root_bytes.items()}
            assert volume.wait_promoted(WAIT_S)
            return {volume.root_name(root_id): num_records for root_id, num_records in told.items()}

        assert load_all(2) == load_all(2) == {str(root): 2}
        assert load_all(3) == {str(host): 2, str(root): 1}
        copy = next(path for path in host.glob("*/??/*.rec") if path.stem == rank.worker._key(CHUNKS[1]).hex())
        data = bytearray(copy.read_bytes())
        data[-100] ^= 1
        copy.write_bytes(data)
        assert load_all(2) == {str(host): 1, str(root): 1}, "what is damaged comes from flash"
        rank.worker.take_report()
        from_host = rank.counters.value("rewarm_root_read_bytes_total", str(host)) // record_bytes(payload)
        assert from_host in {3, 4}, "three that were good, and pieces of a fourth"
        from_flash = (2 + 2 + 1 + 1) * record_bytes(payload)  # what was copied is no load
        assert rank.counters.value("rewarm_root_read_bytes_total", str(root)) == from_flash
        assert rank.counters.value("rewarm_kv_loads_total", "damaged") == 0
    finally:
        rank.close()
