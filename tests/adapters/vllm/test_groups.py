"""Models with sliding windows, alone and beside full attention, under vLLM's real scheduler; the model is played and
checks every block that attention would read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

import mini_server
from mini_server import BLOCK_TOKENS, CHUNK_TOKENS, MiniServer, Served

from rewarm.adapters.seats import LMCACHE, claim, release
from rewarm.adapters.vllm import versions
from rewarm.adapters.vllm.prompt_keys import prompt_entries
from rewarm.errors import AdapterError, UsageError
from rewarm.kv import presence
from rewarm.kv.chunks import StepReport
from rewarm.volume import Outcome, create_volume

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NUM_BLOCKS = 160
PROMPT_TOKENS = 520
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
WINDOW = 100
"""Tokens; it ends inside a block, and inside a chunk."""
WINDOW_CHUNKS = -(-(WINDOW - 1) // CHUNK_TOKENS)
ONE, TWO, THREE = (WINDOW,), (0, WINDOW), (WINDOW, 0, 2 * WINDOW)
KINDS = pytest.mark.parametrize("windows", [ONE, TWO, THREE], ids=["all slide", "one beside", "two beside"])


class Place:
    """A model and a volume that servers share."""

    def __init__(self, folder: Path) -> None:
        self.model = mini_server.write_tiny_model(folder / "model")
        self.root = folder / "root"
        self.servers: list[MiniServer] = []
        create_volume([str(self.root)], capacity_bytes=64 << 20)

    def server(
        self, windows: tuple[int, ...], *, step_tokens: int = 0, num_blocks: int = NUM_BLOCKS, **extra: Any
    ) -> MiniServer:
        config = mini_server.make_vllm_config(
            self.model,
            {"roots": [str(self.root)], "chunk_tokens": CHUNK_TOKENS, **extra},
            num_blocks,
            kv_connector="RewarmConnector",
            kv_connector_module_path="rewarm.adapters.vllm",
        )
        if step_tokens:
            config.scheduler_config.max_num_batched_tokens = step_tokens
        self.servers.append(MiniServer(config, num_blocks, windows=windows))
        return self.servers[-1]

    def records(self) -> list[Path]:
        return list(self.root.glob("*/??/*.rec"))


@pytest.fixture(autouse=True)
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not turn a slow look at the file system into a miss here."""
    monkeypatch.setattr(presence, "PROBE_LIMIT_S", 60.0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for server in made.servers:
        server.close()


def prompt(number: int) -> list[int]:
    return [number * 13 + index % 251 for index in range(PROMPT_TOKENS)]


def settle(server: MiniServer) -> None:
    storing = server.scheduler.connector._scheduler._presence._storing
    server.drain(lambda: not storing, "stores under way")


def fill(server: MiniServer, *prompts: list[int]) -> None:
    served = server.run(list(prompts))
    assert not any(one.wrong_blocks for one in served)
    settle(server)


def cold(server: MiniServer, *prompts: list[int]) -> list[Served]:
    server.forget_device_cache()
    served = server.run(list(prompts))
    assert not any(one.wrong_blocks for one in served)
    return served


def loads(server: MiniServer, outcome: str) -> float:
    return server.worker._counters.value("rewarm_kv_loads_total", outcome)


def damage(record: Path) -> None:
    data = bytearray(record.read_bytes())
    data[len(data) // 2] ^= 0x10
    record.write_bytes(data)


@KINDS
def test_all_is_found_and_of_windows_only_their_end_is_loaded(place: Place, windows: tuple[int, ...]) -> None:
    server = place.server(windows)
    fill(server, prompt(1), prompt(2))
    assert len(place.records()) == 2 * NUM_CHUNKS * len(windows)
    other = place.server(windows)
    for served in cold(other, prompt(1), prompt(2)):
        assert served.good_blocks == NUM_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
        assert not served.failed_blocks
    needed = [-(-(window - 1) // CHUNK_TOKENS) if window else NUM_CHUNKS for window in windows]
    assert loads(other, "hit") == 2 * sum(needed)


@KINDS
@pytest.mark.parametrize("step_tokens", [48, 176])
def test_short_steps_store_the_same(place: Place, windows: tuple[int, ...], step_tokens: int) -> None:
    """A window has passed the first blocks of a chunk before its last are computed, if steps are short enough."""
    server = place.server(windows, step_tokens=step_tokens)
    fill(server, prompt(1))
    (served,) = cold(server, prompt(1))
    assert served.good_blocks == NUM_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS


@KINDS
def test_generated_tokens_are_stored_too(place: Place, windows: tuple[int, ...]) -> None:
    server = place.server(windows)
    request = server.add(prompt(1), output_tokens=3 * CHUNK_TOKENS)
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    tokens = list(server._live.pop(request).request.all_token_ids)
    settle(server)
    (served,) = cold(server, tokens)
    assert served.good_blocks == len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS // BLOCK_TOKENS


@KINDS
def test_a_damaged_record_fails_the_whole_load_and_all_is_right(place: Place, windows: tuple[int, ...]) -> None:
    fill(place.server(windows), prompt(1))
    for record in place.records():
        damage(record)
    server = place.server(windows)
    (served,) = cold(server, prompt(1))
    assert served.good_blocks == 0
    assert loads(server, "damaged") > 0
    settle(server)
    (again,) = cold(server, prompt(1))
    assert again.good_blocks == NUM_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS, "it was stored again"


@KINDS
def test_each_damaged_record_alone_is_never_served(place: Place, windows: tuple[int, ...]) -> None:
    fill(place.server(windows), prompt(1))
    whole = {record: record.read_bytes() for record in place.records()}
    for damaged in whole:
        for record, data in whole.items():
            record.parent.mkdir(exist_ok=True)
            record.write_bytes(data)
        damage(damaged)
        server = place.server(windows, read_only=True)
        cold(server, prompt(1), prompt(1)[:300] + prompt(2)[300:])
        assert server.scheduler.kv_cache_manager.usage == 0


def test_a_request_whose_load_failed_needs_no_more_blocks_than_there_are(place: Place) -> None:
    """vLLM counts a load that failed against the room for the next one of the same request."""
    fill(place.server(TWO), prompt(1))
    side = place.servers[0].scheduler.connector._scheduler
    last = side._chunk_ids(side._track(place.servers[0].make_request(prompt(1), "r")))[-1]
    names = [shard.key(presence.group_chunk(last, 1)).hex() for shard in side._presence._shards]
    damage(next(record for record in place.records() if record.stem in names))
    server = place.server(TWO, num_blocks=2 * PROMPT_TOKENS // BLOCK_TOKENS + 4)
    (served,) = cold(server, prompt(1))
    assert served.good_blocks == 0


@KINDS
def test_requests_that_preempt_each_other_are_served_right(place: Place, windows: tuple[int, ...]) -> None:
    server = place.server(windows, num_blocks=48 * len(windows))
    fill(server, *(prompt(n)[:300] for n in range(3)))
    server.forget_device_cache()
    ids = [server.add(prompt(n)[:300], output_tokens=200) for n in range(4)]
    requests = [server.scheduler.requests[request_id] for request_id in ids]
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the requests")
    assert not any(server._live.pop(request_id).served.wrong_blocks for request_id in ids)
    assert 0 not in windows or sum(request.num_preemptions for request in requests) > 0


def test_what_a_window_needs_is_looked_for_before_each_end(place: Place) -> None:
    """A record of a window is missing in the middle: what ends behind it is found, by its own window."""
    server = place.server(TWO)
    fill(server, prompt(1))
    side = server.scheduler.connector._scheduler
    request = server.make_request(prompt(1), "r")
    bases = side._chunk_ids(side._track(request))
    side.request_finished(request)
    side._presence.take(StepReport(failed={presence.group_chunk(bases[2], 1): Outcome.MISS}))
    assert side._presence.count_present(bases, 0) == NUM_CHUNKS
    assert side._presence.count_present(bases[: 2 + WINDOW_CHUNKS], 0) == 2


def test_a_split_of_the_policy_ends_where_the_windows_are_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from rewarm.kv.choose import LoadPolicy

    fill(place.server(TWO), prompt(1))
    monkeypatch.setattr(LoadPolicy, "decide", lambda _self, hit: hit.num_stored_tokens - 3 * CHUNK_TOKENS)
    (served,) = cold(place.server(TWO, policy="auto"), prompt(1))
    assert served.good_blocks == (NUM_CHUNKS - 3) * CHUNK_TOKENS // BLOCK_TOKENS


def test_another_window_is_another_namespace(place: Place) -> None:
    fill(place.server(TWO), prompt(1))
    (served,) = cold(place.server((0, WINDOW + 1)), prompt(1))
    assert served.good_blocks == 0
    assert len(list(place.root.glob("*/namespace.json"))) == 2


def test_a_server_that_has_lmcache_with_rewarm_is_refused(place: Place) -> None:
    seat = claim(LMCACHE)
    with pytest.raises(UsageError, match="stored twice"):
        place.server((0, 32), chunk_tokens=32)
    release(seat)
    assert place.server((0, 32), chunk_tokens=32)
    with pytest.raises(UsageError, match="stored twice"):
        claim(LMCACHE)


def test_a_chunk_longer_than_the_window_is_refused(place: Place) -> None:
    with pytest.raises(UsageError, match="more than this model's sliding window of 32 tokens"):
        place.server((0, 32))
    assert place.server((0, 32), chunk_tokens=32)


@pytest.mark.parametrize(("windows", "hint"), [(ONE, "use vLLM 0.30"), (TWO, "--disable-hybrid-kv-cache-manager")])
def test_a_server_that_cannot_be_told_of_a_failed_request_is_refused(
    place: Place, windows: tuple[int, ...], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewarm.adapters.vllm import groups

    assert versions.can_fail_requests()
    monkeypatch.setattr(groups, "can_fail_requests", lambda: False)
    with pytest.raises(AdapterError, match="cannot be told that a request of theirs failed") as caught:
        place.server(windows)
    assert hint in str(caught.value)


@KINDS
def test_the_records_of_a_prompt_are_known_by_its_tokens(place: Place, windows: tuple[int, ...]) -> None:
    fill(place.server(windows), prompt(1))
    namespaces = {
        bytes.fromhex(path.parent.name): json.loads(path.read_text()) for path in place.root.glob("*/namespace.json")
    }
    (told,) = namespaces.values()
    identities = {key: told.get("identity", told) for key in namespaces}
    num_chunks, entries = prompt_entries(identities, prompt(1))
    assert num_chunks == NUM_CHUNKS
    assert {key.hex() for _, key in entries} == {record.stem for record in place.records()}
