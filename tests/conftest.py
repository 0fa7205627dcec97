"""Whoever leaves an engine open is named: its threads would otherwise show up in some other test, much later."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT_S = 60.0
"""So long may threads of an engine that was closed take to end, on a busy machine."""

signal.signal(signal.SIGINT, signal.default_int_handler)
# What a shell starts in the background ignores SIGINT, and so would the commands that tests interrupt.


def engine_threads() -> list[str]:
    """Names of the threads of engines and volumes in this process, native ones too."""
    names = [thread.name for thread in threading.enumerate()]
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if name.startswith("rewarm-"))


def left_open() -> str:
    """Names of engines' threads that are left when they have had time to end; "" where none are, told at once."""
    if not engine_threads():
        return ""
    gc.collect()  # an engine that nobody has any more closes itself
    end = time.monotonic() + LIMIT_S
    while (left := engine_threads()) and time.monotonic() < end:
        time.sleep(0.001)
    return ", ".join(sorted(set(left)))


@pytest.fixture(autouse=True, scope="module")
def no_engine_left_by_a_file() -> Iterator[list[str]]:
    """Engines that several tests of a file share are closed at its end; gives a list of what was told already."""
    is_clean = not engine_threads()
    told: list[str] = []
    yield told
    if is_clean and not told and (left := left_open()):
        pytest.fail(f"a fixture of this file left an engine or a volume open: {left}", pytrace=False)


@pytest.fixture(autouse=True)
def no_engine_left_by_a_test(no_engine_left_by_a_file: list[str]) -> Iterator[None]:
    """A test that found no engine leaves none."""
    is_clean = not engine_threads()
    yield
    if is_clean and (left := left_open()):
        no_engine_left_by_a_file.append(left)
        pytest.fail(f"this test left an engine or a volume open: {left}", pytrace=False)
