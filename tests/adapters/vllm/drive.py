"""Runs the connector against the vLLM that this process imports: ``python drive.py FOLDER``, JSON on the last line.

The classes are vLLM's own: its configuration, connector base and factory, scheduler, KV cache manager, metrics. Only
the model is played (tests/fault/mini_server.py, which PYTHONPATH must reach, as it must tests/support).
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import kv_events
import mini_server
import msgspec
import vllm
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from rewarm.adapters.vllm import RewarmConnector
from rewarm.adapters.vllm.stats import RewarmStats
from rewarm.errors import AdapterError
from rewarm.volume import create_volume

NUM_BLOCKS = 64
PROMPT_TOKENS = 300
WINDOW = 100
"""Tokens of a sliding window."""
CHUNKS = PROMPT_TOKENS // mini_server.CHUNK_TOKENS


def main(folder: Path) -> dict[str, Any]:
    model = mini_server.write_tiny_model(folder / "model")
    root = folder / "root"
    create_volume([str(root)], capacity_bytes=64 << 20)
    server = make_server(model, root)
    prompts = [[n * 7 + index % 251 for index in range(PROMPT_TOKENS)] for n in range(3)]
    try:
        return {
            "version": vllm.__version__,
            "abstract": sorted(RewarmConnector.__abstractmethods__),
            "signatures": differing_signatures(),
            "stored": [served.good_blocks for served in server.run(prompts, until=lambda: records(root) >= 3 * CHUNKS)],
            "loaded": run_cold(server, prompts),
            "damaged": run_damaged(server, root, prompts),
            "preempted": run_preempted(server),
            "aborted": run_aborted(server, prompts),
            "metrics": render_metrics(server, model, root),
            "refused": refusal(model, root),
            "all slide": run_windows(model, folder / "slide", (WINDOW,)),
            "some slide": run_windows(model, folder / "some", (0, WINDOW)),
            "events": run_events(model, folder / "events"),
        }
    finally:
        server.close()


def make_server(model: Path, root: Path, **extra: Any) -> mini_server.MiniServer:
    return mini_server.MiniServer(make_config(model, root, **extra), NUM_BLOCKS)


def make_config(model: Path, root: Path, **extra: Any) -> Any:
    return mini_server.make_vllm_config(
        model,
        {"roots": [str(root)], "chunk_tokens": mini_server.CHUNK_TOKENS, **extra},
        NUM_BLOCKS,
        kv_connector="RewarmConnector",
        kv_connector_module_path="rewarm.adapters.vllm",
    )


def records(root: Path) -> int:
    return sum(1 for _ in root.glob("*/??/*.rec"))


def differing_signatures() -> list[str]:
    """Methods of vLLM's base class that this release would call with arguments that ours does not take."""
    wrong = []
    for name, theirs in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction):
        ours = getattr(RewarmConnector, name)
        if ours is theirs or name == "__init__":
            continue
        wanted = [p.name for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        have = [p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if wanted != have:
            wrong.append(f"{name}: {wanted} against {have}")
    return wrong


def run_cold(server: mini_server.MiniServer, prompts: list[list[int]]) -> list[int]:
    """Blocks found right after the device forgot everything; together, so that loads overlap."""
    server.forget_device_cache()
    served = server.run(prompts)
    assert not any(one.wrong_blocks for one in served)
    return [one.good_blocks for one in served]


def run_damaged(server: mini_server.MiniServer, root: Path, prompts: list[list[int]]) -> list[int]:
    """(blocks found, blocks that failed) of a request one of whose chunks was damaged on disk."""
    for record in root.glob("*/??/*.rec"):
        data = bytearray(record.read_bytes())
        data[-1 - len(data) // 3] ^= 0x10
        record.write_bytes(data)
    server.forget_device_cache()
    (served,) = server.run(prompts[:1], until=lambda: records(root) >= CHUNKS)
    assert not served.wrong_blocks
    return [served.good_blocks, served.failed_blocks]


def run_preempted(server: mini_server.MiniServer) -> int:
    """Preemptions while requests that together need more blocks than there are store and load."""
    server.forget_device_cache()
    ids = [
        server.add([n * 11 + index % 241 for index in range(PROMPT_TOKENS + 16)], output_tokens=60)
        for n in range(9, 13)
    ]
    requests = [server.scheduler.requests[request_id] for request_id in ids]
    server.drain(lambda: not server.scheduler.has_unfinished_requests(), "requests that preempt each other")
    served = [server._live.pop(request_id).served for request_id in ids]
    assert not any(one.wrong_blocks for one in served)
    return sum(request.num_preemptions for request in requests)


def run_aborted(server: mini_server.MiniServer, prompts: list[list[int]]) -> bool:
    """A client that goes away while its KV is loaded: its blocks come back, and the next request is served right."""
    server.forget_device_cache()
    request_id = server.add(prompts[0])
    server.step()
    server.abort(request_id)
    server.drain(lambda: not server.scheduler.requests, "the aborted request")
    server._live.pop(request_id)
    (served,) = server.run(prompts[1:2])
    return served.wrong_blocks == 0 and server.scheduler.kv_cache_manager.usage == 0


def run_windows(model: Path, root: Path, windows: tuple[int, ...]) -> list[Any]:
    """Of a model with sliding windows: blocks found, and found once all records are damaged; or why it is refused."""
    create_volume([str(root)], capacity_bytes=64 << 20)
    try:
        server = mini_server.MiniServer(make_config(model, root), NUM_BLOCKS, windows=windows)
    except AdapterError as error:
        return [str(error)]
    try:
        prompt = [index % 251 for index in range(PROMPT_TOKENS)]
        server.run([prompt], until=lambda: records(root) >= CHUNKS * len(windows))
        (good,) = run_cold(server, [prompt])
        for record in root.glob("*/??/*.rec"):
            data = bytearray(record.read_bytes())
            data[len(data) // 2] ^= 0x10
            record.write_bytes(data)
        (good_of_damaged,) = run_cold(server, [prompt])
        return [good, good_of_damaged]
    finally:
        server.close()


def render_metrics(server: mini_server.MiniServer, model: Path, root: Path) -> list[str]:
    """Names that /metrics would show, from what both sides counted."""
    sides = [server.worker, server.scheduler.connector]
    first, second = (RewarmStats.of(side._counters.samples()) for side in sides)
    total = first.aggregate(second)
    sent = json.loads(json.dumps(total.data))  # as it passes between processes: tuples become lists
    assert RewarmConnector.build_kv_connector_stats(sent).reduce()
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = RewarmConnector.build_prom_metrics(make_config(model, root), types, ["engine"], {0: ["0"]})
    metrics.observe(sent, 0)
    lines = generate_latest(REGISTRY).decode().splitlines()
    return sorted({line.split("{")[0] for line in lines if line.startswith("rewarm_")})


def run_events(model: Path, root: Path) -> dict[str, Any]:
    """What routers are told in this release's encoding, and whether it is what vLLM tells of its own blocks."""
    from vllm.config.kv_events import KVEventsConfig

    create_volume([str(root)], capacity_bytes=64 << 20)
    config = make_config(model, root)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    server = mini_server.MiniServer(config, NUM_BLOCKS)
    heard: list[dict[str, Any]] = []

    def publish(batch: Any) -> None:
        heard.extend(kv_events.decode(msgspec.msgpack.encode(batch)))

    server.scheduler.kv_event_publisher.publish = publish
    prompt = [index % 251 for index in range(PROMPT_TOKENS)]

    def of_medium(kind: str, medium: str) -> list[dict[str, Any]]:
        return [event for event in heard if event["type"] == kind and event.get("medium") == medium]

    try:
        server.run([prompt], until=lambda: len(of_medium("BlockStored", "STORAGE")) >= CHUNKS)
        told: dict[str, dict[bytes, Any]] = {"STORAGE": {}, "GPU": {}}
        for medium, blocks in told.items():
            for event in of_medium("BlockStored", medium):
                blocks.update(kv_events.blocks_of(event))
        run_damaged(server, root, [prompt])
        removed = {block for event in of_medium("BlockRemoved", "STORAGE") for block in event["block_hashes"]}
        server.drain(lambda: len(of_medium("BlockStored", "STORAGE")) > CHUNKS, "a chunk that is announced again")
    finally:
        server.close()
    return {
        "stored_blocks": len(told["STORAGE"]),
        "differ": [block.hex() for block, said in told["STORAGE"].items() if told["GPU"].get(block) != said],
        "removed": bool(removed) and removed <= set(told["STORAGE"]),
    }


def refusal(model: Path, root: Path) -> str:
    """What a user reads whose release of vLLM is not known."""
    real = vllm.__version__
    vllm.__version__ = "0.99.0"
    try:
        make_server(model, root).close()
    except AdapterError as error:
        return str(error)
    finally:
        vllm.__version__ = real
    return ""


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
