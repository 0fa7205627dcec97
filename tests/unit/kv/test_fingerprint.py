"""Models are told apart by what their files hold."""

from __future__ import annotations

import json
import os
import struct
from hashlib import sha256
from pathlib import Path

import pytest

from rewarm.kv.fingerprint import weights_fingerprint
from rewarm.kv.identity import KvIdentity, canonical_json, with_layout


def write_model(folder: Path, *, fill: int = 1, config: str = "{}", config_name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([fill]) * 64)
    (folder / config_name).write_text(config, encoding="utf-8")
    return folder


def digest(folder: Path) -> str:
    return weights_fingerprint(str(folder)).digest


def test_contents_tell_models_apart_and_copies_are_the_same(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a")
    assert weights_fingerprint(str(first)).kind == "contents"
    assert digest(write_model(tmp_path / "copy")) == digest(first)
    assert digest(write_model(tmp_path / "weights", fill=2)) != digest(first)
    assert digest(write_model(tmp_path / "config", config='{"rope_theta": 1}')) != digest(first)


def test_an_adapters_own_configuration_counts(tmp_path: Path) -> None:
    kind = "adapter_config.json"
    first = write_model(tmp_path / "a", config='{"lora_alpha": 16}', config_name=kind)
    assert digest(write_model(tmp_path / "b", config='{"lora_alpha": 32}', config_name=kind)) != digest(first)


def test_a_manifest_stands_for_the_files_until_one_is_newer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a")
    files = sorted(folder.iterdir())
    lines = [f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    assert weights_fingerprint(str(folder)).kind == "manifest"
    later = (folder / "SHA256SUMS").stat().st_mtime + 10
    os.utime(folder / "model.safetensors", (later, later))
    assert weights_fingerprint(str(folder)).kind == "contents"


def test_the_hubs_cache_names_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--model"
    snapshot = repo / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c0ffee")
    for name, blob in (("model.safetensors", "a" * 64), ("config.json", "b" * 40)):
        target = repo / "blobs" / blob
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"{}")
        (snapshot / name).symlink_to(os.path.relpath(target, snapshot))
    found = weights_fingerprint("org/model")
    assert found.kind == "hub"
    assert weights_fingerprint("org/model", "c0ffee") == found


def test_unknown_contents_are_never_the_same_twice(tmp_path: Path) -> None:
    first, second = (weights_fingerprint(str(tmp_path / "nothing")) for _ in range(2))
    assert first.kind == second.kind == "run"
    assert first.digest != second.digest
    assert first.reason


def test_an_identity_is_one_spelling_and_ranks_add_their_layout() -> None:
    parts: dict[str, dict[str, object]] = {
        "server": {},
        "model": {"b": 1, "a": 2},
        "kv": {},
        "topology": {},
        "hashing": {},
    }
    identity = KvIdentity(**parts)  # type: ignore[arg-type]
    again = KvIdentity(**{**parts, "model": {"a": 2, "b": 1}})  # type: ignore[arg-type]
    assert identity.id == again.id
    shared = canonical_json(identity.to_json())
    assert with_layout(shared, '{"layers":8}')["layout"] == {"layers": 8}
    assert KvIdentity(**{**parts, "model": {"a": 3}}).id != identity.id  # type: ignore[arg-type]
