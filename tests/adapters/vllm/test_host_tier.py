"""The connector with a host tier under vLLM's own scheduler, the model played: what comes from where, and right."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

import mini_server
from mini_server import BLOCK_TOKENS, CHUNK_TOKENS, MiniServer
from volumes import wait_for

from rewarm.engine.workers import TMPFS, file_system_type
from rewarm.errors import RewarmError
from rewarm.kv.decision_log import log_files, read_log
from rewarm.kv.policy import PrefixHit
from rewarm.volume import create_volume
from rewarm.volume.tiered import TieredVolume

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NUM_BLOCKS = 96
PROMPT_TOKENS = 300
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
HOST_BYTES = 64 << 20


class Place:
    """A model, a volume, and a place in memory for its host tier."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.model = mini_server.write_tiny_model(folder / "model")
        self.root, self.memory = folder / "root", memory
        self.servers: list[MiniServer] = []
        self.host = memory / create_volume([str(self.root)], capacity_bytes=64 << 20).volume_id

    def server(self, **extra: Any) -> MiniServer:
        settings = {"host_bytes": HOST_BYTES, "host_root": str(self.memory), "chunk_tokens": CHUNK_TOKENS}
        config = mini_server.make_vllm_config(
            self.model,
            {"roots": [str(self.root)], **settings, **extra},
            NUM_BLOCKS,
            kv_connector="RewarmConnector",
            kv_connector_module_path="rewarm.adapters.vllm",
        )
        self.servers.append(MiniServer(config, NUM_BLOCKS))
        return self.servers[-1]

    def copies(self) -> list[Path]:
        return sorted(self.host.glob("*/??/*.rec"))

    def records(self) -> int:
        return sum(1 for _ in self.root.glob("*/??/*.rec"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if file_system_type("/dev/shm") != TMPFS:
        pytest.skip("/dev/shm is no tmpfs here")
    memory = Path(tempfile.mkdtemp(prefix="rewarm-test-", dir="/dev/shm"))
    made = Place(tmp_path, memory)
    yield made
    for server in made.servers:
        server.close()
    shutil.rmtree(memory)


def prompt(number: int) -> list[int]:
    return [number * 13 + index % 251 for index in range(PROMPT_TOKENS)]


def host_hits(server: MiniServer) -> float:
    return float(server.worker._counters.value("rewarm_host_loads_total", "hit"))


def cold(server: MiniServer, *numbers: int) -> None:
    """All of these prompts are found once the device has forgotten them, and none is wrong."""
    server.forget_device_cache()
    served = server.run([prompt(number) for number in numbers])
    assert not any(one.wrong_blocks or one.failed_blocks for one in served)
    assert [one.good_blocks for one in served] == [NUM_CHUNKS * CHUNK_BLOCKS] * len(numbers)


def promoted(place: Place, server: MiniServer) -> None:
    """Two prompts are stored, and loaded until they lie in memory."""
    server.run([prompt(1), prompt(2)], until=lambda: place.records() >= 2 * NUM_CHUNKS)
    for _ in range(2):
        cold(server, 1, 2)
    assert volume_of(server).wait_promoted(30)
    assert len(place.copies()) == 2 * NUM_CHUNKS


def volume_of(server: MiniServer) -> TieredVolume:
    volume = server.worker._rank.volume
    assert isinstance(volume, TieredVolume)
    return volume


def test_what_is_loaded_again_comes_from_memory(place: Place) -> None:
    server = place.server()
    promoted(place, server)
    assert host_hits(server) == 0
    cold(server, 1, 2)
    assert host_hits(server) == 2 * NUM_CHUNKS
    assert place.records() == 2 * NUM_CHUNKS, "and flash has all of it"
    server.scheduler.connector._scheduler.close()
    (log,) = log_files(str(place.root / ".rewarm" / "policy"))
    ended = [line for line in read_log(str(log)).lines if line.get("num_load_tokens")]
    assert [line["host_bytes"] / line["load_bytes"] for line in ended] == [0.0] * 4 + [1.0] * 2
    # A server that comes after it finds both, and its scheduler's side knows what is in memory alone.
    shutil.rmtree(next(place.root.glob("?" * 64)))
    server.close()
    place.servers.remove(server)
    after = place.server()
    cold_start = after.run([prompt(1)])
    assert cold_start[0].good_blocks == NUM_CHUNKS * CHUNK_BLOCKS
    assert host_hits(after) == NUM_CHUNKS


@pytest.mark.parametrize("harm", ["damaged", "removed", "all removed"])
def test_what_memory_lost_is_served_from_flash(place: Place, harm: str) -> None:
    server = place.server()
    promoted(place, server)
    if harm == "damaged":
        for copy in place.copies():
            copy.write_bytes(copy.read_bytes()[:-9] + b"not these")
    elif harm == "removed":
        for copy in place.copies():
            copy.unlink()
    else:
        shutil.rmtree(place.host)
    cold(server, 1, 2)
    assert host_hits(server) == 0
    assert server.worker._counters.value("rewarm_kv_loads_total", "hit") == 6 * NUM_CHUNKS
    cold(server, 1, 2)


def test_two_servers_share_what_either_promoted(place: Place) -> None:
    first, second = place.server(), place.server()
    promoted(place, first)
    second.run([prompt(1)])
    namespace = next(iter(volume_of(second)._namespaces.values()))
    wait_for(lambda: len(namespace._host) == 2 * NUM_CHUNKS, "a look at the host tier")  # type: ignore[arg-type]
    before = host_hits(second)
    cold(second, 1, 2)
    assert host_hits(second) - before == 2 * NUM_CHUNKS


def test_a_server_without_room_for_it_does_not_start(place: Place) -> None:
    with pytest.raises(RewarmError, match=r"the host tier needs .*, and .* has .* left"):
        place.server(host_bytes=1 << 60)
    assert place.copies() == []


def test_auto_knows_what_of_a_prompt_lies_in_memory(place: Place) -> None:
    server = place.server(policy="auto")
    server.run([prompt(1), prompt(2)], until=lambda: place.records() >= 2 * NUM_CHUNKS)
    side = server.scheduler.connector._scheduler
    hits: list[PrefixHit] = []

    def decide(hit: PrefixHit) -> int:
        """Loads all: this model computes in no time."""
        hits.append(hit)
        return hit.num_stored_tokens

    side._pilot.decide = decide
    for _ in range(2):
        cold(server, 1, 2)
    assert {hit.num_host_chunks for hit in hits} == {0}
    assert volume_of(server).wait_promoted(30)
    (namespace,) = side._setup.volume._namespaces.values()
    wait_for(lambda: len(namespace._host) == 2 * NUM_CHUNKS, "the scheduler's side to look at the host tier")
    hits.clear()
    cold(server, 1)
    assert {(hit.num_host_chunks, hit.num_chunks) for hit in hits} == {(NUM_CHUNKS, NUM_CHUNKS)}
    hits.clear()
    place.copies()[0].unlink()
    namespace.rescan()
    cold(server, 1, 2)
    assert {hit.num_host_chunks for hit in hits} == {NUM_CHUNKS - 1, NUM_CHUNKS}
    assert side._pilot.costs.storage.host.bytes_a_s > 0, "what memory delivers is learned"
    assert not side._pilot._is_off
