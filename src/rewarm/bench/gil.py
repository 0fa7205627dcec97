"""Who slows whom: a Python thread that never lets go of the GIL, a loop of short sleeps, and one load.

On a machine with few cores a busy thread also takes a core, and with it what the device's host gives. So the same load
is measured beside a busy process too: what the thread costs beyond that is the GIL's.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from rewarm.bench.alternate import alternate
from rewarm.bench.arms import Shape, Side, Turn
from rewarm.bench.reads import Contest, engine_of, load_cold
from rewarm.bench.report import Figure, measured
from rewarm.bench.stats import percentile

_SLEEP_S = 0.001
_SETTLE_S = 0.05


def busy_neighbour(contest: Contest, shape: Shape, *, rounds: int, step: Callable[[str], None]) -> list[Figure]:
    """Milliseconds that a busy Python thread, and a busy process, add to one load; the floor is a quiet load."""
    figures = []
    ours, peer = contest.ours[0], contest.peer
    for name, neighbour in (("thread", spinning_thread), ("process", spinning_process)):
        added = _added_by(contest, ours, neighbour, shape, rounds, step)
        peers = _added_by(contest, peer, neighbour, shape, rounds, step) if peer else None
        figures.append(
            measured(
                f"kv.gil.load_added_by_{name}",
                "ms",
                added[0],
                floors=added[1],
                peers=peers[0] if peers else (),
                engine=engine_of(ours),
                note="floor: the same load beside nothing",
            )
        )
    return figures


def sleeper(contest: Contest, shape: Shape, *, rounds: int, phase_s: float, step: Callable[[str], None]) -> Figure:
    """p99 of a loop of 1 ms sleeps while loads follow each other; the floor is the same loop beside none."""
    quiet: list[float] = []
    series: dict[str, list[float]] = {}
    for number in range(rounds):
        quiet.append(_p99_ms(partial(time.sleep, phase_s)))
        sides = [contest.ours[0], *([contest.peer] if contest.peer else [])]
        for side in sides if number % 2 else sides[::-1]:
            series.setdefault(side.name, []).append(_p99_ms(partial(_load_for, phase_s, side, shape)))
            step(side.name)
    ours = series.pop(contest.ours[0].name)
    peers = next(iter(series.values()), [])
    return measured("kv.gil.sleep_1ms_p99", "ms", ours, floors=quiet, peers=peers, note="floor: beside no load")


@contextmanager
def spinning_thread() -> Iterator[None]:
    """A thread in a pure Python loop while the body runs."""
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin, name="busy")
    thread.start()
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        stop = True
        thread.join()


@contextmanager
def spinning_process() -> Iterator[None]:
    """A process in a pure Python loop while the body runs."""
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
        try:
            time.sleep(_SETTLE_S)
            yield
        finally:
            process.kill()


def _added_by(
    contest: Contest,
    side: Side,
    neighbour: Callable[[], AbstractContextManager[None]],
    shape: Shape,
    rounds: int,
    step: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """(added, quiet) milliseconds, round by round."""

    def beside() -> Turn:
        with neighbour():
            return load_cold(contest, side, shape)

    taken = alternate(partial(load_cold, contest, side, shape), {side.name: beside}, rounds=rounds, step=step)
    pairs = taken.of(side.name)
    quiet = [pair.base_seconds * 1000 for pair in pairs]
    return [pair.turn.seconds * 1000 - base for pair, base in zip(pairs, quiet, strict=True)], quiet


def _load_for(phase_s: float, side: Side, shape: Shape) -> None:
    limit = time.perf_counter() + phase_s
    while time.perf_counter() < limit:
        side.load(shape)


def _p99_ms(work: Callable[[], None]) -> float:
    """p99 of 1 ms sleeps in a thread of its own while ``work`` runs on this one."""
    naps: list[float] = []
    stop = threading.Event()

    def nap() -> None:
        while not stop.is_set():
            start = time.perf_counter()
            time.sleep(_SLEEP_S)
            naps.append(time.perf_counter() - start)

    thread = threading.Thread(target=nap, name="sleeper")
    thread.start()
    try:
        work()
    finally:
        stop.set()
        thread.join()
    return percentile(naps, 0.99) * 1000
