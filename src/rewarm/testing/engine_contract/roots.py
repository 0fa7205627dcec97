"""Several roots: what hangs on one leaves the others their part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rewarm.engine.base import NUM_ROOTS, Completion, Engine, Priority, Probe, ToSlot
from rewarm.errors import UsageError
from rewarm.testing.engine_contract.helpers import (
    Base,
    finished,
    hold,
    num_queued,
    random_buffer,
    read_of,
    run,
    stored,
    until,
    write_of,
)
from rewarm.units import MIB

NUM_WORKERS = 8
NUM_SLOTS = 8
PARTS = [2, 2]
"""Workers and slots that are set aside for each of two roots."""
COUNT = 20


class RootsContract(Base):
    """Transfers name the root that they go to."""

    @pytest.fixture
    def shared(self, engines: Callable[..., Engine], tmp_path: Path) -> Engine:
        """An engine that knows of two roots; each has a record."""
        slot_bytes = MIB + 8192
        engine = engines(num_workers=NUM_WORKERS, ring_bytes=NUM_SLOTS * slot_bytes, slot_bytes=slot_bytes)
        for root in (0, 1):
            stored(engine, tmp_path / f"on{root}.rec", 8192)
            assert run(engine, Probe(str(tmp_path), root=root)) == [0]
        return engine

    @pytest.mark.parametrize("kind", ["read", "probe"])
    def test_one_that_hangs_does_not_take_the_workers_and_slots_of_another(
        self, shared: Engine, tmp_path: Path, kind: str
    ) -> None:
        def submit(root: int, count: int) -> Completion:
            path = tmp_path / f"on{root}.rec"
            one = Probe(str(path), root=root) if kind == "probe" else read_of(path, 8192, ToSlot(), root=root)
            return shared.submit([one] * count)

        hold(shared, "on0.rec")
        hung = submit(0, COUNT)
        until(lambda: num_queued(shared) == COUNT - NUM_WORKERS + PARTS[1], "all that may start to be under way")
        assert finished(submit(1, PARTS[1])) == [0] * PARTS[1]
        assert not hung.done()
        hold(shared, None)
        hung.cancel()
        assert hung.wait()

    def test_one_whose_stores_hang_leaves_another_its_part(self, shared: Engine, tmp_path: Path) -> None:
        buffer = random_buffer(8192)

        def submit(root: int, count: int) -> Completion:
            records = [write_of(tmp_path / f"new{root}.{n}", buffer, 8192, root=root) for n in range(count)]
            return shared.submit(records, priority=Priority.STORE)

        hold(shared, "new0.")
        hung = submit(0, COUNT)
        until(lambda: num_queued(shared) < COUNT, "some of the stores to be under way")
        assert finished(submit(1, COUNT)) == [0] * COUNT
        hold(shared, None)
        assert finished(hung) == [0] * COUNT

    def test_each_has_work_under_way_whoever_came_first(self, engines: Callable[..., Engine], tmp_path: Path) -> None:
        engine = engines(num_workers=2)
        for root in (0, 1):
            stored(engine, tmp_path / f"on{root}.rec", 8192)
        hold(engine, "on0.rec")
        reads = [read_of(tmp_path / f"on{root}.rec", 8192, ToSlot(), root=root) for root in (0, 1)]
        hung = engine.submit([reads[0]] * 2 + [reads[1]])
        until(lambda: dict(hung.take()) == {2: 0}, "the read of the other root to end")
        hold(engine, None)
        hung.release(2)
        assert finished(hung) == [0] * 3

    def test_a_number_that_is_none(self, engine: Engine, tmp_path: Path) -> None:
        last = read_of(tmp_path / "r.rec", 8192, ToSlot(), root=NUM_ROOTS - 1)
        stored(engine, tmp_path / "r.rec", 8192)
        assert run(engine, last) == [0]
        for root in (NUM_ROOTS, -1, 1 << 40):
            for transfer in (replace(last, root=root), Probe(str(tmp_path), root=root)):
                with pytest.raises(UsageError):
                    engine.submit([transfer])
