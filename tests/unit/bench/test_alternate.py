from __future__ import annotations

from collections.abc import Callable, Iterator

from rewarm.bench.alternate import TRIES, alternate
from rewarm.bench.arms import Shape, Turn
from rewarm.units import GIB, KIB, MIB


def _turn(seconds: float) -> Turn:
    return Turn(seconds, GIB, cpu_s=seconds / 10)


def _takes(times: list[float]) -> Callable[[], Turn]:
    left: Iterator[float] = iter(times)
    return lambda: _turn(next(left))


def test_each_turn_is_paired_with_the_base_turns_around_it() -> None:
    taken = alternate(_takes([1.0, 1.1, 1.2]), {"a": _takes([2.0]), "b": _takes([4.0])}, rounds=1)
    a, b = taken.of("a")[0], taken.of("b")[0]
    assert (a.before.seconds, a.after.seconds) == (1.0, 1.1)
    assert (b.before.seconds, b.after.seconds) == (1.1, 1.2)
    assert a.base_seconds == 1.05
    assert abs(a.rate_ratio - 0.5 / ((1 / 1.0 + 1 / 1.1) / 2)) < 1e-9
    assert (taken.repeated, taken.unsteady) == (0, 0)


def test_the_order_shifts_from_round_to_round() -> None:
    order: list[str] = []
    alternate(lambda: _turn(1.0), {"a": lambda: _turn(1.0), "b": lambda: _turn(1.0)}, rounds=3, step=order.append)
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_turn_between_base_turns_that_disagree_is_taken_again() -> None:
    taken = alternate(_takes([1.0, 2.0, 2.0]), {"a": _takes([5.0, 6.0])}, rounds=1)
    assert taken.of("a")[0].turn.seconds == 6.0
    assert (taken.repeated, taken.unsteady) == (1, 0)


def test_it_gives_up_and_says_so() -> None:
    base = _takes([1.0, 2.0] * TRIES)
    taken = alternate(base, {"a": lambda: _turn(1.0)}, rounds=1)
    assert (taken.repeated, taken.unsteady) == (TRIES - 1, 1)


def test_a_shape_is_whole_chunks() -> None:
    shape = Shape(128 * KIB, 4, 32 * MIB)
    assert (shape.num_chunks, shape.num_bytes, shape.label) == (1024, 128 * MIB, "128KiB.x4")
