"""Loads and stores of every side, as figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rewarm.bench.alternate import Pair, Rounds, alternate
from rewarm.bench.arms import Shape, Side, Turn, size_label
from rewarm.bench.cold import ColdCache
from rewarm.bench.report import Figure, measured
from rewarm.bench.stats import Spread, spread
from rewarm.errors import StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Who takes part: the floor, our engines (the first is what ``auto`` chose), and the peer where there is one."""

    floor: Side
    ours: Sequence[Side]
    peer: Side | None
    witnesses: Sequence[Side] = ()
    """Other sides that get figures of their own, ``@`` and their name."""
    cold: ColdCache

    @property
    def sides(self) -> list[Side]:
        """All but the floor."""
        return [*self.ours, *([self.peer] if self.peer else []), *self.witnesses]


def read_cold(contest: Contest, shape: Shape, *, rounds: int, step: Callable[[str], None]) -> list[Figure]:
    """Cold loads of one shape: rates and CPU time of each of our engines."""
    takes = {side.name: partial(load_cold, contest, side, shape) for side in contest.sides}
    taken = alternate(partial(contest.floor.load, shape), takes, rounds=rounds, step=step)
    return [
        *_rate_figures("kv.read." + shape.label, contest, taken),
        *_cpu_figures("kv.cpu." + shape.label, contest, taken),
    ]


def store_new(contest: Contest, shape: Shape, *, rounds: int, step: Callable[[str], None]) -> list[Figure]:
    """Stores of one shape, beside the floor's writes into a new file."""
    takes = {side.name: partial(side.store, shape) for side in contest.sides}
    taken = alternate(partial(contest.floor.store, shape), takes, rounds=rounds, step=step)
    return list(_rate_figures(f"kv.store.{size_label(shape.chunk_bytes)}", contest, taken))


def load_cold(contest: Contest, side: Side, shape: Shape) -> Turn:
    """One load from cold files; that every byte is right is compared afterwards.

    Raises:
        StorageError: The bytes did not come from the device.
        DamageError: They are not what was stored.
    """
    contest.cold.drop(side.files(shape))
    if side.memory:
        side.memory.clear(shape.num_bytes)
    turn = side.load(shape)
    if side.memory:
        side.memory.check(shape.num_bytes, side.name)
    if turn.device_bytes is not None and turn.device_bytes < turn.num_bytes:
        raise StorageError(
            f"{side.name} loaded {turn.num_bytes} bytes, of which only {turn.device_bytes} came from storage",
            hint="something else holds these files in memory; a warm figure would mean nothing",
        )
    return turn


def _rate_figures(name: str, contest: Contest, taken: Rounds) -> Iterator[Figure]:
    for side, pairs, figure_name in _our_pairs(name, contest, taken):
        yield measured(
            figure_name,
            "GiB/s",
            [pair.turn.gib_s for pair in pairs],
            floors=[pair.base_gib_s for pair in pairs],
            peers=[pair.turn.gib_s for pair in taken.of(contest.peer.name)] if contest.peer else (),
            peer_ratio=_peer_ratio(pairs, taken.of(contest.peer.name)) if contest.peer else None,
            engine=engine_of(side),
            note=f"{taken.repeated} turns repeated, {taken.unsteady} kept with an unsteady floor",
        )


def _cpu_figures(name: str, contest: Contest, taken: Rounds) -> Iterator[Figure]:
    for side, pairs, figure_name in _our_pairs(name, contest, taken):
        yield measured(
            figure_name,
            "CPU s/GB",
            [pair.turn.cpu_s_per_gb for pair in pairs],
            floors=[pair.base_cpu_s_per_gb for pair in pairs],
            peers=[pair.turn.cpu_s_per_gb for pair in taken.of(contest.peer.name)] if contest.peer else (),
            engine=engine_of(side),
        )


def _our_pairs(name: str, contest: Contest, taken: Rounds) -> Iterator[tuple[Side, list[Pair], str]]:
    """The engine that ``auto`` chose has the plain name, which goals refer to; others are told apart by ``@engine``."""
    for position, side in enumerate([*contest.ours, *contest.witnesses]):
        yield side, taken.of(side.name), f"{name}@{engine_of(side)}" if position else name


def engine_of(side: Side) -> str:
    """What moves a side's bytes, as figures name it."""
    return side.name.removeprefix("rewarm ").replace(" ", "_")


def _peer_ratio(ours: Sequence[Pair], peers: Sequence[Pair]) -> Spread:
    """Ours over the peer's, each over its own floor of the moment."""
    return spread(mine.rate_ratio / theirs.rate_ratio for mine, theirs in zip(ours, peers, strict=True))
