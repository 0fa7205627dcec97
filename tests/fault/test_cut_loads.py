"""A load that is cut while its reads hang: once its result is told, its KV blocks belong to others, and no byte of them
changes, whenever the reads return.

The engine's own hold() keeps the reads in the "disk"; the blocks are poisoned before it lets go.
"""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM's scheduler and connector classes")

from mini_server import BLOCK_TOKENS, CHUNK_BLOCKS, CHUNK_TOKENS, Served
from subject_rewarm import NUM_BLOCKS, Server, make_config

import rewarm.kv.rank
from rewarm.engine import ENGINE_KINDS, Engine, EngineConfig, open_engine, probe_engines
from rewarm.volume import create_volume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rewarm.engine.base import Completion, Transfer

pytestmark = pytest.mark.vllm
SPINS = 100_000


@pytest.fixture(params=ENGINE_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if reason := probe_engines()[request.param]:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """Starts a server with a load deadline of a fifth of a second."""
    started: list[Server] = []
    create_volume([str(tmp_path / "root")], capacity_bytes=64 << 20)

    def server(kind: str) -> Server:
        config = make_config(tmp_path, tmp_path / "root", kind, "model", load_deadline_s=0.2)
        started.append(Server(config, "model"))
        if not hasattr(engine_of(started[-1]), "hold"):
            pytest.skip(f"the {kind} engine has no hold(): its reads cannot be made to hang")
        return started[-1]

    yield server
    for one in started:
        engine_of(one).hold(None)
        one.close()


def engine_of(server: Server) -> Any:
    return server.mini.worker._rank.engine


def stored_prompt(seed: int) -> list[int]:
    rng = random.Random(f"prompt {seed}")
    return rng.choices(range(3, 500), k=rng.randint(2, 5) * CHUNK_TOKENS + 1)


def poison_and_let_go(server: Server) -> None:
    """All blocks get other contents; then the reads return. Afterwards every byte must be as it was made."""
    server.mini.poison()
    engine = engine_of(server)
    engine.hold(None)
    for _ in range(SPINS):
        usage = engine.usage()
        if usage["free_slots"] == usage["num_slots"] and not usage["queued"]:  # a slow worker may not have begun yet
            break
        server.mini.step()
    else:
        raise AssertionError(f"reads did not come back: {engine.usage()}")
    assert server.mini.poisoned_blocks() == list(range(NUM_BLOCKS))


def cut_by_deadline(server: Server, seed: int) -> None:
    """Serve a stored prompt whose reads hang, all (even seeds) or those of one chunk, until the deadline cuts them."""
    rng = random.Random(seed)
    prompt = stored_prompt(seed)
    server.serve(prompt)
    server.mini.forget_device_cache()
    held = rng.randrange(1, len(prompt) // CHUNK_TOKENS) if seed % 2 else 0
    path = server.record_path(prompt, held) if held else ".rec"
    engine_of(server).hold(path)
    (served,) = server.mini.run([prompt])
    assert served.failed_blocks, "nothing was cut"
    assert served.wrong_blocks == 0
    assert served.good_blocks == held * CHUNK_BLOCKS
    poison_and_let_go(server)


@pytest.mark.parametrize("seed", range(2))
def test_cut_by_the_deadline(kind: str, start: Callable[[str], Server], seed: int) -> None:
    cut_by_deadline(start(kind), seed)
    prompt = stored_prompt(seed)
    again = start(kind).serve(prompt)  # the same server leaves the root alone for a while
    assert again == Served(n := len(prompt) // BLOCK_TOKENS, good_blocks=n)


def test_cut_because_the_client_went_away(kind: str, start: Callable[[str], Server]) -> None:
    server = start(kind)
    for seed in range(3):
        prompt = stored_prompt(seed)
        server.serve(prompt)
        server.mini.forget_device_cache()
        engine_of(server).hold(".rec")
        request_id = server.mini.add(prompt)
        for _ in range(seed + 2):
            server.mini.step()
        server.mini.abort(request_id)
        server.mini.drain(lambda: not server.mini.scheduler.requests, "the aborted request to be gone")
        poison_and_let_go(server)


class _Careless:
    """An engine that tells of a cut and lets the read go on into the blocks."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine

    def submit(self, transfers: Sequence[Transfer], *, deadline_s: float | None = None, **rest: Any) -> Any:
        if deadline_s is None:
            return self.inner.submit(transfers, **rest)
        return _Cut(self.inner.submit(transfers, **rest), len(transfers))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Cut:
    def __init__(self, inner: Completion, count: int) -> None:
        self.inner = inner
        self.told = False
        self.count = count

    def take(self) -> list[tuple[int, int]]:
        told, self.told = self.told, True
        return [] if told else [(index, errno.ETIMEDOUT) for index in range(self.count)]

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def results(self) -> list[int]:
        return [errno.ETIMEDOUT] * self.count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_an_engine_that_writes_later_is_seen(start: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := probe_engines()["threads"]:
        pytest.skip(reason)

    def careless(config: EngineConfig) -> Any:
        return _Careless(open_engine(config))

    monkeypatch.setattr(rewarm.kv.rank, "open_engine", careless)
    server = start("threads")
    with pytest.raises(AssertionError, match=r"\[.*\] == \[0, 1"):
        cut_by_deadline(server, 0)
