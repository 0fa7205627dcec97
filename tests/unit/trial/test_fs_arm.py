"""The two additions to vLLM's own tier, against vLLM's real classes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="needs vLLM's own classes")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
fs_arm: Any = pytest.importorskip("rewarm.trial.fs_arm", reason="this vLLM has no tiering", exc_type=ImportError)


class Region:
    """The host memory that vLLM shares between its processes."""

    def __init__(self) -> None:
        self.views: list[Any] = []

    def create_next_worker_view(self, num_bytes: int) -> Any:
        self.views.append(torch.zeros((4, num_bytes), dtype=torch.int8))
        return self.views[-1]

    def cleanup(self) -> None:
        self.views.clear()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_blocks_come_back_from_the_host_as_they_were(blocks_per_chunk: int) -> None:
    layers = [torch.arange(6 * 64, dtype=torch.int32).to(torch.int8).reshape(6, 64) + n for n in range(3)]
    kept = [layer.clone() for layer in layers]
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=layer, page_size_bytes=64) for layer in layers],
        group_data_refs=[[SimpleNamespace(page_size_bytes=64)] * 3],
    )
    worker = fs_arm._MemoryMoves(caches, blocks_per_chunk, Region())
    blocks = [4, 1, 0, 5][: 2 * blocks_per_chunk]
    kv = SimpleNamespace(block_ids=np.array(blocks), block_indices=[0])
    host = SimpleNamespace(block_ids=np.array([3, 1]))
    assert worker.submit_store(1, kv, host)
    for layer in layers:
        layer.zero_()
    assert worker.submit_load(2, host, kv)
    assert [(each.job_id, each.success) for each in worker.get_finished()] == [(1, True), (2, True)]
    assert worker.get_finished() == []
    for layer, before in zip(layers, kept, strict=True):
        assert torch.equal(layer[blocks], before[blocks])
        others = [block for block in range(6) if block not in blocks]
        assert not layer[others].any()


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fs_arm, "time", clock)
    return clock


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Any:
    """A tier whose files answer at once: what is left of the time is the pace."""
    finished: list[Any] = []
    base = fs_arm.FileSystemTierManager
    monkeypatch.setattr(base, "__init__", lambda self, *args, **kwargs: setattr(self, "_block_size", 1000))
    monkeypatch.setattr(base, "submit_load", lambda self, job: finished.append(SimpleNamespace(job_id=job.job_id)))

    def take(_self: Any) -> list[Any]:
        taken = list(finished)
        finished.clear()
        return taken

    monkeypatch.setattr(base, "get_finished_jobs", take)
    limit = tmp_path / "limit"
    limit.write_text("0")
    return fs_arm.PacedFsTier(limit_file=str(limit))


def ids(tier: Any) -> list[int]:
    return [job.job_id for job in tier.get_finished_jobs()]


def test_without_a_limit_nothing_is_held(tier: Any) -> None:
    tier.submit_load(SimpleNamespace(job_id=1, keys=[0] * 10))
    assert ids(tier) == [1]


def test_jobs_pass_a_link_one_after_another(tier: Any, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("5000")
    tier.submit_load(SimpleNamespace(job_id=1, keys=[0] * 10))  # 10,000 bytes: 2 s
    tier.submit_load(SimpleNamespace(job_id=2, keys=[0] * 5))  # 1 s more
    assert ids(tier) == []
    clock.now = 102.0
    assert ids(tier) == [1]
    clock.now = 102.9
    assert ids(tier) == []
    clock.now = 103.0
    assert ids(tier) == [2]
    clock.now = 200.0  # the link was free meanwhile: nothing is saved up
    tier.submit_load(SimpleNamespace(job_id=3, keys=[0] * 5))
    assert ids(tier) == []
    clock.now = 201.0
    assert ids(tier) == [3]


def test_stores_are_never_held(tier: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("1")
    tier.submit_load(SimpleNamespace(job_id=1, keys=[0]))
    monkeypatch.setattr(fs_arm.FileSystemTierManager, "get_finished_jobs", lambda _self: [SimpleNamespace(job_id=7)])
    assert ids(tier) == [7]
