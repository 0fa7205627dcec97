"""Chunks come out of KV blocks and go back into them, whatever way the planes allow."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this environment")

from rewarm.kv import rows  # noqa: E402
from rewarm.kv.planes import PlaneSet, find_planes  # noqa: E402

NUM_BLOCKS, CHUNK_BLOCKS = 24, 4
CHUNKS = [array("q", [7, 3, 20, 11]), array("q", [0, 23, 1, 2]), array("q", [5])]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def caches_of(kind: str, device: str) -> dict[str, Any]:
    """A server's tensors, filled with different bytes everywhere."""
    if kind == "a tensor a layer":
        shapes: list[tuple[int, ...]] = [(NUM_BLOCKS, 2, 16, 24)] * 3
    elif kind == "K and V apart":
        shapes = [(2, NUM_BLOCKS, 16, 32)] * 3
    else:
        shapes = [(NUM_BLOCKS, 2, 16, 24), (NUM_BLOCKS, 2, 16, 40)]
    pool = torch.arange(1 << 18, dtype=torch.float32).to(device)
    made, begin = {}, -pool.data_ptr() % 4096 // 4  # a server's large tensors lie on such addresses
    for number, shape in enumerate(shapes):
        count = prod(shape)
        made[f"layers.{number}"] = pool[begin : begin + count].view(shape)
        begin += -(-count // 1024) * 1024
    return made


def expected(planes: PlaneSet, blocks: Sequence[int]) -> bytes:
    """[plane][block][page], one page after the other."""
    pages = [plane.words[block].cpu().numpy().tobytes() for plane in planes.planes for block in blocks]
    return b"".join(pages)


def staging_of(planes: PlaneSet) -> Any:
    return torch.zeros(planes.block_bytes * CHUNK_BLOCKS, dtype=torch.uint8, device=planes.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["a tensor a layer", "K and V apart", "pages of two sizes"])
@pytest.mark.parametrize("each_plane", [False, True])
def test_a_chunk_goes_out_and_back(kind: str, device: str, each_plane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if each_plane:
        monkeypatch.setattr(rows, "ONE_TENSOR", set())
    planes = find_planes(caches_of(kind, device), NUM_BLOCKS)
    way = rows.chunk_rows(planes, CHUNK_BLOCKS)
    assert ("All" in type(way).__name__) == (not each_plane and kind != "pages of two sizes")
    whole = [ids for ids in CHUNKS if len(ids) == CHUNK_BLOCKS]
    before = {block: expected(planes, [block]) for block in range(NUM_BLOCKS)}
    for ids, where in zip(whole, way.locate(whole), strict=True):
        staging = staging_of(planes)
        way.gather(where, staging)
        assert staging.cpu().numpy().tobytes() == expected(planes, ids)
        moved = array("q", [12, 13, 18, 9])
        way.scatter(staging, way.locate([moved])[0], 0)
        assert expected(planes, moved) == staging.cpu().numpy().tobytes()
    untouched = set(range(NUM_BLOCKS)) - {12, 13, 18, 9}
    assert all(expected(planes, [block]) == before[block] for block in untouched)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("each_plane", [False, True])
def test_leading_blocks_are_left_alone(device: str, each_plane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if each_plane:
        monkeypatch.setattr(rows, "ONE_TENSOR", set())
    planes = find_planes(caches_of("K and V apart", device), NUM_BLOCKS)
    way = rows.chunk_rows(planes, CHUNK_BLOCKS)
    staging = staging_of(planes)
    way.gather(way.locate([CHUNKS[0]])[0], staging)
    kept = expected(planes, [15, 16, 17])
    source = expected(planes, CHUNKS[0][3:])
    skipping = array("q", [19])
    places = way.locate([CHUNKS[1], skipping])
    way.scatter(staging, places[1], 3)
    assert expected(planes, skipping) == source
    assert expected(planes, [15, 16, 17]) == kept


def test_chunks_of_different_lengths_are_located_in_order() -> None:
    planes = find_planes(caches_of("a tensor a layer", "cpu"), NUM_BLOCKS)
    way = rows.chunk_rows(planes, CHUNK_BLOCKS)
    together = way.locate([CHUNKS[2], *CHUNKS, CHUNKS[2]])
    apart = [way.locate([ids])[0] for ids in [CHUNKS[2], *CHUNKS, CHUNKS[2]]]
    assert [place.tolist() for place in together] == [place.tolist() for place in apart]


def test_a_raster_too_fine_goes_plane_by_plane() -> None:
    memory = torch.zeros(10_000, dtype=torch.int64)
    caches = {"layers.0": memory[:1536].view(NUM_BLOCKS, 64), "layers.1": memory[1537:3073].view(NUM_BLOCKS, 64)}
    planes = find_planes(caches, NUM_BLOCKS)
    assert "Each" in type(rows.chunk_rows(planes, CHUNK_BLOCKS)).__name__
