"""A whole run on a few small chunks: every figure is there, every byte was compared, nothing is left. No time is
asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rewarm.bench import host_tier, kv
from rewarm.bench.arms import Shape
from rewarm.bench.goals import GOALS_FILE, read_goals, unmeasured
from rewarm.bench.index import make_named_volume, run_child
from rewarm.bench.memory import Memory
from rewarm.bench.volume_side import VolumeSide
from rewarm.errors import DamageError, StorageError
from rewarm.units import KIB, MIB
from rewarm.volume import promote

SMALL = Shape(64 * KIB, 1, MIB)
TINY = kv.Plan(
    read_shapes=(SMALL, Shape(64 * KIB, 4, 256 * KIB)),
    store_shapes=(SMALL,),
    gil_shape=SMALL,
    host_shape=SMALL,
    rounds=1,
    crowd_rounds=1,
    sleep_phase_s=0.01,
    index_records=1500,
    index_rounds=1,
    floor_tool="own",
)


def test_a_run_gives_every_figure_and_leaves_nothing(root: Path) -> None:
    steps: list[str] = []
    plan = replace(TINY, with_peer=False)
    report = kv.run(root, plan, command="rewarm bench kv", step=steps.append)
    plain = {figure.name for figure in report.figures if "@" not in figure.name}
    assert plain >= {
        "kv.read.64KiB.x1",
        "kv.cpu.64KiB.x1",
        "kv.read.64KiB.x4",
        "kv.store.64KiB",
        "kv.host.64KiB",
        "kv.host_half.64KiB",
        "kv.gil.load_added_by_thread",
        "kv.gil.load_added_by_process",
        "kv.gil.sleep_1ms_p99",
        "kv.index.scan",
        "kv.index.lookups_1000",
        "kv.index.bytes_per_record",
    }
    assert len(steps) <= plan.num_steps
    assert list(root.iterdir()) == []
    document = json.loads(report.to_json())
    assert document["environment"]["floor"].startswith("O_DIRECT reader: read blocks of")
    assert document["environment"]["peer"] is None


@pytest.mark.vllm
def test_the_peer_takes_part(root: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    plan = kv.Plan(
        **{name: getattr(TINY, name) for name in TINY.__slots__} | {"index_records": 0, "engines": ("pure",)}
    )
    report = kv.run(root, plan, command="rewarm bench kv")
    figures = {figure.name: figure for figure in report.figures}
    assert figures["kv.read.64KiB.x1"].peer_ratio is not None
    assert "kv.read.64KiB.x1@fs_tier_in_our_memory" in figures


def test_every_goal_has_its_figure_in_a_full_run(root: Path) -> None:
    goals = read_goals(GOALS_FILE, "kv")
    reads = {f"kv.{what}.{shape.label}" for shape in kv.FULL.read_shapes for what in ("read", "cpu")}
    assert {name for name in unmeasured([], goals) if name.startswith(("kv.read", "kv.cpu"))} <= reads


def test_our_side_misses_and_damage_are_errors_not_figures(root: Path) -> None:
    memory = Memory(MIB)
    side = VolumeSide(root / "ours", memory, kind="pure", capacity_bytes=MIB)
    try:
        side.fill(SMALL)
        assert side.load(SMALL).num_bytes == MIB
        memory.check(MIB, side.name)
        with memory.rows(MIB) as rows:
            rows[1, 5] ^= 1
        with pytest.raises(DamageError):
            memory.check(MIB, side.name)
        side.files(SMALL)[3].unlink()
        with pytest.raises(StorageError, match="missed chunks"):
            side.load(SMALL)
    finally:
        side.close()
        memory.close()


def test_the_index_bench_counts_what_is_there(tmp_path: Path) -> None:
    make_named_volume(tmp_path / "volume", 1500)
    found = run_child(tmp_path / "volume", 1500)
    assert found["returncode"] == 0
    assert found["lookups_ms"] > 0
    with pytest.raises(StorageError, match="the index bench's process failed"):
        run_child(tmp_path / "volume", 3000)  # half of the keys were never made


def test_without_memory_for_a_host_tier_it_is_left_out_and_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "file_system_type", lambda _path: 0xEF53)
    plan = replace(TINY, with_peer=False, engines=("pure",), index_records=0)
    report = kv.run(root, plan, command="")
    assert not [figure.name for figure in report.figures if figure.name.startswith("kv.host")]
    assert report.notes == ["no host tier: /dev/shm is no tmpfs here"]


def test_a_figure_of_a_host_tier_without_its_copies_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came from flash must not be told as memory's."""
    monkeypatch.setattr(promote.Promoter, "_copy", lambda *_: "failed")
    plan = replace(TINY, with_peer=False, engines=("pure",), index_records=0)
    with pytest.raises(StorageError, match="did not come from the tier where it should be"):
        kv.run(root, plan, command="")
    assert list(root.iterdir()) == []
