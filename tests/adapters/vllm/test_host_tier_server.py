"""A real vLLM on CPU with a host tier: equal tokens from memory, from flash, and while memory goes away."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_server as vs
from vllm_server import CHUNK_TOKENS, Server, needs_vllm, prompt_of, wait_until

from rewarm.engine.workers import TMPFS, file_system_type
from rewarm.testing.tiny_model import ensure_tiny_model

pytestmark = [pytest.mark.server, pytest.mark.deep, needs_vllm]

PROMPT_TOKENS = 2048
PROMPTS = range(3)
NUM_CHUNKS = len(PROMPTS) * PROMPT_TOKENS // CHUNK_TOKENS


@pytest.fixture
def memory() -> Iterator[Path]:
    if file_system_type("/dev/shm") != TMPFS:
        pytest.skip("/dev/shm is no tmpfs here")
    place = Path(tempfile.mkdtemp(prefix="rewarm-test-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


def host_loads(server: Server, outcome: str = "hit") -> float:
    return server.metric("rewarm_host_loads_total", outcome=outcome)


def test_tokens_are_equal_whatever_tier_they_come_from(memory: Path, tmp_path: Path) -> None:
    model, root = ensure_tiny_model(tmp_path / "model"), tmp_path / "root"
    root.mkdir(mode=0o700)
    transfer = vs.transfer_config(root, "--host-tier", "1GiB")
    environment = {"REWARM_KV_HOST_ROOT": str(memory)}

    def server(name: str) -> Server:
        return Server(model, tmp_path / f"{name}.log", transfer=transfer, environment=environment)

    def ask_cold(one: Server) -> None:
        one.reset_prefix_cache()
        for number in PROMPTS:
            assert one.ask(prompt_of(number, PROMPT_TOKENS)).tokens == computed[number]

    with server("first") as first:
        computed = {n: first.ask(prompt_of(n, PROMPT_TOKENS), salt="computed alone").tokens for n in PROMPTS}
        for number in PROMPTS:
            assert first.ask(prompt_of(number, PROMPT_TOKENS)).tokens == computed[number]
        first.wait_for_records(root, 2 * NUM_CHUNKS)
        (host,) = (path for path in memory.iterdir() if path.is_dir())
        for _ in range(2):
            ask_cold(first)
        first.wait_for_records(host, NUM_CHUNKS)
        assert host_loads(first) == 0
        ask_cold(first)
        assert host_loads(first) == NUM_CHUNKS
        assert first.metric("rewarm_kv_loads_total", outcome="hit") == 3 * NUM_CHUNKS
        with server("second") as second:
            for number in PROMPTS:
                assert second.ask(prompt_of(number, PROMPT_TOKENS)).tokens == computed[number]
            before = host_loads(second)  # the first load may come before the names in memory are known
            ask_cold(second)
            assert host_loads(second) - before == NUM_CHUNKS
            for copy in sorted(host.glob("*/??/*.rec"))[::2]:
                data = bytearray(copy.read_bytes())
                data[len(data) // 2] ^= 1
                copy.write_bytes(data)
            ask_cold(second)
            assert host_loads(second, "damaged") > 0
            assert second.metric("rewarm_kv_loads_total", outcome="damaged") == 0, "flash had them"
            second.process.send_signal(signal.SIGKILL)
        shutil.rmtree(host)
        for _ in range(2):
            ask_cold(first)
        wait_until(lambda: first.metric("rewarm_root_healthy", root=str(host)) == 0, "a look at what is gone")
        assert first.metric("rewarm_kv_loads_total", outcome="hit") == 5 * NUM_CHUNKS
        assert "the host tier in" in first.log.read_text(errors="replace")
    with server("third") as third:
        for number in PROMPTS:
            assert third.ask(prompt_of(number, PROMPT_TOKENS)).tokens == computed[number]
        assert third.metric("rewarm_kv_loads_total", outcome="hit") == NUM_CHUNKS
        assert host.is_dir(), "made anew"
