"""Finding each KV block's bytes, whatever the tensors look like."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this environment")

from rewarm.errors import AdapterError  # noqa: E402
from rewarm.kv.planes import PlaneSet, find_planes  # noqa: E402

B = 6
"""KV blocks."""


def bytes_of(planes: PlaneSet, block: int) -> bytes:
    return b"".join(plane.words[block].contiguous().numpy().tobytes() for plane in planes.planes)


def logical_block(tensors: dict[str, torch.Tensor], block: int, block_dim: int) -> list[float]:
    return sorted(v for t in tensors.values() for v in t.select(block_dim, block).flatten().tolist())


@pytest.mark.parametrize(
    ("shape", "order", "block_dim", "num_planes"),
    [
        ((B, 2, 16, 8), (0, 1, 2, 3), 0, 1),  # blocks first
        ((2, B, 16, 8), (0, 1, 2, 3), 1, 2),  # K and V apart
        ((B, 2, 16, 8), (1, 0, 2, 3), 0, 2),  # the same in another physical order
        ((B, 16, 4, 8), (0, 2, 1, 3), 0, 1),  # heads before tokens
    ],
)
def test_every_layout_gives_all_bytes_of_a_block_once(
    shape: tuple[int, ...], order: tuple[int, ...], block_dim: int, num_planes: int
) -> None:
    tensors = {}
    for layer in (10, 2):
        count = torch.Size(shape).numel()
        physical = torch.arange(count, dtype=torch.float32).reshape([shape[d] for d in order]) + layer * 10_000
        tensors[f"layers.{layer}"] = physical.permute([order.index(d) for d in range(len(shape))])
    planes = find_planes(tensors, B)
    assert len(planes.planes) == 2 * num_planes
    assert planes.block_bytes == 2 * torch.Size(shape).numel() // B * 4
    for block in range(B):
        values = torch.frombuffer(bytearray(bytes_of(planes, block)), dtype=torch.float32).tolist()
        assert sorted(values) == logical_block(tensors, block, block_dim)
        assert values[0] < 30_000, "layer 2 comes before layer 10"


def test_planes_are_views_of_the_servers_memory() -> None:
    tensor = torch.zeros(B, 2, 16, 8)
    planes = find_planes({"layers.0": tensor}, B)
    with torch.inference_mode():
        planes.planes[0].words[3].fill_(-1)
    assert bool((tensor[3].view(torch.int32) == -1).all())
    assert bool((tensor[[0, 1, 2, 4, 5]] == 0).all())


def test_a_tuple_of_tensors_and_a_shared_layer_count_once() -> None:
    key, value = torch.zeros(B, 16, 8), torch.ones(B, 16, 8)
    planes = find_planes({"layers.0": (key, value), "layers.1": (key, value)}, B)
    assert len(planes.planes) == 2
    assert planes.page_bytes == 16 * 8 * 4


def test_a_tensor_that_splits_each_block_is_one_page_a_block() -> None:
    planes = find_planes({"layers.0": torch.zeros(4 * B, 2, 4, 8)}, B)
    assert planes.block_bytes == 4 * 2 * 4 * 8 * 4
    assert "B*4" in str(planes.layout)


def test_layers_side_by_side_in_each_block_are_one_plane() -> None:
    whole = torch.zeros(B, 3, 16, 8)
    planes = find_planes({f"layers.{layer}": whole[:, layer] for layer in range(3)}, B)
    assert [plane.page_bytes for plane in planes.planes] == [3 * 16 * 8 * 4]


def test_the_layout_is_the_same_for_another_number_of_blocks_and_differs_with_the_dtype() -> None:
    small = find_planes({"layers.0": torch.zeros(B, 2, 16, 8)}, B).layout
    assert find_planes({"layers.0": torch.zeros(5 * B, 2, 16, 8)}, 5 * B).layout == small
    assert find_planes({"layers.0": torch.zeros(B, 2, 16, 8, dtype=torch.bfloat16)}, B).layout != small


def test_what_has_no_blocks_is_refused_by_name() -> None:
    with pytest.raises(AdapterError, match=r"layers\.0 has shape"):
        find_planes({"layers.0": torch.zeros(B + 1, 2, 16, 8)}, B)
    with pytest.raises(AdapterError, match="do not lie together"):
        find_planes({"layers.0": torch.zeros(B, 16, 8)[:, :, :4]}, B)
    with pytest.raises(AdapterError, match="keeps no KV cache"):
        find_planes({}, B)


def test_layers_of_several_groups_count_once_and_must_see_their_memory_alike() -> None:
    memory = torch.zeros(B * 2 * 16 * 8)
    alike = {f"layers.{layer}": memory.view(B, 2, 16, 8) for layer in range(2)}
    assert find_planes(alike, B).block_bytes == 2 * 16 * 8 * 4
    other_heads = {**alike, "layers.2": memory.view(B, 4, 8, 8)}
    assert find_planes(other_heads, B).block_bytes == 2 * 16 * 8 * 4
    part = {**alike, "layers.2": memory.view(B, 2 * 16 * 8)[:, 8:]}
    with pytest.raises(AdapterError, match="share memory in different shapes"):
        find_planes(part, B)


def test_a_cache_of_one_latent_a_token_and_one_of_one_byte_a_value_are_found() -> None:
    """Shapes as vLLM 0.32 hands them over on CPU: MLA, and fp8."""
    latent = find_planes({"layers.0": torch.zeros(B, 16, 576)}, B)
    assert latent.page_bytes == 16 * 576 * 4
    fp8 = torch.zeros(B, 4, 32, 128, dtype=torch.float8_e5m2)
    planes = find_planes({"layers.0": fp8}, B)
    assert planes.page_bytes == 4 * 32 * 128
    assert planes.layout != find_planes({"layers.0": fp8.view(torch.float8_e4m3fn)}, B).layout
