"""The L2 adapter: what it promises LMCache's controllers, restarts, damage, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmcache
import lmcache_drive as drive
import pytest
from lmcache_drive import HostObject, Listener, object_key

from rewarm.adapters.lmcache import l2 as l2_module
from rewarm.adapters.lmcache import objects as objects_module
from rewarm.adapters.seats import CONNECTOR, claim, release
from rewarm.engine import open_engine
from rewarm.errors import RewarmError
from rewarm.testing.engines import Slow
from rewarm.units import GIB, MIB
from rewarm.volume import create_volume

SIZE = MIB
COUNT = 6


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "volume")
    create_volume([path], capacity_bytes=GIB)
    return path


def open_seat(root: str, **params: Any) -> Any:
    return l2_module.RewarmL2({"roots": [root], "weights": drive.WEIGHTS, **params})


@pytest.fixture
def seat(root: str) -> Iterator[Any]:
    made = open_seat(root)
    yield made
    made.close()


def fill(seat: Any, count: int = COUNT, **key: Any) -> list[Any]:
    keys = [object_key(number, **key) for number in range(count)]
    assert drive.store(seat, keys, [HostObject(SIZE, number + 1) for number in range(count)]).is_successful()
    return keys


def records(root: str) -> list[Path]:
    return sorted(Path(root).glob("*/??/*.rec"))


def test_three_different_eventfds(seat: Any) -> None:
    fds = {seat.get_store_event_fd(), seat.get_lookup_and_lock_event_fd(), seat.get_load_event_fd()}
    assert len(fds) == 3
    assert all(os.fstat(fd) for fd in fds)


def test_what_was_stored_is_found_and_loaded(seat: Any) -> None:
    keys = fill(seat)
    absent = object_key(999)
    assert drive.look_up(seat, [*keys, absent]) == [True] * COUNT + [False]
    targets = [HostObject(SIZE, 99) for _ in range(COUNT + 1)]
    assert drive.load(seat, [*keys, absent], targets) == [True] * COUNT + [False]
    assert all(target.holds(number + 1) for number, target in enumerate(targets[:COUNT]))
    assert targets[COUNT].holds(99), "a miss leaves the buffer as it was"


def test_the_result_of_a_store_has_the_bytes_that_are_new(seat: Any) -> None:
    keys = fill(seat)
    again = drive.store(seat, keys, [HostObject(SIZE, 7) for _ in keys])
    assert again.is_successful()
    assert again.bytes_transferred() == 0


@pytest.mark.parametrize("offset", [64, 4095])
@pytest.mark.parametrize("num_bytes", [SIZE, 5000, 48])
def test_buffers_need_no_alignment(seat: Any, offset: int, num_bytes: int) -> None:
    key = object_key(5)
    assert drive.store(seat, [key], [HostObject(num_bytes, 3, offset=offset)]).is_successful()
    target = HostObject(num_bytes, 0, offset=offset)
    assert drive.load(seat, [key], [target]) == [True]
    assert target.holds(3)


def test_an_object_too_large_for_the_ring_is_read_in_place(root: str) -> None:
    seat = open_seat(root, ring_bytes=MIB)
    try:
        seat._objects.slot_bytes = 2 * 4096  # as if nothing larger had ever been seen
        keys = fill(seat, 2)
        target = HostObject(SIZE, 0)
        assert drive.load(seat, keys[:1], [target]) == [True]
        assert target.holds(1)
        assert drive.load(seat, keys[:1], [HostObject(SIZE, 0, offset=64)]) == [False], "nowhere to read it"
    finally:
        seat.close()


def test_a_restart_finds_all_again(root: str) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    seat = open_seat(root)
    try:
        listener = Listener()
        seat.register_listener(listener)
        assert drive.look_up(seat, keys) == [True] * COUNT
        listener.wait_stored(COUNT)
        assert set(listener.stored) == set(keys)
        assert seat.get_usage().bytes_by_cache_salt == {"": COUNT * SIZE}
        targets = [HostObject(SIZE, 99) for _ in keys]
        assert drive.load(seat, keys, targets) == [True] * COUNT
        assert all(target.holds(number + 1) for number, target in enumerate(targets))
    finally:
        seat.close()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped payload":
        content[len(content) // 2] ^= 1
    elif how == "flipped header":
        content[40] ^= 0x10
    elif how == "truncated":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped payload", "flipped header", "truncated", "empty"])
def test_a_damaged_record_is_a_miss_and_nothing_of_it_is_handed_over(root: str, how: str) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    bad = records(root)[2]
    number = int(bad.name[:4], 16)
    damage(bad, how)
    seat = open_seat(root)
    try:
        targets = [HostObject(SIZE, 99) for _ in keys]
        assert drive.load(seat, keys, targets) == [index != number for index in range(COUNT)]
        for index, target in enumerate(targets):
            assert target.holds(99 if index == number else index + 1)
        assert drive.look_up(seat, keys)[number] is False, "it is absent from then on"
        assert seat.report_status()["loads"]["damaged"] == 1
        assert drive.store(seat, keys, [HostObject(SIZE, index + 1) for index in range(COUNT)]).is_successful()
        assert drive.load(seat, keys, targets) == [True] * COUNT
    finally:
        seat.close()


def test_records_that_are_gone_leave_the_accounting(root: str) -> None:
    seat = open_seat(root)
    try:
        listener = Listener()
        seat.register_listener(listener)
        keys = fill(seat)
        for path in records(root):
            path.unlink()
        assert drive.load(seat, keys, [HostObject(SIZE) for _ in keys]) == [False] * COUNT
        assert set(listener.deleted) == set(keys)
        assert seat.get_usage().total_bytes_used == 0
    finally:
        seat.close()


def test_a_lookup_sees_what_others_evicted_and_stored(root: str) -> None:
    seat = open_seat(root)
    try:
        listener = Listener()
        seat.register_listener(listener)
        keys = fill(seat)
        path = records(root)[0]
        content = path.read_bytes()
        path.unlink()
        assert drive.look_up(seat, keys) == [False] + [True] * (COUNT - 1)
        assert listener.deleted == keys[:1]
        path.write_bytes(content)
        assert drive.look_up(seat, keys) == [True] * COUNT
    finally:
        seat.close()


def test_delete(seat: Any, root: str) -> None:
    listener = Listener()
    seat.register_listener(listener)
    keys = fill(seat)
    used = seat.report_status()["used_bytes"]
    seat.delete([*keys[:2], object_key(77)])
    assert listener.deleted == keys[:2]
    assert drive.look_up(seat, keys) == [False, False] + [True] * (COUNT - 2)
    assert seat.get_usage().total_bytes_used == (COUNT - 2) * SIZE
    assert len(records(root)) == COUNT - 2
    assert seat.report_status()["used_bytes"] == used * (COUNT - 2) // COUNT, "the volume's budget has the room again"


def test_usage_and_listing_by_cache_salt(root: str, lists_keys: None) -> None:
    seat = open_seat(root)
    plain, alice = fill(seat), fill(seat, 2, salt="alice")
    assert dict(seat.get_usage().bytes_by_cache_salt) == {"": COUNT * SIZE, "alice": 2 * SIZE}
    assert len(seat.list_l2_keys().entries) == COUNT + 2
    seat.close()
    assert not [path for path in Path(root).rglob("*.json") if "alice" in path.read_text()], "a salt is told to nobody"
    seat = open_seat(root)
    try:
        assert len(seat.list_l2_keys().entries) == COUNT, "who alice is, the volume does not say"
        assert drive.look_up(seat, alice) == [True, True]
        found = {(entry.key.chunk_hash_hex, entry.key.cache_salt) for entry in seat.list_l2_keys().entries}
        assert found == {(key.chunk_hash.hex(), key.cache_salt) for key in (*plain, *alice)}
        listener = Listener()
        seat.register_listener(listener)
        listener.wait_stored(0)
        assert drive.load(seat, [alice[0], plain[1]], [HostObject(SIZE), HostObject(SIZE)]) == [True, True]
        assert set(listener.accessed) == {alice[0], plain[1]}
    finally:
        seat.close()


def test_a_tenant_reads_nothing_of_another(seat: Any) -> None:
    fill(seat, salt="alice")
    assert drive.look_up(seat, [object_key(0), object_key(0, salt="bob")]) == [False, False]
    assert drive.load(seat, [object_key(0, salt="bob")], [HostObject(SIZE)]) == [False]


@pytest.mark.parametrize("page_size", [1, 2, 5, 100])
def test_a_listing_in_pages_has_each_once(seat: Any, page_size: int, lists_keys: None) -> None:
    keys = fill(seat) + fill(seat, 3, rank=0x02010201)
    found, cursor = [], None
    while True:
        page = seat.list_l2_keys(page_size=page_size, cursor=cursor)
        assert len(page.entries) <= page_size
        found += [(entry.key.chunk_hash_hex, entry.key.kv_rank, entry.size_bytes) for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            break
    assert sorted(found) == sorted((key.chunk_hash.hex(), key.kv_rank, SIZE) for key in keys)
    assert not seat.list_l2_keys(model_name="another").entries


@pytest.mark.parametrize(
    "bad", [{"page_size": 0}, {"page_size": -3}, {"page_size": True}, {"cursor": "no"}, {"cursor": "zz:"}]
)
def test_odd_pages_are_value_errors(seat: Any, bad: dict[str, Any], lists_keys: None) -> None:
    with pytest.raises(ValueError, match=r"page_size|cursor"):
        seat.list_l2_keys(**bad)


def test_what_differs_in_layout_is_never_read_as_the_other(seat: Any) -> None:
    keys = fill(seat)
    other = HostObject(SIZE, 99, dtype="torch.float8_e4m3fn")
    assert drive.load(seat, keys[:1], [other]) == [False]
    assert drive.load(seat, keys[:1], [HostObject(SIZE // 2, 99)]) == [False]
    assert other.holds(99)
    assert drive.load(seat, keys[:1], [HostObject(SIZE)]) == [True]


@pytest.mark.parametrize("changed", [{"salt": "b"}, {"chunk_tokens": 512}, {"weights": {drive.MODEL: "label:others"}}])
def test_servers_that_differ_share_no_record(root: str, changed: dict[str, Any]) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    seat = open_seat(root, **changed)
    try:
        assert drive.look_up(seat, keys) == [False] * COUNT
        assert drive.load(seat, keys, [HostObject(SIZE) for _ in keys]) == [False] * COUNT
    finally:
        seat.close()


def test_another_release_of_lmcache_shares_no_record(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    monkeypatch.setattr(lmcache, "__version__", "0.5.0" if lmcache.__version__ == "0.5.1" else "0.5.1")
    seat = open_seat(root)
    try:
        assert drive.look_up(seat, keys) == [False] * COUNT
    finally:
        seat.close()


def test_the_identity_can_be_read(seat: Any, root: str) -> None:
    fill(seat, 1)
    identity = json.loads(next(Path(root).glob("*/namespace.json")).read_text())["identity"]
    assert identity["server"] == {"kind": "lmcache-mp", "layout_version": 1, "lmcache": lmcache.__version__}
    assert identity["layout"] == {"shapes": [[2, 4, SIZE // 16]], "dtypes": ["bfloat16"], "format": ""}
    assert identity["model"]["name"] == drive.MODEL


def test_weights_that_cannot_be_told_end_with_the_run_and_say_so(root: str, caplog: pytest.LogCaptureFixture) -> None:
    seat = open_seat(root, weights={})
    with caplog.at_level("WARNING", logger="lmcache.rewarm"):
        l2_module.logger.addHandler(caplog.handler)
        keys = fill(seat)
        l2_module.logger.removeHandler(caplog.handler)
    assert '"weights": {"test/model"' in caplog.text
    seat.close()
    seat = open_seat(root, weights={})
    try:
        assert drive.look_up(seat, keys) == [False] * COUNT
    finally:
        seat.close()


def test_objects_of_ever_new_sizes_are_not_stored(seat: Any) -> None:
    results = [
        drive.store(seat, [object_key(number)], [HostObject(4096 * (number + 1), 1)]).is_successful()
        for number in range(20)
    ]
    assert results == [True] * 16 + [False] * 4


def test_a_hash_that_is_no_key_is_a_miss(seat: Any) -> None:
    from lmcache.v1.distributed.api import ObjectKey

    keys = [ObjectKey(chunk_hash=b"x" * length, model_name=drive.MODEL, kv_rank=0) for length in (0, 33, 64)]
    assert not drive.store(seat, keys, [HostObject(SIZE) for _ in keys]).is_successful()
    assert drive.look_up(seat, keys) == [False] * 3
    assert drive.load(seat, keys, [HostObject(SIZE) for _ in keys]) == [False] * 3
    short = ObjectKey(chunk_hash=b"abcd", model_name=drive.MODEL, kv_rank=0)
    assert drive.store(seat, [short], [HostObject(SIZE, 4)]).is_successful()
    assert drive.load(seat, [short], [HostObject(SIZE)]) == [True]


def test_an_object_on_a_device_is_a_failed_store_and_a_miss(seat: Any) -> None:
    key, on_device = object_key(1), HostObject(SIZE)
    on_device.raw_tensor.is_cpu = False
    on_device.raw_tensor.device = "cuda:0"
    assert not drive.store(seat, [key], [on_device]).is_successful()
    fill(seat)
    assert drive.load(seat, [key], [on_device]) == [False]


def test_read_only_and_never(root: str) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    seat = open_seat(root, read_only=True)
    assert drive.load(seat, keys, [HostObject(SIZE) for _ in keys]) == [True] * COUNT
    assert not drive.store(seat, [object_key(50)], [HostObject(SIZE)]).is_successful()
    seat.delete(keys)
    assert len(records(root)) == COUNT
    seat.close()
    seat = open_seat(root, policy="never")
    assert drive.look_up(seat, keys) == [False] * COUNT
    seat.close()


def test_a_full_volume_fails_stores_and_nothing_else(tmp_path: Path) -> None:
    root = str(tmp_path / "small")
    create_volume([root], capacity_bytes=64 * MIB)
    seat = open_seat(root)
    try:
        big = 40 * MIB
        results = [
            drive.store(seat, [object_key(number)], [HostObject(big, number + 1)]).is_successful() for number in (1, 2)
        ]
        assert results[0]
        targets = [HostObject(big, 99), HostObject(big, 99)]
        got = drive.load(seat, [object_key(1), object_key(2)], targets)  # the janitor may have made room meanwhile
        for number, hit, target in zip((1, 2), got, targets, strict=True):
            assert target.holds(number + 1 if hit else 99)
    finally:
        seat.close()


def test_many_tasks_at_once(seat: Any) -> None:
    keys = fill(seat, 16)
    targets = [[HostObject(SIZE, 99) for _ in keys] for _ in range(16)]
    tasks = {seat.submit_load_task(keys, some): index for index, some in enumerate(targets)}
    done: dict[int, Any] = {}
    while len(done) < len(tasks):
        drive._wait(
            seat.get_load_event_fd(),
            lambda: [
                done.setdefault(task, found) for task in tasks if (found := seat.query_load_result(task)) is not None
            ],
        )
    assert all(bitmap.popcount() == 16 for bitmap in done.values())
    assert all(target.holds(number + 1) for some in targets for number, target in enumerate(some))


def test_after_close_nothing_raises(root: str) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    seat.close()
    seat.delete(keys)
    seat.submit_store_task(keys, [HostObject(SIZE) for _ in keys])
    assert len(records(root)) == COUNT


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is asked of the disk ends before two seconds have passed, but for deadlines."""

    def opened(config: Any) -> Any:
        return Slow(open_engine(config), delay_s=2.0)

    monkeypatch.setattr(objects_module, "open_engine", opened)


def test_a_load_that_hangs_is_a_miss_at_its_deadline(root: str, request: pytest.FixtureRequest) -> None:
    seat = open_seat(root)
    keys = fill(seat)
    seat.close()
    request.getfixturevalue("slow_disk")
    seat = open_seat(root, load_deadline_s=0.05)
    try:
        targets = [HostObject(SIZE, 99) for _ in keys]
        assert drive.load(seat, keys, targets) == [False] * COUNT
        # This engine reads at once and tells late, so the bytes may be there; if so, they are good and whole.
        assert all(target.holds(99) or target.holds(number + 1) for number, target in enumerate(targets))
        assert seat.report_status()["loads"]["timeout"] > 0
    finally:
        seat.close()


@pytest.mark.usefixtures("slow_disk")
def test_while_a_store_hangs_further_ones_fail_at_once(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_module, "STALL_S", 0.0)
    seat = open_seat(root)
    try:
        first = seat.submit_store_task([object_key(1)], [HostObject(SIZE, 1)])
        drive.until(lambda: seat._oldest_store, "the store was not taken up")
        assert not seat.report_status()["is_healthy"]
        second = seat.submit_store_task([object_key(2)], [HostObject(SIZE, 2)])
        done = seat.pop_completed_store_tasks()
        assert first not in done, "it is still under way, and its memory with it"
        assert not done[second].is_successful()
    finally:
        seat.close()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"rots": ["/x"]}, "did you mean 'roots'"),
        ({"roots": []}, "names no roots"),
        ({"roots": ["relative"]}, "absolute"),
        ({"roots": 3}, "list of paths"),
        ({"weights": "x"}, "weights"),
        ({"weights": {"m": 3}}, "weights"),
        ({"policy": "auto"}, "leave policy out"),
        ({"store": "on_reuse"}, "leave store out"),
        ({"host_bytes": "1GiB"}, "leave host_bytes out"),
        ({"ring_bytes": float("nan")}, "ring_bytes"),
        ({"ring_bytes": 1 << 70}, "ring_bytes"),
        ({"load_deadline_s": float("inf")}, "load_deadline_s"),
        ({"engine": "warp"}, "one of"),
    ],
)
def test_odd_parameters_are_refused_with_what_to_do(root: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(RewarmError) as caught:
        open_seat(root, **params) if "roots" not in params else l2_module.RewarmL2(params)
    assert says in str(caught.value)


def test_a_root_without_a_volume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RewarmError, match="rewarm volume create"):
        open_seat(str(tmp_path))


@pytest.mark.parametrize("version", ["0.4.5", "0.5.7", "1.0.0", "0.6.0rc1", "unknown", ""])
def test_an_untested_lmcache_is_refused_with_the_line_to_change(
    root: str, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(lmcache, "__version__", version)
    with pytest.raises(RewarmError, match='"allow_untested": true in adapter_params'):
        open_seat(root)
    open_seat(root, allow_untested=True).close()


def test_two_seats_on_one_volume_are_refused(seat: Any, root: str) -> None:
    with pytest.raises(RewarmError, match="twice on one volume"):
        open_seat(root)


def test_a_seat_beside_our_connector_is_refused(root: str) -> None:
    connector = claim(CONNECTOR)
    with pytest.raises(RewarmError, match="RewarmConnector"):
        open_seat(root)
    release(connector)
    open_seat(root).close()
