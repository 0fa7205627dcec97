"""``rewarm lmcache config``: what LMCache reads, a volume where there was none, and warnings of what loses KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewarm.adapters.lmcache import pitfalls as pitfalls_module
from rewarm.adapters.lmcache.pitfalls import pitfalls
from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.errors import ExitCode

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_REMOTE_URL", "LMCACHE_LOCAL_DISK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def config(*arguments: str) -> int:
    return run(cli, ["lmcache", "config", *arguments])


def test_of_the_server_one_line_for_l2_adapter(tmp_path: Path, capsys: Captured) -> None:
    root = tmp_path / "kv"
    assert config("--mode", "server", "--root", str(root), "--size", "64MiB", "--model", "a/b=/models/b") == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert json.loads(printed.out) == {
        "type": "plugin",
        "module_path": "rewarm.adapters.lmcache",
        "class_name": "RewarmL2",
        "adapter_params": {"roots": [str(root)], "weights": {"a/b": "/models/b"}},
    }
    assert "made a volume of 64.0 MiB" in printed.err
    assert '"kv_connector_module_path":"lmcache.integration.vllm.lmcache_mp_connector"' in printed.err
    assert '"kv_load_failure_policy":"recompute"' in printed.err
    assert "warning" not in printed.err


def test_inside_of_vllm_a_yaml_file(tmp_path: Path, capsys: Captured) -> None:
    root = tmp_path / "kv"
    flags = ["--chunk-size", "512", "--cpu-gib", "8", "--salt", "x: y # z", "--durable", "--allow-untested"]
    assert config("--mode", "engine", "--root", str(root), "--size", "64MiB", *flags, "--model", "m=label:v3") == 0
    printed = capsys.readouterr()
    lines = dict(line.strip().split(": ", 1) for line in printed.out.splitlines() if line != "extra_config:")
    assert {name: json.loads(value) for name, value in lines.items() if name != "pre_caching_hash_algorithm"} == {
        "chunk_size": 512,
        "local_cpu": True,
        "max_local_cpu_size": 8,
        "save_unfull_chunk": False,
        "storage_plugins": ["rewarm"],
        "storage_plugin.rewarm.module_path": "rewarm.adapters.lmcache",
        "storage_plugin.rewarm.class_name": "RewarmBackend",
        "rewarm.roots": [str(root)],
        "rewarm.salt": "x: y # z",
        "rewarm.durable": True,
        "rewarm.allow_untested": True,
        "rewarm.weights": {"m": "label:v3"},
    }
    assert "LMCACHE_CONFIG_FILE=FILE" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--mode", "server"],
        ["--mode", "both", "--root", "/x"],
        ["--mode", "server", "--root", "ROOT"],
        ["--mode", "server", "--root", "ROOT", "--size", "0"],
        ["--mode", "server", "--root", "ROOT", "--size", "nan"],
        ["--mode", "server", "--root", "ROOT", "--size", "1GiB", "--model", "m"],
        ["--mode", "server", "--root", "ROOT", "--size", "1GiB", "--model", "=x"],
        ["--mode", "engine", "--root", "ROOT", "--size", "1GiB", "--chunk-size", "0"],
        ["--mode", "engine", "--root", "ROOT", "--size", "1GiB", "--chunk-size", "9" * 30],
        ["--mode", "engine", "--root", "ROOT", "--size", "1GiB", "--cpu-gib", "-1"],
        ["--mode", "server", "--root", "ROOT", "--read-only"],
    ],
)
def test_bad_arguments_are_usage_errors_and_make_nothing(
    tmp_path: Path, capsys: Captured, arguments: list[str]
) -> None:
    root = tmp_path / "kv"
    assert config(*(str(root) if word == "ROOT" else word for word in arguments)) == ExitCode.USAGE
    assert not capsys.readouterr().out
    assert not (root / "rewarm.volume").exists()


def test_warnings_reach_the_reader(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "file:///mnt/x")
    assert config("--mode", "engine", "--root", str(tmp_path / "kv"), "--size", "64MiB") == 0
    printed = capsys.readouterr().err
    assert "warning: PYTHONHASHSEED is not set" in printed
    assert "warning: LMCACHE_LOCAL_DISK" in printed


def test_the_seed_matters_inside_of_vllm_only() -> None:
    assert not pitfalls({}, in_process=False, kfd="/nowhere")
    assert len(pitfalls({}, in_process=True, kfd="/nowhere")) == 1
    assert len(pitfalls({"PYTHONHASHSEED": "random"}, in_process=True, kfd="/nowhere")) == 1
    assert not pitfalls({"PYTHONHASHSEED": "7"}, in_process=True, kfd="/nowhere")


def test_a_file_url_without_host_and_port(tmp_path: Path) -> None:
    found = pitfalls({"LMCACHE_REMOTE_URL": "fs:///mnt/kv"}, in_process=False, kfd="/nowhere")
    assert "write fs://local:0/mnt/kv" in found[0]
    assert not pitfalls({"LMCACHE_REMOTE_URL": "fs://local:0/mnt/kv"}, in_process=False, kfd="/nowhere")
    file = tmp_path / "lmcache.yaml"
    file.write_text('chunk_size: 256\n# remote_url: fs:///commented\nremote_url: "fs:///mnt/b"  # here\n')
    found = pitfalls({"LMCACHE_CONFIG_FILE": str(file)}, in_process=False, kfd="/nowhere")
    assert len(found) == 1
    assert "write fs://local:0/mnt/b" in found[0]
    assert not pitfalls({"LMCACHE_CONFIG_FILE": str(tmp_path)}, in_process=False, kfd="/nowhere")
    assert not pitfalls({"LMCACHE_CONFIG_FILE": "/dev/zero"}, in_process=False, kfd="/nowhere")


class Wheel:
    """A distribution of LMCache."""

    def __init__(self, version: str, requires: list[str] | None) -> None:
        self.version = version
        self.requires = requires


@pytest.mark.parametrize(
    ("version", "requires", "warns"),
    [
        ("0.5.6", ["torch", "cupy-cuda13x"], True),
        ("0.5.6+rocm7.2", ["torch", "cupy-cuda13x"], False),
        ("0.5.6", ["torch"], False),
        ("0.5.6", None, False),
    ],
)
def test_a_cuda_wheel_beside_an_amd_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, requires: list[str] | None, warns: bool
) -> None:
    kfd = tmp_path / "kfd"
    kfd.touch()
    given: Any = Wheel(version, requires)
    monkeypatch.setattr(pitfalls_module.metadata, "distribution", lambda _name: given)
    found = pitfalls({}, in_process=False, kfd=str(kfd))
    assert [f"lmcache {version} here is built for CUDA" in line for line in found] == [True] * warns
    assert not pitfalls({}, in_process=False, kfd=str(tmp_path / "none"))
