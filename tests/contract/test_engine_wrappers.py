"""The wrappers do what they say; that they are engines is in test_engines.py."""

from __future__ import annotations

import errno
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.engine import open_engine
from rewarm.engine.base import Engine, EngineConfig, Probe, ToSlot, Transfer, Unlink
from rewarm.errors import BusyError, UsageError
from rewarm.testing.engine_contract.helpers import LIMIT_S, read_of, run, stored
from rewarm.testing.engines import Counting, Faulty, Slow

LONG_S = 3600.0


@pytest.fixture
def inner() -> Iterator[Engine]:
    engine = open_engine(EngineConfig(ring_bytes=1 << 20, slot_bytes=1 << 16))
    yield engine
    engine.close()


def test_counting(inner: Engine, tmp_path: Path) -> None:
    engine = Counting(inner)
    run(engine, Probe(str(tmp_path)), Unlink(str(tmp_path / "x")), Probe(str(tmp_path)))
    run(engine)
    assert engine.batches == 2
    assert engine.transfers == {"Probe": 2, "Unlink": 1}


def test_faulty_by_number(inner: Engine, tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).touch()
    engine = Faulty(inner, fail_at=3, error=errno.ENOSPC)
    assert run(engine, *(Unlink(str(tmp_path / name)) for name in "ab")) == [0, 0]
    completion = engine.submit([Unlink(str(tmp_path / name)) for name in "cd"])
    assert completion.wait(LIMIT_S)
    assert completion.results() == [errno.ENOSPC, 0]
    assert sorted(completion.take()) == [(0, errno.ENOSPC), (1, 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert run(engine, Unlink(str(tmp_path / "c"))) == [0]


def test_faulty_by_function(inner: Engine, tmp_path: Path) -> None:
    def fault(number: int, transfer: Transfer) -> int:
        return errno.EIO if isinstance(transfer, Unlink) else 0

    engine = Faulty(inner, fail_at=fault)
    assert run(engine, Probe(str(tmp_path)), Unlink(str(tmp_path / "x")), Probe(str(tmp_path))) == [0, errno.EIO, 0]


def test_slow_shows_nothing_early(inner: Engine, tmp_path: Path) -> None:
    stored(inner, tmp_path / "r.rec", 4096)
    completion = Slow(inner, delay_s=LONG_S).submit([read_of(tmp_path / "r.rec", 4096, ToSlot())])
    assert not completion.wait(0.01)
    assert not completion.done()
    assert completion.take() == []
    assert not select.select([completion.fileno()], [], [], 0)[0]
    for early, error in ((completion.results, BusyError), (lambda: completion.slot_address(0), UsageError)):
        with pytest.raises(error):
            early()
    completion.cancel()
    assert completion.done()
    assert select.select([completion.fileno()], [], [], LIMIT_S)[0]


def test_slow_ends_at_a_deadline(inner: Engine, tmp_path: Path) -> None:
    completion = Slow(inner, delay_s=LONG_S).submit([Probe(str(tmp_path))], deadline_s=0.01)
    assert select.select([completion.fileno()], [], [], LIMIT_S)[0]
    assert completion.wait(LIMIT_S)
    assert completion.results() == [errno.ETIMEDOUT]
    assert completion.take() == [(0, errno.ETIMEDOUT)]


def test_slow_shows_all_in_the_end(inner: Engine, tmp_path: Path) -> None:
    stored(inner, tmp_path / "r.rec", 4096)
    completion = Slow(inner, delay_s=0.01).submit([read_of(tmp_path / "r.rec", 4096, ToSlot())])
    assert select.select([completion.fileno()], [], [], LIMIT_S)[0]
    assert completion.wait(LIMIT_S)
    assert completion.results() == [0]
    completion.release(0)
