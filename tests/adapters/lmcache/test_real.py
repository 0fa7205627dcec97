"""The seats through LMCache's own loaders and memory, where LMCache is installed."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmcache_drive as drive
import pytest
from lmcache_drive import object_key

from rewarm.adapters.lmcache.backend import StartRefused
from rewarm.units import GIB
from rewarm.volume import create_volume

pytestmark = [
    pytest.mark.usefixtures("real_lmcache"),
    pytest.mark.filterwarnings("default"),  # what LMCache and its packages warn about is theirs
]

TOKENS, LAYERS, HEADS, HEAD = 256, 4, 2, 64
COUNT = 4


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "volume")
    create_volume([path], capacity_bytes=GIB)
    return path


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(drive.WAIT_S)
    made.close()


def engine_config(root: str, **changed: Any) -> Any:
    from lmcache.v1.config import LMCacheEngineConfig

    values = {
        "chunk_size": TOKENS,
        "local_cpu": False,
        "max_local_cpu_size": 0.25,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "storage_plugins": ["rewarm"],
        "extra_config": {
            "storage_plugin.rewarm.module_path": "rewarm.adapters.lmcache",
            "storage_plugin.rewarm.class_name": "RewarmBackend",
            "rewarm.roots": [root],
            "rewarm.weights": drive.WEIGHTS,
        },
    }
    config = LMCacheEngineConfig.from_defaults(**{**values, **changed})
    config.validate()
    return config


def engine_metadata() -> Any:
    import torch
    from lmcache.v1.metadata import LMCacheMetadata

    return LMCacheMetadata(
        model_name=drive.MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, TOKENS, HEADS, HEAD),
        role="worker",
        chunk_size=TOKENS,
    )


def engine_key(number: int) -> Any:
    import torch
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey(drive.MODEL, 1, 0, (number + 1) << 200 | number, torch.bfloat16)


def launched(root: str, loop: Any, **changed: Any) -> tuple[Any, Any]:
    """(CPU backend, the seat), made by LMCache's own code."""
    from lmcache.v1.storage_backend import LocalCPUBackend, storage_plugin_launcher

    config, metadata = engine_config(root, **changed), engine_metadata()
    cpu = LocalCPUBackend(config, metadata, "cpu")
    backends: OrderedDict[str, Any] = OrderedDict()
    storage_plugin_launcher(config, metadata, loop, cpu, "cpu", backends)
    return cpu, backends["rewarm"]


def test_the_plug_in_through_lmcaches_launcher_and_memory(root: str, loop: Any) -> None:
    import torch

    keys = [engine_key(number) for number in range(COUNT)]
    cpu, seat = launched(root, loop)
    shape = engine_metadata().get_shapes()[0]
    objects = [cpu.allocate(shape, torch.bfloat16) for _ in keys]
    wanted = []
    for number, memory_obj in enumerate(objects):
        memory_obj.tensor.copy_(torch.randn(shape) + number)
        wanted.append(memory_obj.tensor.clone())
    done: list[Any] = []
    seat.batched_submit_put_task(keys, objects, on_complete_callback=done.append)
    drive.until(lambda: len(done) == COUNT, "a store did not end")
    for memory_obj in objects:
        memory_obj.ref_count_down()
    seat.close()
    cpu, seat = launched(root, loop)
    assert seat.batched_contains(keys) == COUNT
    for got in (
        seat.batched_get_blocking(keys),
        asyncio.run_coroutine_threadsafe(seat.batched_get_non_blocking("id", keys), loop).result(drive.WAIT_S),
    ):
        assert all(torch.equal(found.tensor, tensor) for found, tensor in zip(got, wanted, strict=True))
        for found in got:
            found.ref_count_down()
    seat.close()


def test_lmcaches_launcher_does_not_serve_without_the_tier(root: str, loop: Any) -> None:
    with pytest.raises(StartRefused, match="save_unfull_chunk: false"):
        launched(root, loop, save_unfull_chunk=True)


def test_lmcache_reads_what_rewarm_lmcache_config_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.distributed.l2_adapters import config as l2_config

    from rewarm.cli.common import run
    from rewarm.cli.main import cli

    place = ["--root", str(tmp_path / "kv"), "--size", "64MiB", "--model", f"{drive.MODEL}=label:x"]
    assert run(cli, ["lmcache", "config", "--mode", "engine", *place]) == 0
    file = tmp_path / "lmcache.yaml"
    file.write_text(capsys.readouterr().out)
    config = LMCacheEngineConfig.from_file(str(file))
    assert config.storage_plugins == ["rewarm"]
    assert config.extra_config["rewarm.weights"] == {drive.MODEL: "label:x"}
    assert run(cli, ["lmcache", "config", "--mode", "server", *place]) == 0
    parser = argparse.ArgumentParser()
    l2_config.add_l2_adapters_args(parser)
    arguments = parser.parse_args(["--l2-adapter", capsys.readouterr().out.strip()])
    adapter = l2_config.parse_args_to_l2_adapters_config(arguments).adapters[0]
    assert adapter.adapter_params["roots"] == [str(tmp_path / "kv")]


def test_the_l2_adapter_through_lmcaches_factory_and_memory(root: str) -> None:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    spec = {
        "type": "plugin",
        "module_path": "rewarm.adapters.lmcache",
        "class_name": "RewarmL2",
        "adapter_params": {"roots": [root], "weights": drive.WEIGHTS},
    }
    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, init_size_in_bytes=64 << 20)
    l1 = L1Manager(L1ManagerConfig(memory_config=memory))
    layout = MemoryLayoutDesc(shapes=[torch.Size([2, LAYERS, TOKENS, HEADS * HEAD])], dtypes=[torch.bfloat16])
    keys = [object_key(number) for number in range(COUNT)]

    def buffers() -> list[Any]:
        reserved = l1.reserve_write(keys, [False] * COUNT, layout)
        return [reserved[key][1] for key in keys]

    objects = buffers()
    wanted = []
    for number, memory_obj in enumerate(objects):
        memory_obj.tensor.copy_(torch.randn(memory_obj.tensor.shape) + number)
        wanted.append(memory_obj.tensor.clone())
    made = PluginL2AdapterConfig.from_dict(json.loads(json.dumps(spec)))
    seat = create_l2_adapter(made, l1.get_l1_memory_desc())
    assert drive.store(seat, keys, objects).is_successful()
    seat.close()
    for memory_obj in objects:
        memory_obj.tensor.zero_()
    seat = create_l2_adapter(made, l1.get_l1_memory_desc())
    assert drive.look_up(seat, keys) == [True] * COUNT
    assert drive.load(seat, keys, objects) == [True] * COUNT
    assert all(torch.equal(found.tensor, tensor) for found, tensor in zip(objects, wanted, strict=True))
    seat.close()
    l1.close()
