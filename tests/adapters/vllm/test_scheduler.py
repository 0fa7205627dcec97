"""Both sides of the connector under vLLM's real scheduler, the model played: what is loaded, stored and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

import mini_server
from mini_server import BLOCK_TOKENS, CHUNK_TOKENS, MiniServer

from rewarm.adapters.vllm.held import STUCK_S, HeldRequests
from rewarm.kv import presence
from rewarm.kv.choose import LoadPolicy
from rewarm.kv.decision_log import log_files, read_log
from rewarm.metrics import DECISION_REASONS
from rewarm.volume import Volume, create_volume
from rewarm.volume.quota import tenant_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NUM_BLOCKS = 96
PROMPT_TOKENS = 300
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


class Place:
    """A model and a volume that servers with different settings share."""

    def __init__(self, folder: Path) -> None:
        self.model = mini_server.write_tiny_model(folder / "model")
        self.root = folder / "root"
        self.servers: list[MiniServer] = []
        create_volume([str(self.root)], capacity_bytes=64 << 20)

    def server(self, **extra: Any) -> MiniServer:
        config = mini_server.make_vllm_config(
            self.model,
            {"roots": [str(self.root)], "chunk_tokens": CHUNK_TOKENS, **extra},
            NUM_BLOCKS,
            kv_connector="RewarmConnector",
            kv_connector_module_path="rewarm.adapters.vllm",
        )
        self.servers.append(MiniServer(config, NUM_BLOCKS))
        return self.servers[-1]

    def records(self) -> int:
        return sum(1 for _ in self.root.glob("*/??/*.rec"))

    def fill(self, server: MiniServer, prompts: list[list[int]]) -> None:
        server.run(prompts)
        self.settle(server)
        assert self.records() >= len(prompts) * NUM_CHUNKS

    def settle(self, server: MiniServer) -> None:
        """Until the scheduler's side knows the end of every store."""
        storing = server.scheduler.connector._scheduler._presence._storing
        server.drain(lambda: not storing, "stores under way")


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


def counted(server: MiniServer, name: str, *labels: str) -> float:
    sides = (server.worker, server.scheduler.connector)
    return sum(side._counters.value(name, *labels) for side in sides)


def cold(server: MiniServer, *prompts: list[int]) -> list[int]:
    """Blocks that are found once the device has forgotten all; none may be wrong."""
    server.forget_device_cache()
    served = server.run(list(prompts))
    assert not any(one.wrong_blocks or one.failed_blocks for one in served)
    return [one.good_blocks for one in served]


def test_tokens_that_were_looked_up_and_found_are_counted_once_a_request(place: Place) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    assert counted(server, "rewarm_kv_lookup_tokens_total") == PROMPT_TOKENS
    assert cold(server, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]
    assert counted(server, "rewarm_kv_lookup_tokens_total") == 2 * PROMPT_TOKENS
    assert counted(server, "rewarm_kv_hit_tokens_total") == NUM_CHUNKS * CHUNK_TOKENS
    assert counted(server, "rewarm_kv_loads_total", "hit") == NUM_CHUNKS
    assert counted(server, "rewarm_kv_load_seconds") == 1


def test_requests_that_share_a_prefix_share_one_load(place: Place) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    assert all(found >= NUM_CHUNKS * CHUNK_BLOCKS for found in cold(server, prompt(1), prompt(1), prompt(1)))
    assert counted(server, "rewarm_kv_loads_total", "hit") == NUM_CHUNKS


def test_a_part_of_a_chunk_that_is_resident_is_not_loaded_again(place: Place) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    resident_blocks = CHUNK_BLOCKS + 1
    server.forget_device_cache()
    server.run([prompt(1)[: resident_blocks * BLOCK_TOKENS + 1]])
    before = counted(server, "rewarm_kv_load_bytes_total")
    (served,) = server.run([prompt(1)])
    assert served.good_blocks == NUM_CHUNKS * CHUNK_BLOCKS
    assert not served.wrong_blocks
    block_bytes = mini_server.NUM_LAYERS * server.page_words * 4
    loaded_blocks = (counted(server, "rewarm_kv_load_bytes_total") - before) / block_bytes
    assert loaded_blocks == NUM_CHUNKS * CHUNK_BLOCKS - resident_blocks


def test_generated_tokens_are_stored_too(place: Place) -> None:
    server = place.server()
    request = server.add(prompt(1), output_tokens=2 * CHUNK_TOKENS)
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    tokens = list(server._live.pop(request).request.all_token_ids)
    place.settle(server)
    assert cold(server, tokens) == [len(tokens) // CHUNK_TOKENS * CHUNK_BLOCKS]


def test_stores_that_find_no_room_are_made_up_for_while_the_request_runs(place: Place) -> None:
    server = place.server(store_buffer_bytes=64 << 10)  # room for one chunk
    server.add(prompt(1), "long", output_tokens=1000)
    server.drain(lambda: place.records() >= NUM_CHUNKS, "all chunks stored")
    server.abort("long")
    server.drain(lambda: not server.scheduler.requests, "the end of the request")
    server._live.pop("long")
    (found,) = cold(server, prompt(1))
    assert found >= NUM_CHUNKS * CHUNK_BLOCKS
    assert counted(server, "rewarm_kv_stores_total", "failed") == 0


def test_a_request_that_ends_before_its_chunks_found_room_keeps_its_blocks_until_they_have(place: Place) -> None:
    server = place.server(store_buffer_bytes=64 << 10)  # room for one chunk
    server.add(prompt(1), "short")
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    assert "short" in server.scheduler.requests  # its blocks are held
    server.drain(lambda: not server.scheduler.requests, "its blocks to come back")
    server._live.pop("short")
    place.settle(server)
    assert place.records() == NUM_CHUNKS
    assert server.scheduler.kv_cache_manager.usage == 0
    (found,) = cold(server, prompt(1))
    assert found >= NUM_CHUNKS * CHUNK_BLOCKS
    assert counted(server, "rewarm_kv_stores_total", "dropped") == 0


def test_no_more_than_a_quarter_of_the_blocks_is_held_for_stores(place: Place) -> None:
    server = place.server(store_buffer_bytes=64 << 10)
    for number in range(3):
        server.add(prompt(number), f"r{number}")
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the requests")
    assert 0 < len(server.scheduler.requests) < 3
    assert counted(server, "rewarm_kv_stores_total", "dropped") > 0
    server.drain(lambda: not server.scheduler.requests, "the blocks that are held")


def test_blocks_that_are_held_come_back_when_stores_do_not_get_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.server(store_buffer_bytes=64 << 10)  # room for one chunk
    buffer = server.worker._rank.worker._buffer
    now = 0.0
    monkeypatch.setattr(buffer, "_clock", lambda: now)
    hung: list[Any] = []
    with monkeypatch.context() as hanging:
        hanging.setattr(Volume, "queue_stores", lambda self, *stores: hung.append(stores))
        server.scheduler.connector._scheduler._held = HeldRequests(NUM_BLOCKS)
        server.add(prompt(1), "stuck")
        server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
        for _ in range(5):
            server.step()
        assert "stuck" in server.scheduler.requests
        now = STUCK_S
        server.drain(lambda: not server.scheduler.requests, "the blocks to be given up")
        assert counted(server, "rewarm_kv_stores_total", "dropped") == NUM_CHUNKS - 1
        server.run([prompt(2)])
        assert not server.scheduler.requests, "nothing is held while stores do not get on"
        assert counted(server, "rewarm_kv_stores_total", "dropped") == 2 * NUM_CHUNKS - 1
    for namespace, payloads, handle in hung:
        server.worker._rank.volume.queue_stores(namespace, payloads, handle)
    place.settle(server)
    server.add(prompt(3), "later")
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    assert "later" in server.scheduler.requests, "blocks are held again"
    server.drain(lambda: not server.scheduler.requests, "its blocks to come back")
    place.settle(server)
    assert place.records() == 1 + NUM_CHUNKS
    assert counted(server, "rewarm_kv_stores_total", "dropped") == 2 * NUM_CHUNKS - 1


def test_nothing_is_stored_behind_a_store_that_failed_until_the_gap_is_closed(place: Place) -> None:
    server = place.server()
    failed = lose_one_store(place, server, 1)
    server.add(prompt(1), "long", output_tokens=8 * CHUNK_TOKENS)
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    tokens = list(server._live.pop("long").request.all_token_ids)
    num_chunks = len(tokens) // CHUNK_TOKENS
    place.settle(server)
    assert len(failed) == 1
    num_stored, num_dropped = place.records(), counted(server, "rewarm_kv_stores_total", "dropped")
    assert num_dropped > 0, "what was computed once the failure was known"
    assert num_stored + num_dropped == num_chunks - 1
    assert cold(server, tokens) == [CHUNK_BLOCKS], "a lookup ends at the gap"
    place.settle(server)
    assert place.records() == num_chunks
    assert cold(server, tokens) == [num_chunks * CHUNK_BLOCKS]


def lose_one_store(place: Place, server: MiniServer, index: int) -> list[bytes]:
    """Let the store of one chunk of the first batch fail; returns a list that will hold its id."""
    worker, side = server.worker._rank.worker, server.scheduler.connector._scheduler
    lost: list[bytes] = []
    real = worker._note_stored

    def note(chunk: bytes, *, is_stored: bool, is_written: bool) -> None:
        ordered = list(side._stores)
        if not lost and chunk == ordered[index]:
            lost.append(chunk)
            is_stored = is_written = False
            name = worker._key(chunk).hex()
            next(place.root.glob(f"*/{name[:2]}/{name}.rec")).unlink()
        real(chunk, is_stored=is_stored, is_written=is_written)

    worker._note_stored = note
    return lost


def test_a_chunk_that_was_evicted_in_the_middle_is_all_that_is_stored_again(place: Place) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    worker = server.worker._rank.worker
    scheduler = server.scheduler.connector._scheduler
    before = {record.name: record.stat().st_ino for record in place.root.glob("*/??/*.rec")}
    server.add(prompt(1), "again", output_tokens=1)
    chunk = scheduler._chunk_id(scheduler._track(server._live["again"].request), 1)
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    server._live.pop("again")
    evicted = worker._key(chunk).hex() + ".rec"
    next(place.root.glob(f"*/??/{evicted}")).unlink()
    server.forget_device_cache()
    server.run([prompt(1)])
    place.settle(server)
    after = {record.name: record.stat().st_ino for record in place.root.glob("*/??/*.rec")}
    assert {name for name in before if after[name] != before[name]} <= {evicted}
    assert set(after) == set(before)
    assert cold(server, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]


def test_on_reuse_stores_the_second_time(place: Place) -> None:
    server = place.server(store="on_reuse")
    server.run([prompt(1)])
    assert cold(server, prompt(1)) == [0]
    place.settle(server)
    assert place.records() == NUM_CHUNKS
    assert cold(server, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]


def test_never_and_read_only_do_what_they_say(place: Place) -> None:
    place.fill(place.server(), [prompt(1)])
    stored = place.records()
    assert cold(place.server(policy="never"), prompt(1)) == [0]
    reader = place.server(read_only=True)
    assert cold(reader, prompt(1), prompt(2)) == [NUM_CHUNKS * CHUNK_BLOCKS, 0]
    assert place.records() == stored


def test_another_salt_finds_nothing_and_a_reset_hides_what_was_stored(place: Place) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    tenant = place.server(salt="tenant")
    assert cold(tenant, prompt(1)) == [0]
    place.settle(tenant)
    assert server.scheduler.connector.reset_cache() is True
    stored = place.records()
    assert cold(server, prompt(1)) == [0]
    place.settle(server)
    assert place.records() == stored + NUM_CHUNKS
    assert cold(server, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]
    assert cold(place.server(), prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS], "others still find it"


def test_a_record_that_vanishes_after_the_lookup_is_computed(place: Place) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    for record in place.root.glob("*/??/*.rec"):
        record.unlink()
    server.forget_device_cache()
    (served,) = server.run([prompt(1)])
    place.settle(server)
    assert served.good_blocks == served.wrong_blocks == 0
    assert counted(server, "rewarm_kv_loads_total", "miss") == NUM_CHUNKS
    assert cold(server, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]


def test_two_servers_find_what_the_other_stored(place: Place) -> None:
    first, second = place.server(), place.server()
    place.fill(first, [prompt(1)])
    place.fill(second, [prompt(2)])
    assert cold(first, prompt(2)) == cold(second, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]


def test_what_is_loaded_counts_as_used_and_what_the_server_itself_had_does_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.server()
    place.fill(server, [prompt(1)])
    side = server.scheduler.connector._scheduler
    touched: list[list[bytes]] = []
    monkeypatch.setattr(side._presence, "touch", lambda chunks: touched.append(list(chunks)))
    server.run([prompt(1)])
    assert touched == []
    server.forget_device_cache()
    server.run([prompt(1)[: 2 * CHUNK_TOKENS + 1]])
    server.run([prompt(1)])
    assert [len(chunks) for chunks in touched] == [2, NUM_CHUNKS - 2]


def test_short_prompts_are_not_stored_where_only_long_ones_are_wanted(place: Place) -> None:
    server = place.server(store="prompts_over_tokens", store_min_tokens=PROMPT_TOKENS)
    server.run([prompt(2)[:-1]])
    place.fill(server, [prompt(1)])
    assert place.records() == NUM_CHUNKS
    assert cold(server, prompt(1), prompt(2)) == [NUM_CHUNKS * CHUNK_BLOCKS, 0]


def test_a_spent_store_budget_leaves_stores_out_and_answers_as_before(place: Place) -> None:
    server = place.server(store_bytes_per_day=64 << 20)
    place.fill(server, [prompt(1)])
    for thread in server.worker._rank.volume._store_threads:
        thread.refused_bytes = 1
    server.run([prompt(2)])
    assert place.records() == NUM_CHUNKS
    assert counted(server, "rewarm_kv_stores_total", "dropped") >= NUM_CHUNKS
    assert cold(server, prompt(1), prompt(2))[0] == NUM_CHUNKS * CHUNK_BLOCKS


def test_auto_serves_right_blocks_and_tells_why(place: Place) -> None:
    server = place.server(policy="auto")
    place.fill(server, [prompt(1), prompt(2), prompt(3)])
    for _ in range(4):
        cold(server, prompt(1), prompt(2), prompt(3))
    pilot = server.scheduler.connector._scheduler._pilot
    assert pilot.costs.pace() is not None
    assert pilot.is_asking, "it was not switched off by an error"
    reasons = {name: counted(server, "rewarm_kv_decisions_total", name) for name in DECISION_REASONS}
    assert reasons["not_stored"] == 3
    assert reasons["unmeasured"] >= 1
    asked = sum(count for name, count in reasons.items() if name not in ("hold", "cut"))
    assert asked >= 3 + 4 * 3 - reasons["cut"]
    assert not pilot._policy._active
    assert not pilot._policy._waiting
    server.close()
    place.servers.remove(server)
    (log,) = log_files(str(place.root / ".rewarm" / "policy"))
    decisions = [line for line in read_log(log).lines if "request_id" in line]
    assert len(decisions) >= asked - 3
    assert all(line["actual_s"] > 0 for line in decisions)
    again = place.server(policy="auto")
    again.run([prompt(9)])
    assert again.scheduler.connector._scheduler._pilot.costs.pace() is not None, "the next start knows the rates"


def test_a_load_that_is_cut_is_computed_and_its_chunks_are_no_worse_for_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.server(policy="auto")
    place.fill(server, [prompt(1), prompt(2)])
    cut: set[str] = set()

    def cut_each_once(policy: LoadPolicy) -> list[str]:
        new = [name for name, ask in policy._active.items() if ask.is_loading and name not in cut]
        for name in new:
            policy._active[name].was_cut = True
        cut.update(new)
        return new

    monkeypatch.setattr(LoadPolicy, "to_cut", cut_each_once)
    server.forget_device_cache()
    served = server.run([prompt(1), prompt(2)])
    assert cut
    assert not any(one.wrong_blocks for one in served)
    loads = [counted(server, "rewarm_kv_loads_total", name) for name in ("hit", "cut")]
    assert sum(loads) == NUM_CHUNKS * len(cut)
    assert counted(server, "rewarm_kv_loads_total", "timeout") == 0
    monkeypatch.setattr(LoadPolicy, "to_cut", lambda _policy: [])
    assert cold(place.server(), prompt(1), prompt(2)) == [NUM_CHUNKS * CHUNK_BLOCKS] * 2
    assert server.scheduler.connector._scheduler._presence._cooling == {}


def test_steps_that_compute_a_prompt_are_told_to_the_policy(place: Place) -> None:
    server = place.server(policy="auto")
    server.add(prompt(1), output_tokens=5)
    seen: list[list[tuple[str, int, int]]] = []
    pilot = server.scheduler.connector._scheduler
    server.drain(lambda: pilot._pilot is not None, "the layouts of all ranks")
    policy = pilot._pilot._policy
    begun = policy.step_begun
    policy.step_begun = lambda step, parts: (seen.append(list(parts)), begun(step, parts))
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    computed = [part for parts in seen for part in parts]
    assert [(begin, end) for _, begin, end in computed] == [(0, PROMPT_TOKENS)]
    assert len(policy._underway._steps) <= 2


def test_a_prefix_that_is_known_before_it_is_asked_for_counts_for_the_others(place: Place) -> None:
    server = place.server(policy="auto")
    place.fill(server, [prompt(1), prompt(2)])
    server.forget_device_cache()
    for number in (1, 2):
        server.scheduler.connector.on_new_request(server.make_request(prompt(number), f"early{number}"))
    waiting = server.scheduler.connector._scheduler._pilot._policy._waiting
    assert [ask.hit.num_chunks for ask in waiting.values()] == [NUM_CHUNKS] * 2


def test_a_policy_that_fails_costs_no_request(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    server = place.server(policy="auto")
    place.fill(server, [prompt(1)])
    monkeypatch.setattr(LoadPolicy, "decide", lambda _policy, _hit: 1 / 0)
    assert cold(server, prompt(1)) == [NUM_CHUNKS * CHUNK_BLOCKS]


def test_what_a_tenant_stores_and_uses_counts_for_its_quota(place: Place) -> None:
    server = place.server()
    side, owned = server.scheduler.connector._scheduler, dict[bytes, bytes]()
    server.run([prompt(3)])
    side._presence.own = lambda chunks, tenant: owned.update(dict.fromkeys(chunks, tenant))
    server.run([prompt(1)])
    assert owned == {}, "no salt, no tenant"
    request = server.add(prompt(2))
    server._live[request].request.cache_salt = "acme"
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "the request")
    server._live.pop(request)
    assert len(owned) == NUM_CHUNKS
    assert set(owned.values()) == {tenant_of("acme")}
