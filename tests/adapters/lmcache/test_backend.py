"""The in-process storage plug-in: put and get, restarts, damage, and what it refuses at start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmcache
import lmcache_drive as drive
import pytest
from lmcache_drive import HostObject

from rewarm.adapters.lmcache import backend as backend_module
from rewarm.adapters.lmcache.backend import StartRefused
from rewarm.units import GIB
from rewarm.volume import create_volume

SHAPE = (2, 4, 256, 128)
SIZE = 2 * 4 * 256 * 128 * 2
COUNT = 5
FORMAT = "KV_2LTD"


class BFloat16:
    """Stands for a torch dtype: LMCache asks it for its item's size."""

    itemsize = 2


class CpuBackend:
    """LMCache's CPU backend as an allocator: what it gave out, and how much it still gives."""

    def __init__(self) -> None:
        self.given: list[HostObject] = []
        self.left = 1000

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, eviction: bool = True, busy_loop: bool = True) -> Any:
        if not self.left:
            return None
        self.left -= 1
        made = HostObject(SIZE, 99)
        made.metadata.shape, made.metadata.dtype, made.metadata.fmt = SHAPE, "torch.bfloat16", drive.Format.KV_2LTD
        self.given.append(made)
        return made

    @property
    def held(self) -> int:
        return sum(made.references > 0 for made in self.given)


def config(root: str, **changed: Any) -> Any:
    extra = {"rewarm.roots": [root], "rewarm.weights": drive.WEIGHTS, "other.key": 1}
    extra.update(changed.pop("extra", {}))
    values = {
        "extra_config": extra,
        "chunk_size": 256,
        "save_unfull_chunk": False,
        "enable_blending": False,
        "pre_caching_hash_algorithm": "sha256_cbor",
    }
    return SimpleNamespace(**{**values, **changed})


def metadata(**changed: Any) -> Any:
    shape = changed.pop("shape", SHAPE)
    values = {"model_name": drive.MODEL, "world_size": 1, "worker_id": 0, "role": "worker"}
    return SimpleNamespace(
        **{**values, **changed}, get_shapes=lambda: [shape], get_dtypes=lambda: [BFloat16], chunk_size=256
    )


class Key:
    """CacheEngineKey's part that the seat reads; hashable, as LMCache's is."""

    def __init__(self, number: int, *, worker: int = 0, tags: Any = None, layer: int | None = None) -> None:
        self.model_name, self.world_size, self.worker_id = drive.MODEL, 1, worker
        self.chunk_hash, self.tags = number * 7919 - 3, tags
        if layer is not None:
            self.layer_id = layer
        self._all = (number, worker, tags, layer)

    def __hash__(self) -> int:
        return hash(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._all == other._all


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "volume")
    create_volume([path], capacity_bytes=GIB)
    return path


def open_seat(root: str, cpu: Any = None, meta: Any = None, **changed: Any) -> Any:
    return backend_module.RewarmBackend(
        config=config(root, **changed), metadata=meta or metadata(), local_cpu_backend=cpu, dst_device="cpu"
    )


@contextlib.contextmanager
def opened(root: str, **changed: Any) -> Iterator[tuple[Any, CpuBackend]]:
    cpu = CpuBackend()
    seat = open_seat(root, cpu, **changed)
    try:
        yield seat, cpu
    finally:
        seat.close()


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and dtypes stay plain, so that the tests need no torch."""
    monkeypatch.setattr(backend_module, "_as_torch", lambda layout: (layout.shapes[0], layout.dtypes[0], layout.format))


def chunk(fill: int) -> HostObject:
    made = HostObject(SIZE, fill)
    made.metadata.shape = SHAPE
    return made


def put(seat: Any, keys: list[Any], objects: list[HostObject]) -> list[Any]:
    """Store and wait until LMCache's memory is its own again; gives the keys that were told to be stored."""
    told: list[Any] = []
    seat.batched_submit_put_task(keys, objects, on_complete_callback=told.append)
    drive.until(lambda: not any(seat.exists_in_put_tasks(some) for some in keys), "a store did not end")
    drive.until(lambda: all(made.references == 1 for made in objects), "memory was not given back")
    return told


def fill(seat: Any, count: int = COUNT, **more: Any) -> list[Key]:
    keys = [Key(number, **more) for number in range(count)]
    put(seat, keys, [chunk(number + 1) for number in range(count)])
    return keys


def numbers_of(objects: list[Any]) -> list[int | None]:
    return [None if made is None else made.view[0] for made in objects]


def test_put_and_get(root: str) -> None:
    with opened(root) as (seat, cpu):
        keys = fill(seat)
        assert all(seat.contains(some) for some in keys)
        assert not seat.contains(Key(100))
        assert seat.batched_contains([*keys, Key(100)]) == COUNT
        got = seat.batched_get_blocking([*keys, Key(100)])
        assert numbers_of(got) == [1, 2, 3, 4, 5, None]
        assert all(made.holds(number + 1) for number, made in enumerate(got[:COUNT]))
        assert seat.get_blocking(keys[2]).holds(3)
        assert seat.get_blocking(Key(100)) is None
        assert cpu.held == COUNT + 1


def test_asynchronous_calls(root: str) -> None:
    with opened(root) as (seat, _):
        keys = fill(seat)

        async def ask() -> tuple[int, list[Any]]:
            count = await seat.batched_async_contains("lookup", [*keys, Key(100)], pin=True)
            return count, await seat.batched_get_non_blocking("lookup", [*keys, Key(100)], {"cum_chunk_lengths": [0]})

        count, got = asyncio.run(ask())
        assert count == COUNT
        assert numbers_of(got) == [1, 2, 3, 4, 5]


def test_a_restart_finds_all_again(root: str) -> None:
    with opened(root) as (seat, _):
        keys = fill(seat)
    with opened(root) as (seat, _):
        assert seat.batched_contains(keys) == COUNT
        assert numbers_of(seat.batched_get_blocking(keys)) == [1, 2, 3, 4, 5]


def test_a_scheduler_that_has_no_memory_finds_what_a_worker_stored(root: str) -> None:
    with opened(root) as (seat, _):
        keys = fill(seat)
        scheduler = open_seat(root, None, metadata(role="scheduler"))
        try:
            assert scheduler.batched_contains(keys) == COUNT
            assert scheduler.batched_get_blocking(keys) == [None] * COUNT
        finally:
            scheduler.close()


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_chunk_ends_the_prefix_and_gives_its_memory_back(root: str, how: str) -> None:
    with opened(root) as (seat, _):
        keys = fill(seat)
    name = (keys[2].chunk_hash % (1 << 256)).to_bytes(32, "little").hex()
    path = next(Path(root).glob(f"*/{name[:2]}/{name}.rec"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content if how == "flipped" else content[: len(content) // 2])
    with opened(root) as (seat, cpu):
        assert seat.batched_contains(keys) == COUNT
        assert numbers_of(seat.batched_get_blocking(keys)) == [1, 2, None, None, None]
        assert cpu.held == 2
        assert seat.batched_contains(keys) == 2, "it is absent from then on"
        assert put(seat, keys, [chunk(number + 1) for number in range(COUNT)]) == [keys[2]]
        assert numbers_of(seat.batched_get_blocking(keys)) == [1, 2, 3, 4, 5]


def test_without_memory_the_prefix_is_shorter(root: str) -> None:
    with opened(root) as (seat, cpu):
        keys = fill(seat)
        cpu.left = 2
        assert numbers_of(seat.batched_get_blocking(keys)) == [1, 2, None, None, None]


def test_what_is_there_is_not_written_again(root: str) -> None:
    with opened(root) as (seat, _):
        keys = fill(seat)
        assert put(seat, keys, [chunk(50) for _ in keys]) == []
        assert numbers_of(seat.batched_get_blocking(keys)) == [1, 2, 3, 4, 5]


def test_workers_tags_and_layers_are_kept_apart(root: str) -> None:
    with opened(root) as (seat, _):
        fill(seat)
        for other in (Key(0, worker=1), Key(0, tags=(("user", "a"),)), Key(0, layer=0)):
            assert not seat.contains(other)
            put(seat, [other], [chunk(77)])
            assert seat.get_blocking(other).holds(77)
        assert seat.get_blocking(Key(0)).holds(1)


def test_remove(root: str) -> None:
    with opened(root) as (seat, _):
        keys = fill(seat)
        assert seat.remove(keys[0])
        assert not seat.remove(Key(100))
        assert seat.batched_remove(keys) == COUNT - 1
        assert seat.batched_contains(keys) == 0
        assert not list(Path(root).glob("*/??/*.rec"))


def test_a_callback_that_raises_harms_nothing(root: str) -> None:
    with opened(root) as (seat, _):

        def bad(_key: Any) -> None:
            raise ValueError("theirs")

        made = chunk(1)
        seat.batched_submit_put_task([Key(1)], [made], on_complete_callback=bad)
        drive.until(lambda: not seat.exists_in_put_tasks(Key(1)), "a store did not end")
        assert put(seat, [Key(2)], [chunk(2)]) == [Key(2)]


def test_a_store_of_what_lies_on_a_device_gives_the_memory_back(root: str) -> None:
    with opened(root) as (seat, _):
        made = chunk(1)
        made.raw_tensor.is_cpu, made.raw_tensor.device = False, "cuda:0"
        assert put(seat, [Key(1)], [made]) == []
        assert not seat.contains(Key(1))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"save_unfull_chunk": True}, "save_unfull_chunk: false"),
        ({"enable_blending": True}, "enable_blending: false"),
        ({"extra": {"rewarm.chunk_tokens": 128}}, "rewarm.chunk_tokens: 256"),
        ({"extra": {"rewarm.roots": []}}, "rewarm lmcache config"),
        ({"extra": {"rewarm.rots": []}}, "did you mean 'roots'"),
        ({"extra": {"rewarm.roots": ["/nowhere/at/all"]}}, "rewarm volume create"),
        ({"pre_caching_hash_algorithm": "builtin"}, "PYTHONHASHSEED=0"),
    ],
)
def test_what_cannot_be_served_ends_the_server_with_the_line_to_change(
    root: str, changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(StartRefused) as caught:
        open_seat(root, CpuBackend(), **changed)
    assert says in str(caught.value)


def test_a_chunk_larger_than_a_record_is_refused_with_a_chunk_size(root: str) -> None:
    with pytest.raises(StartRefused, match="chunk_size: 176"):
        open_seat(root, CpuBackend(), metadata(shape=(2, 128, 256, 8192)))


def test_vllm_that_draws_its_seed_anew_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(backend_module, "_seed_is_fixed", lambda: False)
    with pytest.raises(StartRefused, match="PYTHONHASHSEED=0"):
        open_seat(root, CpuBackend())
    monkeypatch.setattr(backend_module, "_seed_is_fixed", lambda: True)
    open_seat(root, CpuBackend()).close()


def test_a_seed_of_hashes_is_enough(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    open_seat(root, CpuBackend(), pre_caching_hash_algorithm="builtin").close()


def test_an_untested_lmcache_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "__version__", "0.6.0")
    with pytest.raises(StartRefused, match=r"rewarm\.allow_untested: true in extra_config"):
        open_seat(root, CpuBackend())


def test_two_seats_of_one_worker_are_refused(root: str) -> None:
    with opened(root), pytest.raises(StartRefused, match="twice on one volume"):
        open_seat(root, CpuBackend())


def test_without_a_configuration_it_says_how_it_is_loaded() -> None:
    with pytest.raises(StartRefused, match="storage_plugins"):
        backend_module.RewarmBackend()
