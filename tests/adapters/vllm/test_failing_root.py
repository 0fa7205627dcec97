"""One server under load, whose root fills up, turns read-only, answers with EIO and is gone: only misses come of it.

The file system is a real one, so that the kernel itself says no, to every engine.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm_server as vs
from small_disk import SmallDisk
from vllm_server import CHUNK_TOKENS, Server, needs_vllm, prompt_of, wait_until

from rewarm.testing.tiny_model import ensure_tiny_model

pytestmark = [pytest.mark.server, pytest.mark.deep, needs_vllm]

MIB = 1 << 20
PROMPT_TOKENS = 1024
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
STORED = range(8)
FRESH = range(100, 108)
"""Two for each stage, which nobody asked before it."""
DEVICE_TOKENS = 4 * PROMPT_TOKENS + 2048
"""Fewer than the stored prompts have: asked in turn, each was pushed out before it is asked again."""
ANSWERS_A_STAGE = 2 * len(STORED)


class Load:
    """Clients that ask the stored prompts in turn until they are told to stop, and keep what was wrong."""

    def __init__(self, server: Server, expected: dict[int, tuple[int, ...]]) -> None:
        self._server, self._expected = server, expected
        self._turns = itertools.cycle(STORED)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.answers = 0
        self.troubles: list[str] = []
        self._clients = [threading.Thread(target=self._ask_on) for _ in range(2)]

    def __enter__(self) -> Load:  # noqa: PYI034
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number = next(self._turns)
            try:
                tokens = self._server.ask(prompt_of(number, PROMPT_TOKENS)).tokens
                trouble = "" if tokens == self._expected[number] else f"prompt {number}: other tokens"
            except (OSError, AssertionError) as error:
                trouble = f"prompt {number}: {error!r}"
            with self._lock:
                self.answers += 1
                self.troubles += [trouble] if trouble else []

    def wait_for_more(self, count: int) -> None:
        """Until so many more were answered."""
        end = self.answers + count
        wait_until(lambda: self.answers >= end or self.troubles, f"{count} more answers", 600)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if reason := SmallDisk.missing(tmp_path / "probe"):
        pytest.skip(reason)
    made = SmallDisk(tmp_path, 1024 * MIB)
    yield made
    made.close()


def test_every_request_is_answered_rightly_through_all_four(disk: SmallDisk, tmp_path: Path) -> None:
    model = ensure_tiny_model(tmp_path / "model")
    transfer = vs.transfer_config(disk.root, "--chunk-tokens", str(CHUNK_TOKENS), size="800MiB")
    flags = ("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", str(DEVICE_TOKENS // 32))
    with Server(model, tmp_path / "server.log", *flags, transfer=transfer) as server:
        expected = {
            number: server.ask(prompt_of(number, PROMPT_TOKENS), salt="computed alone").tokens
            for number in (*STORED, *FRESH)
        }
        for number in STORED:
            assert server.ask(prompt_of(number, PROMPT_TOKENS)).tokens == expected[number]
        server.wait_for_records(disk.root, (2 * len(STORED) + len(FRESH)) * NUM_CHUNKS)

        def outcomes(name: str, outcome: str) -> float:
            return server.metric(f"rewarm_kv_{name}_total", outcome=outcome)

        fresh = iter(FRESH)

        def stage(name: str, begin: Callable[[], None], write_error: int) -> None:
            """Begin it, prove that it is there, and let it last for enough answers."""
            begin()
            wait_until(lambda: disk.error_of_a_write() == write_error, f"{name}: {errno.errorcode.get(write_error)}")
            before = outcomes("stores", "stored")
            for number in itertools.islice(fresh, 2):
                assert server.ask(prompt_of(number, PROMPT_TOKENS)).tokens == expected[number], name
            load.wait_for_more(ANSWERS_A_STAGE)
            assert load.troubles == [], name
            if write_error in {errno.EROFS, errno.EIO}:
                assert outcomes("stores", "stored") == before, f"{name}: something was stored"

        with Load(server, expected) as load:
            load.wait_for_more(ANSWERS_A_STAGE)
            assert outcomes("loads", "hit") > 0, "the load does not reach the volume"
            stage("full", disk.fill, errno.ENOSPC)
            made_room = server.metric("rewarm_evicted_records_total")
            assert made_room + outcomes("stores", "failed") > 0, "no store met the full disk"
            hits = outcomes("loads", "hit")
            stage("read-only", disk.make_read_only, errno.EROFS)
            assert outcomes("loads", "hit") > hits, "what lies there can still be read"
            errors = server.metric("rewarm_io_errors_total")
            stage("EIO", disk.fail, errno.EIO)
            wait_until(lambda: server.metric("rewarm_io_errors_total") > errors, "I/O errors in the metrics")
            stage("removed", disk.remove, 0)
            answers = load.answers
        assert load.troubles == []
        assert server.metric("rewarm_damaged_records_total") == 0
        print(f"{made_room:g} records made room on the full disk; {answers} answers under load, all as computed alone")
    assert server.process.returncode == 0
    assert list(disk.root.iterdir()) == [], "something was written below the empty mount point"
