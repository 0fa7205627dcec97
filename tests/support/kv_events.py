"""A router's ear: what a vLLM server publishes over ZeroMQ, in plain types, whatever the release's encoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_ORDER = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
}


class Subscriber:
    """Use as a context manager; ``wait_for`` reads until it has heard enough."""

    def __init__(self, port: int) -> None:
        import zmq

        self.events: list[dict[str, Any]] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")

    def __enter__(self) -> Subscriber:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)

    def wait_for(self, heard: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        end = time.monotonic() + limit_s
        while not heard():
            assert time.monotonic() < end, f"not within {limit_s} s: {what}"
            if self._socket.poll(100):
                self.events += decode(self._socket.recv_multipart()[2])

    def stored(self, medium: str = "STORAGE") -> dict[bytes, tuple[bytes | None, tuple[int, ...]]]:
        """Block hash -> (the hash before it, its tokens), of all that was stored."""
        blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        for event in self.events:
            if event["type"] == "BlockStored" and event["medium"] == medium:
                blocks.update(blocks_of(event))
        return blocks

    def removed(self, medium: str = "STORAGE") -> set[bytes]:
        """Block hashes of all that was removed."""
        found = [e for e in self.events if e["type"] == "BlockRemoved" and e["medium"] == medium]
        return {block_hash for event in found for block_hash in event["block_hashes"]}


def decode(payload: bytes) -> list[dict[str, Any]]:
    """The events of one message: maps since vLLM 0.26, arrays before."""
    import msgspec

    events = []
    for event in msgspec.msgpack.decode(payload)[1]:
        if isinstance(event, dict):
            events.append(event)
        else:
            kind, *values = event
            events.append({"type": kind, **dict(zip(_ORDER.get(kind, ()), values, strict=False))})
    return events


def blocks_of(event: dict[str, Any]) -> dict[bytes, tuple[bytes | None, tuple[int, ...]]]:
    """Each block of a BlockStored event by its hash."""
    size, tokens, hashes = event["block_size"], event["token_ids"], event["block_hashes"]
    assert len(tokens) == size * len(hashes)
    before = [event["parent_block_hash"], *hashes]
    return {
        block_hash: (before[index], tuple(tokens[index * size : (index + 1) * size]))
        for index, block_hash in enumerate(hashes)
    }
