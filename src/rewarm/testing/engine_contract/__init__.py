"""The suite that every engine passes.

A third party's engine is proven by two lines, run by pytest::

    class TestMyEngine(EngineContract):
        make = staticmethod(lambda config: MyEngine(config))

``make`` gets an EngineConfig and returns an engine; where it raises UnsupportedError the tests are skipped with its
reason. Tests that need I/O to hang are skipped for engines without ``hold(part)`` (hold the I/O of files whose path
contains ``part``, once it counts as submitted; None lets it go on) or without ``usage()`` (a dictionary, of which
"queued" is the number of transfers that have not started).
"""

from __future__ import annotations

import pytest

for _part in ("control", "damage", "helpers", "roots", "transfers"):
    pytest.register_assert_rewrite(f"rewarm.testing.engine_contract.{_part}")

from rewarm.testing.engine_contract.control import ControlContract  # noqa: E402
from rewarm.testing.engine_contract.damage import DamageContract  # noqa: E402
from rewarm.testing.engine_contract.roots import RootsContract  # noqa: E402
from rewarm.testing.engine_contract.transfers import TransferContract  # noqa: E402

__all__ = ["EngineContract"]


class EngineContract(TransferContract, DamageContract, ControlContract, RootsContract):
    """All of it: subclass this, and name ``make``."""
