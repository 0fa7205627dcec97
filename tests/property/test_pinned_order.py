"""The order of eviction with pins, against a model: random stores, uses, removals, pins and evictions."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rewarm.volume.janitor.order import EvictionOrder
from rewarm.volume.quota import NO_TENANT, tenant_of

SIZE = 10
ACME = tenant_of("acme")
NUMBERS = st.integers(0, 29)


def name(number: int) -> bytes:
    return bytes(2) + hashlib.sha256(b"%d" % number).digest()


class PinnedOrder(RuleBasedStateMachine):
    """The model: which records are there, whose they are, which are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[int, bytes] = {}
        self.pinned: frozenset[int] = frozenset()
        self.early: dict[int, bytes] = {}
        self.order = self.new()

    @staticmethod
    def new() -> EvictionOrder:
        order = EvictionOrder()
        order.set_size(bytes(2), SIZE)
        return order

    @rule(numbers=st.lists(NUMBERS, max_size=10))
    def add(self, numbers: list[int]) -> None:
        for number in numbers:
            self.order.add(name(number))
            if number not in self.there:
                self.there[number] = self.early.pop(number, NO_TENANT)

    @rule(number=NUMBERS)
    def touch(self, number: int) -> None:
        self.order.touch(name(number))

    @rule(number=NUMBERS)
    def own(self, number: int) -> None:
        self.order.own(name(number), ACME)
        (self.there if number in self.there else self.early)[number] = ACME

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        self.order.discard(name(number))
        self.there.pop(number, None)

    @rule(numbers=st.frozensets(NUMBERS, max_size=15))
    def pin(self, numbers: frozenset[int]) -> None:
        self.pinned = numbers
        self.order.pin({name(number) for number in numbers})

    @rule(count=st.integers(1, 40))
    def pop(self, count: int) -> None:
        for _ in range(count):
            found = self.order.pop()
            free = set(self.there) - self.pinned
            if found is None:
                assert not free, "something was left that is not pinned"
                assert not self.order.can_pop
                return
            (number,) = (number for number in self.there if name(number) == found)
            assert number in free
            del self.there[number]

    @rule(num_bytes=st.integers(0, 100))
    def pop_of_tenant(self, num_bytes: int) -> None:
        chosen = self.order.pop_of(ACME, num_bytes)
        numbers = [number for number in self.there if name(number) in chosen]
        mine = [n for n, tenant in self.there.items() if tenant == ACME and n not in self.pinned]
        assert len(numbers) == len(chosen) == min(-(-num_bytes // SIZE), len(mine))
        assert set(numbers) <= set(mine)
        for number in numbers:
            del self.there[number]

    @rule()
    def restart(self) -> None:
        """The order is saved and read by another janitor, which hears of the pins afterwards."""
        saved = list(self.order.dump())
        assert all(state < 8 for _, state, _ in saved)
        self.order = self.new()
        self.order.restore(saved, [one for one, _, _ in saved])
        self.order.pin({name(number) for number in self.pinned})
        self.early.clear()

    @invariant()
    def it_knows_what_is_there_and_whose_it_is(self) -> None:
        assert len(self.order) == len(self.there)
        assert all(name(number) in self.order for number in self.there)
        held = {NO_TENANT: 0, ACME: 0}
        for tenant in self.there.values():
            held[tenant] += SIZE
        assert self.order.held() == {tenant: size for tenant, size in held.items() if size}
        assert 0 <= self.order.small_bytes <= self.order.total_bytes <= len(self.there) * SIZE


TestPinnedOrder = PinnedOrder.TestCase
TestPinnedOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, print_blob=True)
