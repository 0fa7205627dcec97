from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rewarm.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_the_weights_are_those_of_every_machine(model: Path) -> None:
    """ensure_tiny_model checks the sha256; here, that the file is what its header says."""
    data = (model / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert max(entry["data_offsets"][1] for entry in tensors.values()) == len(data) - 8 - header_bytes
    assert sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values()) == 4 * 5_509_376
    norm = tensors["model.norm.weight"]["data_offsets"]
    assert data[8 + header_bytes + norm[0] :][:4] == struct.pack("<f", 1.0)


def test_every_byte_is_one_token(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(258))
    assert len(set(vocabulary)) == 258


def test_a_whole_model_is_left_alone_and_a_damaged_one_made_again(model: Path) -> None:
    weights = model / "model.safetensors"
    before = weights.stat().st_ino
    tiny_model.ensure_tiny_model(model)
    assert weights.stat().st_ino == before
    with weights.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff" * 8)
    tiny_model.ensure_tiny_model(model)
    assert tiny_model._sha256(weights) == tiny_model.SHA256["full"]
    assert list(model.parent.glob(".tiny-model-*")) == []


@pytest.mark.parametrize("kind", sorted(tiny_model.SHA256))
def test_each_kind_is_the_same_on_every_machine_and_says_what_it_is(kind: str, tmp_path: Path) -> None:
    config = json.loads((tiny_model.ensure_tiny_model(tmp_path / kind, kind) / "config.json").read_text())
    assert ("sliding_window" in config) == (kind in ("sliding", "interleaved"))
    assert ("layer_types" in config) == (kind == "interleaved")
    assert ("kv_lora_rank" in config) == (kind == "latent")


def test_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model is called 'large'; there are full, sliding"):
        tiny_model.ensure_tiny_model(tmp_path / "model", "large")


@pytest.mark.vllm
def test_transformers_reads_the_tokenizer_as_bytes(model: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    text = "Hällo\x00 wörld\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
