"""The campaign's eyes: a connector that is right, one that lies and one that fails are told apart."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM's scheduler and connector classes")

import memory_connector
from mini_server import BLOCK_TOKENS, MiniServer, Served, make_vllm_config, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.vllm
NUM_BLOCKS = 64
PROMPT = random.Random(1).choices(range(3, 500), k=BLOCK_TOKENS * 6 + 1)


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    memory_connector.STORED.clear()
    yield
    memory_connector.STORED.clear()


def serve_twice(folder: Path, lie: str) -> tuple[Served, Served]:
    """The same prompt, computed and then loaded, by a connector that lies as asked."""
    config: Any = make_vllm_config(
        write_tiny_model(folder / "model"), {"lie": lie}, NUM_BLOCKS,
        kv_connector="MemoryConnector", kv_connector_module_path="memory_connector",
    )  # fmt: skip
    server = MiniServer(config, NUM_BLOCKS)
    try:
        (first,) = server.run([PROMPT])
        server.forget_device_cache()
        (second,) = server.run([PROMPT])
    finally:
        server.close()
    return first, second


def test_what_is_right_is_good(tmp_path: Path) -> None:
    first, second = serve_twice(tmp_path, "no")
    assert first == Served(num_prompt_blocks=6)
    assert second == Served(num_prompt_blocks=6, good_blocks=6)


def test_one_flipped_bit_is_seen(tmp_path: Path) -> None:
    _, second = serve_twice(tmp_path, "flip")
    assert second == Served(num_prompt_blocks=6, good_blocks=6, wrong_blocks=1)


def test_a_reported_failure_is_recomputed_and_not_counted_good(tmp_path: Path) -> None:
    _, second = serve_twice(tmp_path, "fail")
    assert second.failed_blocks >= 1
    assert (second.good_blocks, second.wrong_blocks) == (1, 0)
