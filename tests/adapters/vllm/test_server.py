"""A real vLLM on CPU keeps its KV cache on a volume: two servers at once, a restart, other settings, a failing root.

Four server starts in all, shared by the tests in the order in which they stand here.
"""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import faultshim
import pytest
import vllm_server as vs
from kv_events import Subscriber
from leftovers import Leftovers
from vllm_server import CHUNK_TOKENS, Answer, Server, count_records, needs_vllm, prompt_of, wait_until

from rewarm.testing.tiny_model import ensure_tiny_model

pytestmark = [pytest.mark.server, needs_vllm]

PROMPT_TOKENS = 2048
BLOCK_TOKENS = 128
"""Of vLLM on CPU."""
NUM_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
STORED = [prompt_of(number, PROMPT_TOKENS) for number in range(2)]
"""Computed and stored by the first server."""
FRESH = [prompt_of(number, PROMPT_TOKENS) for number in range(10, 14)]
"""Asked of the first server under a salt only, so that no other finds their KV."""


class Story:
    """What the servers of this file share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leftovers = Leftovers()
        self.model = ensure_tiny_model(folder / "model")
        self.root = folder / "root"
        self.root.mkdir(mode=0o700)
        self.transfer = vs.transfer_config(self.root)
        self.events_port = vs.free_port()
        self.router: Subscriber
        """Hears the second server."""
        self.answers: dict[int, Answer] = {}
        """Number of the prompt -> what a run without a cache said."""

    def server(self, name: str, *flags: str, **environment: str) -> Server:
        return Server(self.model, self.folder / f"{name}.log", *flags, transfer=self.transfer, environment=environment)

    def check(self, server: Server, prompt: list[int]) -> Answer:
        """Ask, and compare every token with the run that had no cache."""
        answer = server.ask(prompt)
        assert answer.tokens == self.answers[prompts().index(prompt)].tokens
        return answer


def prompts() -> list[list[int]]:
    return [*STORED, *FRESH]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def pair(story: Story) -> Iterator[tuple[Server, Server]]:
    """Two servers on one volume; the first has computed and stored before the second is up."""
    with ExitStack() as stack:
        first = stack.enter_context(story.server("first"))
        for number, prompt in enumerate(STORED):
            story.answers[number] = first.ask(prompt)
        for number, prompt in enumerate(FRESH, start=len(STORED)):
            story.answers[number] = first.ask(prompt, salt="kept apart")
        assert first.metric("rewarm_kv_hit_tokens_total") == 0
        first.wait_for_records(story.root, len(prompts()) * NUM_CHUNKS)
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{story.events_port}"}
        story.router = stack.enter_context(Subscriber(story.events_port))
        yield first, stack.enter_context(story.server("second", "--kv-events-config", json.dumps(events)))


def hit_tokens(server: Server) -> float:
    return server.metric("rewarm_kv_hit_tokens_total")


def check_command(server: Server) -> tuple[int, dict[str, object]]:
    command = [sys.executable, "-m", "rewarm.cli.main", "vllm", "check", f"http://127.0.0.1:{server.port}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_second_server_hits_what_the_first_stored(story: Story, pair: tuple[Server, Server]) -> None:
    first, second = pair
    assert check_command(second)[0] == 1
    for prompt in STORED:
        story.check(second, prompt)
    assert hit_tokens(second) == len(STORED) * PROMPT_TOKENS
    code, said = check_command(second)
    assert code == 0
    assert said["loads"] == {"hit": len(STORED) * NUM_CHUNKS}
    # And the other way round: what the second computes, the first finds.
    before = count_records(story.root)
    story.check(second, FRESH[0])
    second.wait_for_records(story.root, before + NUM_CHUNKS)
    first.reset_prefix_cache()
    story.check(first, FRESH[0])
    assert hit_tokens(first) == PROMPT_TOKENS


def test_a_damaged_record_is_computed_again(story: Story, pair: tuple[Server, Server]) -> None:
    _, second = pair
    newest = max(  # of FRESH[0], by the test above
        story.root.glob("*/??/*.rec"), key=lambda path: path.stat().st_ctime_ns
    )
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    second.reset_prefix_cache()
    for prompt in (*STORED, FRESH[0]):
        story.check(second, prompt)
    assert second.metric("rewarm_kv_loads_total", outcome="damaged") == 1


def test_a_router_hears_what_is_on_the_volume_and_what_is_gone(story: Story, pair: tuple[Server, Server]) -> None:
    """By the two tests above: what another server stored, what this one did, and a record that was damaged."""
    _, second = pair
    wanted = {tuple(prompt) for prompt in (*STORED, FRESH[0])}

    def told() -> set[tuple[int, ...]]:
        """Prompts that can be put together from the blocks that were announced, from their beginning."""
        blocks = story.router.stored()
        after = {before: block for block, (before, _) in blocks.items()}
        found = set()
        for first in (block for block, (before, _) in blocks.items() if before is None):
            tokens, block = blocks[first][1], first
            while block in after:
                block = after[block]
                tokens += blocks[block][1]
            found.add(tokens)
        return found

    story.router.wait_for(lambda: told() >= wanted and bool(story.router.removed()), "what is on the volume")
    assert len(story.router.removed()) * BLOCK_TOKENS == CHUNK_TOKENS
    gpu = story.router.stored("CPU") or story.router.stored("GPU")
    both = {block for block in story.router.stored() if block in gpu}
    assert both
    assert all(story.router.stored()[block] == gpu[block] for block in both)
    # What a janitor evicts, this server learns by looking, while it serves.
    before = story.router.removed()
    records = sorted(story.root.glob("*/??/*.rec"), key=lambda path: path.stat().st_ctime_ns)
    evicted = records[0]  # of the prompt that was stored first
    aside = evicted.rename(story.folder / "aside")

    def heard() -> bool:
        second.ask(FRESH[1][:64], num_tokens=1)
        return len(story.router.removed() - before) * BLOCK_TOKENS >= CHUNK_TOKENS

    story.router.wait_for(heard, "the end of a record that is gone", limit_s=120)
    aside.rename(evicted)


def pin(story: Story, *prompt: str) -> tuple[int, int]:
    """(chunks of a prompt, those of them that are on the volume) as the command says that pins it."""
    command = [sys.executable, "-m", "rewarm.cli.main", "kv", "pin", str(story.root), "--name", "system", "--json"]
    done = subprocess.run([*command, *prompt], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return said["chunks"], said["chunks_present"]


def test_a_prompt_is_pinned_by_the_keys_that_the_server_gave_its_chunks(
    story: Story, pair: tuple[Server, Server]
) -> None:
    _, second = pair
    tokens, text = story.folder / "tokens.json", story.folder / "text"
    tokens.write_text(json.dumps(STORED[0]))
    assert pin(story, "--tokens", str(tokens)) == (NUM_CHUNKS, NUM_CHUNKS)
    tokens.write_text(json.dumps(FRESH[2]))
    assert pin(story, "--tokens", str(tokens)) == (NUM_CHUNKS, 0)
    assert pin(story, "--tokens", str(tokens), "--cache-salt", "kept apart") == (NUM_CHUNKS, NUM_CHUNKS)
    text.write_text("A document that many ask about. " * 20)
    with second.post("/tokenize", {"prompt": text.read_text()}) as answer:
        prompt = json.loads(answer.read())["tokens"]
    before = count_records(story.root)
    second.ask(prompt)
    second.wait_for_records(story.root, before + len(prompt) // CHUNK_TOKENS)
    for tokenizer in (["--server", f"http://127.0.0.1:{second.port}"], ["--tokenizer", str(story.model)]):
        num_chunks, num_present = pin(story, "--text", str(text), *tokenizer)
        assert num_chunks == num_present == len(prompt) // CHUNK_TOKENS


def test_a_prefix_is_loaded_and_the_rest_computed(story: Story, pair: tuple[Server, Server]) -> None:
    _, second = pair
    before = hit_tokens(second)
    half = PROMPT_TOKENS // 2
    mixed = STORED[0][:half] + FRESH[3][half:]
    second.reset_prefix_cache()
    loaded = second.ask(mixed)
    assert hit_tokens(second) - before == half
    second.reset_prefix_cache()
    assert second.ask(mixed, salt="computed").tokens == loaded.tokens


def test_other_settings_share_the_directory_without_a_hit(story: Story, pair: tuple[Server, Server]) -> None:
    for server in pair:
        server.stop()
        assert server.process.returncode == 0
    scaling = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    before = count_records(story.root)
    with story.server("stretched", "--hf-overrides", json.dumps(scaling)) as server:
        stretched = server.ask(STORED[0])
        assert hit_tokens(server) == 0
        server.wait_for_records(story.root, before + NUM_CHUNKS)
        server.reset_prefix_cache()
        assert server.ask(STORED[0]).tokens == stretched.tokens
        assert hit_tokens(server) == PROMPT_TOKENS
    namespaces = [path.read_text() for path in story.root.glob("*/namespace.json")]
    assert sorted('"linear"' in text for text in namespaces) == [False, True]


def test_a_restarted_server_recovers_and_outlives_its_root(story: Story, tmp_path: Path) -> None:
    if not story.answers:
        pytest.skip("the tests above, which fill the volume, were not run")
    if reason := faultshim.missing():
        pytest.skip(reason)
    control = tmp_path / "shim"
    shim = faultshim.Shim(control)
    environment = faultshim.preload(faultshim.build(tmp_path), control, {})
    vs.drop_page_cache(story.root)
    with story.server("restarted", **environment) as server:
        cold = story.check(server, STORED[0])
        assert hit_tokens(server) == PROMPT_TOKENS
        print(f"TTFT computed {story.answers[0].ttft_s:.3f} s, from the volume {cold.ttft_s:.3f} s")

        def ask_under(action: str, ops: faultshim.Op, error: int, fresh: list[int]) -> None:
            shim.arm(faultshim.Action.FAIL, ops, str(story.root), times=0, error=error)
            server.reset_prefix_cache()
            for prompt in (STORED[1], fresh):
                story.check(server, prompt)
            number = itertools.count()

            def has_fired() -> bool:
                """Stores may still be paused by the fault before: each time a chunk is asked for that is new."""
                if not shim.fired:
                    server.ask(fresh[:CHUNK_TOKENS], num_tokens=1, salt=f"{action} {next(number)}")
                return bool(shim.fired)

            wait_until(has_fired, f"{action}: an operation that fails")
            shim.disarm()

        ask_under("full", faultshim.Op.STORE ^ faultshim.Op.OPEN, errno.ENOSPC, FRESH[1])
        ask_under("read-only", faultshim.Op.CHANGE ^ faultshim.Op.OPEN, errno.EROFS, FRESH[2])
        ask_under("I/O errors", faultshim.Op.ANY, errno.EIO, FRESH[3])
        shutil.rmtree(story.root)
        server.reset_prefix_cache()
        for prompt in prompts():
            story.check(server, prompt)
        wait_until(lambda: server.metric("rewarm_io_errors_total") > 0, "I/O errors in the metrics")


def test_the_servers_left_nothing_in_temporary_directories(story: Story) -> None:
    assert story.leftovers.seen(), "the servers used shared memory"
    assert story.leftovers.left() == []
