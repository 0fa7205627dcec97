"""The order of eviction: what goes first, what comes back, how little memory it takes; and the tables under it."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections import OrderedDict

import pytest

from rewarm.volume.janitor.ghosts import Ghosts
from rewarm.volume.janitor.names import NAME_BYTES, NONE, NameTable
from rewarm.volume.janitor.order import FIRST_SHARE, MAX_SHARE, MIN_SHARE, EvictionOrder
from rewarm.volume.quota import tenant_of


def name(number: int) -> bytes:
    """A namespace's number, and a digest as keys are, which ends with the number."""
    return bytes(2) + hashlib.sha256(b"%d" % number).digest()[: NAME_BYTES - 10] + number.to_bytes(8, "big")


def order_of(*numbers: int) -> EvictionOrder:
    order = EvictionOrder()
    order.set_size(bytes(2), 10)
    for number in numbers:
        order.add(name(number))
    return order


def popped(order: EvictionOrder, count: int) -> list[int | None]:
    names = [order.pop() for _ in range(count)]
    return [None if one is None else int.from_bytes(one[-8:], "big") for one in names]


def test_what_was_never_used_goes_first_and_in_the_order_it_came() -> None:
    order = order_of(*range(8))
    order.touch(name(0))
    order.touch(name(3))
    assert popped(order, 9) == [1, 2, 4, 5, 6, 7, 0, 3, None]
    assert (len(order), order.total_bytes, order.small_bytes) == (0, 0, 0)


def test_each_use_buys_a_round() -> None:
    order = order_of(*range(4))
    for number, uses in ((0, 3), (1, 1)):
        for _ in range(uses):
            order.touch(name(number))
    assert popped(order, 2) == [2, 3]
    order.touch(name(0))
    assert popped(order, 3) == [1, 0, None]


def test_what_comes_back_enters_the_main_queue() -> None:
    order = order_of(*range(100))
    assert popped(order, 1) == [0]
    order.add(name(0))
    assert popped(order, 50) == list(range(1, 51))
    assert name(0) in order


def test_a_discarded_record_leaves_its_place_to_another() -> None:
    order = order_of(*range(6))
    order.discard(name(0))
    order.discard(name(4))
    order.add(name(4))
    assert name(4) in order
    assert name(0) not in order
    assert (len(order), order.total_bytes) == (5, 50)
    assert popped(order, 6) == [1, 2, 3, 5, 4, None]


def test_the_small_queue_grows_where_sessions_come_back_too_late_and_shrinks_where_the_main_one_loses() -> None:
    """What was lost from a queue and comes back votes for it."""
    order = order_of()

    def store(number: int) -> None:
        order.add(name(number))
        while len(order) > 100:
            assert order.pop() is not None

    for number in range(4000):
        store(number)
        if number >= 130:
            store(number - 130)
    grown = order.small_share
    assert FIRST_SHARE < grown <= MAX_SHARE
    order = order_of()
    for turn in range(60):  # a set that is used in turns and does not quite fit, between records of one use
        for number in range(95):
            store(number)
            order.touch(name(number))
            store(100_000 + 95 * turn + number)
    assert MIN_SHARE <= order.small_share < grown


def test_saved_and_restored_it_goes_on_as_before() -> None:
    random.seed(3)
    order = order_of(*range(200))
    for _ in range(100):
        order.touch(name(random.randrange(200)))
    popped(order, 50)
    saved = list(order.dump())
    after = EvictionOrder()
    after.set_size(bytes(2), 10)
    after.small_share = order.small_share
    after.restore(saved, [one for one, _, _ in saved] + [name(1000)])
    assert len(after) == 151
    assert popped(after, 151).count(1000) == 1
    again = EvictionOrder()
    again.set_size(bytes(2), 10)
    again.restore(saved, (one for one, _, _ in saved))
    assert popped(again, 150) == popped(order, 150)


def test_of_what_was_saved_only_what_is_present_counts_and_each_record_once() -> None:
    order = order_of(1)
    saved = [(name(2), 0), (name(3), 4), (name(2), 4), (name(9), 255)]
    order.restore([(*one, bytes(7)) for one in saved], [name(1), name(2), name(3), name(5)])
    assert sorted(filter(None, popped(order, 10))) == [1, 2, 3, 5]


ACME, OTHER = tenant_of("acme"), tenant_of("other")


def test_a_tenants_records_count_and_go_first_from_its_unused_ones() -> None:
    order = order_of(*range(10))
    for number in (1, 3, 5, 7):
        order.own(name(number), ACME)
    order.own(name(20), OTHER)
    order.add(name(20))
    order.touch(name(1))
    assert order.held() == {bytes(7): 60, ACME: 40, OTHER: 10}
    assert order.pop_of(ACME, 15) == [name(3), name(5)]
    assert order.held() == {bytes(7): 60, ACME: 20, OTHER: 10}
    assert order.pop_of(ACME, 1000) == [name(7), name(1)]
    assert order.pop_of(ACME, 1000) == order.pop_of(tenant_of("nobody"), 1) == []
    assert popped(order, 8) == [0, 2, 4, 6, 8, 9, 20, None]
    assert order.held() == {}


def test_tenants_are_saved_and_a_place_knows_only_its_own() -> None:
    order = order_of(*range(4))
    order.own(name(2), ACME)
    order.own(name(2), OTHER)
    after = order_of()
    after.restore(list(order.dump()), [name(n) for n in range(4)])
    assert after.held() == {bytes(7): 30, OTHER: 10}
    assert after.pop_of(OTHER, 1) == [name(2)]
    assert popped(after, 1) == [0]
    after.add(name(50))
    after.add(name(51))
    assert after.held() == {bytes(7): 40}, "the number of a record that is gone brings no owner"


def test_a_tenant_at_its_quota_needs_no_more_memory_with_time() -> None:
    order = order_of()
    for number in range(20_000):
        order.own(name(number), ACME)
        order.add(name(number))
        order.pop_of(ACME, order.held()[ACME] - 500)
    assert len(order) == 50
    assert order._names.end < 2000


@pytest.mark.parametrize("seed", range(5))
def test_names_keep_their_numbers(seed: int) -> None:
    """Random additions and removals against a dict."""
    chance = random.Random(seed)
    table, model = NameTable(), dict[bytes, int]()
    for _ in range(6000):
        one = name(chance.randrange(2500))
        if one in model:
            assert table.find(one) == model[one]
            if chance.random() < 0.5:
                table.remove(one)
                table.release(model.pop(one))
        else:
            assert table.find(one) == NONE
            model[one] = table.add(one)
            assert model[one] not in [number for other, number in model.items() if other != one][-20:]
        assert len(table) == len(model)
    assert {one: table.find(one) for one in model} == model
    assert all(table.name(number) == one for one, number in model.items())


def test_ghosts_remember_the_last_evicted_and_their_queue() -> None:
    ghosts, recent = Ghosts(), OrderedDict[int, bool]()
    for number in range(20_000):
        ghosts.put(name(number), was_in_main=number % 3 == 0, keep=5000)
        recent[number] = number % 3 == 0
    last = list(recent.items())[-3000:]
    found = [ghosts.take(name(number), 5000) for number, _ in last]
    assert sum(answer == was for answer, (_, was) in zip(found, last, strict=True)) > 2900, "few are pushed out"
    assert all(ghosts.take(name(number), 5000) is None for number, _ in last), "each is asked for once"
    assert all(ghosts.take(name(number), 5000) is None for number in range(14_000))


def test_a_record_takes_less_than_100_bytes() -> None:
    order = EvictionOrder()
    order.set_size(bytes(2), 10)
    tracemalloc.start()
    try:
        for number in range(60_000):
            order.add(name(number))
        for number in range(60_000, 90_000):  # and as many remembered as there are
            order.add(name(number))
            order.pop()
        order_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert order_bytes / 60_000 < 80
