"""Every engine keeps the promise of engine/base.py: one suite, and the wrappers pass it too."""

from __future__ import annotations

from dataclasses import replace

from rewarm.engine import open_engine
from rewarm.testing.engine_contract import EngineContract
from rewarm.testing.engines import Counting, Faulty, Slow


class TestPure(EngineContract):
    make = staticmethod(lambda config: open_engine(replace(config, kind="pure")))


class TestThreads(EngineContract):
    make = staticmethod(lambda config: open_engine(replace(config, kind="threads")))


class TestUring(EngineContract):
    make = staticmethod(lambda config: open_engine(replace(config, kind="io_uring")))


class TestWrapped(EngineContract):
    """All three wrappers, none of which does anything."""

    make = staticmethod(
        lambda config: Slow(Faulty(Counting(open_engine(replace(config, kind="auto"))), fail_at=0), delay_s=0.0)
    )
