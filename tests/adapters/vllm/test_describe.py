"""What vLLM's real configuration says of the bytes: which servers share records, and which are refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

import mini_server
import torch

from rewarm.adapters.vllm import describe
from rewarm.adapters.vllm.versions import check_version
from rewarm.errors import AdapterError

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def fixed_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return mini_server.write_tiny_model(tmp_path / "model")


def make(model: Path) -> Any:
    return mini_server.make_vllm_config(
        model, {"roots": ["/r"]}, 64, kv_connector="RewarmConnector", kv_connector_module_path="rewarm.adapters.vllm"
    )


def identity(config: Any, *, block_tokens: int = 16, chunk_tokens: int = 64, salt: str = "") -> str:
    text, _notes = describe.shared_identity(config, chunk_tokens=chunk_tokens, block_tokens=block_tokens, salt=salt)
    return text


def edit(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_same_model_elsewhere_shares_its_records(model: Path, tmp_path: Path) -> None:
    copy = mini_server.write_tiny_model(tmp_path / "copy" / "model")
    assert identity(make(copy)) == identity(make(model))


def test_whatever_changes_the_bytes_changes_the_namespace(model: Path, tmp_path: Path) -> None:
    found = {"as it is": identity(make(model))}
    found["block size"] = identity(make(model), block_tokens=32)
    found["chunk size"] = identity(make(model), chunk_tokens=128)
    found["salt"] = identity(make(model), salt="tenant")
    config = make(model)
    config.model_config.revision = "another"
    found["revision"] = identity(config)
    config = make(model)
    config.cache_config.cache_dtype = "fp8"
    found["KV dtype"] = identity(config)
    config = make(model)
    config.parallel_config.tensor_parallel_size = 2
    found["ranks"] = identity(config)
    config = make(model)
    config.model_config.hf_overrides = {"rope_theta": 5.0}
    found["overrides"] = identity(config)
    other = mini_server.write_tiny_model(tmp_path / "rope")
    edit(other, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    found["RoPE"] = identity(make(other))
    other = mini_server.write_tiny_model(tmp_path / "dtype")
    config = make(other)
    config.model_config.dtype = torch.bfloat16
    found["dtype"] = identity(config)
    other = mini_server.write_tiny_model(tmp_path / "weights")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    found["weights"] = identity(make(other))
    assert len(set(found.values())) == len(found), found


def test_a_name_for_block_hashes_that_changes_at_every_start_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", raising=False)
    with pytest.raises(AdapterError, match="anew at every start") as caught:
        identity(make(model))
    assert "PYTHONHASHSEED=0" in caught.value.hint
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert "PYTHONHASHSEED" in identity(make(model))


def with_spec(name: str, **changes: Any) -> Any:
    """A KV cache of two groups, full attention and a spec that derives from or stands beside it."""
    cache = mini_server.make_kv_cache_config(64, (0, 100))
    full, sliding = cache.kv_cache_groups
    base = full.kv_cache_spec if name != "SlidingWindowMLASpec" else sliding.kv_cache_spec
    spec = type(name, (type(base),) if name.endswith("Spec") else (), {})
    made = object.__new__(spec)
    for field in dataclasses.fields(base):
        object.__setattr__(made, field.name, getattr(base, field.name))
    return dataclasses.replace(cache, kv_cache_groups=[full, dataclasses.replace(sliding, kv_cache_spec=made)])


@pytest.mark.parametrize("name", ["RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec", "SlidingWindowMLASpec"])
def test_layers_that_do_not_keep_each_tokens_kv_are_refused_by_name(model: Path, name: str) -> None:
    with pytest.raises(AdapterError, match=f"keeps its KV as {name}, which is not served yet") as caught:
        describe.check_served(make(model), with_spec(name))
    assert ("--disable-hybrid-kv-cache-manager" in caught.value.hint) == (name == "SlidingWindowMLASpec")


def test_state_space_layers_are_refused_by_name(model: Path) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    cache = mini_server.make_kv_cache_config(64, (0, 100))
    full, other = cache.kv_cache_groups
    state = MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))
    mixed = dataclasses.replace(cache, kv_cache_groups=[full, dataclasses.replace(other, kv_cache_spec=state)])
    with pytest.raises(AdapterError, match="keeps its KV as MambaSpec, which is not served yet") as caught:
        describe.check_served(make(model), mixed)
    assert caught.value.hint == "run this model without --kv-transfer-config"


def test_groups_whose_blocks_hold_different_numbers_of_tokens_are_refused(model: Path) -> None:
    cache = mini_server.make_kv_cache_config(64, (0, 100))
    full, sliding = cache.kv_cache_groups
    longer = dataclasses.replace(sliding.kv_cache_spec, block_size=32)
    uneven = dataclasses.replace(cache, kv_cache_groups=[full, dataclasses.replace(sliding, kv_cache_spec=longer)])
    with pytest.raises(AdapterError, match=r"2 KV cache groups \(FullAttentionSpec, SlidingWindowSpec\)") as caught:
        describe.check_served(make(model), uneven)
    assert "--disable-hybrid-kv-cache-manager" in caught.value.hint


def test_an_unsafe_policy_is_refused_by_name(model: Path) -> None:
    cache = mini_server.make_kv_cache_config(64)
    describe.check_served(make(model), cache)
    config = make(model)
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(AdapterError, match="kv_load_failure_policy is not recompute"):
        describe.check_served(config, cache)


def test_a_chunk_is_no_longer_than_the_shortest_window(model: Path) -> None:
    tokens = {
        windows: describe.chunk_tokens(make(model), mini_server.make_kv_cache_config(64, windows), 0)
        for windows in ((0,), (0, 4096), (0, 1000, 500), (0, 8))
    }
    assert tokens == {(0,): 8192, (0, 4096): 4096, (0, 1000, 500): 256, (0, 8): 16}


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_the_dtype_of_the_kv_cache_and_where_its_scales_come_from_are_in_the_namespace(model: Path, dtype: str) -> None:
    config = make(model)
    config.cache_config.cache_dtype = dtype
    kv = json.loads(identity(config))["kv"]
    assert (kv["dtype"], kv["scales"]) == (dtype, "of the model")
    config.cache_config.calculate_kv_scales = True
    first, second = (json.loads(identity(config)) for _ in range(2))
    assert first["kv"]["scales"] == "calculated"
    assert first["run"] != second["run"], "scales from the first requests are never the same twice"


def test_ranks_of_one_stage_share_what_mla_only_copies(model: Path) -> None:
    config = make(model)
    config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = 4
    assert describe.holder_ranks(config) == [0, 1, 2, 3]

    class Latent:
        use_mla = True

    object.__setattr__(config, "model_config", Latent())
    assert describe.holder_ranks(config) == [0]


@pytest.mark.parametrize("version", ["0.20.1", "0.23.0", "0.32.0+cpu", "0.33.0", "0.33.7"])
def test_known_versions_pass(version: str) -> None:
    check_version(version, allow_untested=False)


@pytest.mark.parametrize(
    ("version", "word"), [("0.20.0", "older"), ("0.34.0", "newer"), ("1.0", "newer"), ("dev", "no version")]
)
def test_others_are_refused_with_the_way_to_allow_them(version: str, word: str) -> None:
    with pytest.raises(AdapterError, match=word) as caught:
        check_version(version, allow_untested=False)
    assert "allow_untested" in caught.value.hint
    check_version(version, allow_untested=True)


def test_the_adapter_adds_little_to_vllms_own_imports() -> None:
    """vLLM's API server imports the connector too: no module of ours that it brings in imports a heavy package."""
    code = (
        "import sys\nimport vllm.distributed.kv_transfer.kv_connector.v1.base\n"
        "import vllm.distributed.kv_transfer.kv_connector.v1.metrics\nbefore = set(sys.modules)\n"
        "from rewarm.adapters.vllm import RewarmConnector\n"
        "foreign = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "assert foreign <= {'rewarm', 'google_crc32c', 'google'}, foreign\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
