"""Keys of a prompt are those that vLLM's own code leads to."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from vllm_server import needs_vllm

from rewarm.adapters.vllm import prompt_keys
from rewarm.errors import UnsupportedError, UsageError
from rewarm.kv.keys import chunk_id

BLOCK, CHUNK = 16, 64
TOKENS = [random.Random(7).choice((number, 70_000 + number, 1 << 31)) for number in range(5 * CHUNK + 20)]


def identity(algorithm: str = "sha256", seed: str = "vllm-none-hash", **more: Any) -> dict[str, Any]:
    return {
        "server": {"kind": "vllm", "layout_version": 1},
        "kv": {"block_tokens": BLOCK, "chunk_tokens": CHUNK},
        "hashing": {"algorithm": algorithm, "seed": seed},
        "topology": {"tp": 2, "pp": 1, "dcp": 1, "pcp": 1},
        "run": "",
        **more,
    }


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", ["", "a tenant"])
@pytest.mark.parametrize("seed", [None, "0", "x" * 300])
def test_they_are_those_of_vllm(algorithm: str, salt: str, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    said = kv_cache_utils.DEFAULT_NONE_HASH_SEED
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        said = "PYTHONHASHSEED " + hashlib.sha256(seed.encode()).hexdigest()[:16]
    function = get_hash_fn_by_name(algorithm)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    kv_cache_utils.init_none_hash(function)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, function)
    request = Request("one", TOKENS, SamplingParams(max_tokens=1), None, cache_salt=salt or None, block_hasher=hasher)
    wanted = [chunk_id(request.block_hashes[(index + 1) * CHUNK // BLOCK - 1]) for index in range(5)]
    assert wanted in prompt_keys.chunk_ids(identity(algorithm, said), TOKENS, salt)


def test_a_salt_has_two_spellings_and_no_salt_one() -> None:
    (plain,) = prompt_keys.chunk_ids(identity(), TOKENS)
    older, newer = prompt_keys.chunk_ids(identity(), TOKENS, "salt")
    assert len({*plain, *older, *newer}) == 15
    assert prompt_keys.chunk_ids(identity(), TOKENS[:CHUNK])[0] == plain[:1]


def test_a_seed_that_is_not_this_process_s_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "PYTHONHASHSEED " + hashlib.sha256(b"41").hexdigest()[:16]
    monkeypatch.setenv("PYTHONHASHSEED", "40")
    with pytest.raises(UsageError) as caught:
        prompt_keys.chunk_ids(identity(seed=said), TOKENS)
    assert "PYTHONHASHSEED=..." in caught.value.hint
    monkeypatch.setenv("PYTHONHASHSEED", "41")
    assert len(prompt_keys.chunk_ids(identity(seed=said), TOKENS)[0]) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"server": {"kind": "sglang"}},
        {"server": 3},
        {"run": "a nonce"},
        {"hashing": {"algorithm": "xxhash", "seed": "x"}},
        {"hashing": {"algorithm": None, "seed": "x"}},
        {"kv": {"block_tokens": 0, "chunk_tokens": 64}},
        {"kv": {"block_tokens": 16, "chunk_tokens": 40}},
        {"kv": {"block_tokens": 16.0, "chunk_tokens": 64}},
        {"kv": {}},
    ],
)
def test_other_namespaces_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        prompt_keys.chunk_ids({**identity(), **wrong}, TOKENS)


@pytest.mark.parametrize(
    "tokens", [[], [1] * (CHUNK - 1), [-1] * CHUNK, [1 << 32] * CHUNK, [True] * CHUNK, [0.5] * CHUNK]
)
def test_what_is_no_prompt_is_refused(tokens: list[Any]) -> None:
    with pytest.raises(UsageError):
        prompt_keys.chunk_ids(identity(), tokens)


@pytest.mark.parametrize(
    ("topology", "count"),
    [({"tp": 2, "pp": 4}, 8), ({}, 1), ({"tp": 0}, 0), ({"tp": 1 << 40}, 0), ([], 0), ({"tp": "2"}, 0)],
)
def test_the_ranks_follow_from_the_topology(topology: Any, count: int) -> None:
    if count:
        assert prompt_keys.num_ranks(identity(topology=topology)) == count
    else:
        with pytest.raises(UnsupportedError):
            prompt_keys.num_ranks(identity(topology=topology))
