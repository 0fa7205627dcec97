"""A whole run on a small KV cache: every figure is there, every byte was compared on the device, nothing is left. No
time is asserted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this environment")

from rewarm.bench import device  # noqa: E402
from rewarm.bench.device_cache import KvCache  # noqa: E402
from rewarm.bench.device_chart import write_chart  # noqa: E402
from rewarm.bench.device_turns import DeviceRank  # noqa: E402
from rewarm.bench.goals import GOALS_FILE, judge, read_goals, unmeasured  # noqa: E402
from rewarm.bench.report import Figure, Report, measured  # noqa: E402
from rewarm.cli.common import run  # noqa: E402
from rewarm.cli.main import cli  # noqa: E402
from rewarm.config import KvConfig  # noqa: E402
from rewarm.errors import DamageError, ExitCode, StorageError, UnsupportedError, UsageError  # noqa: E402
from rewarm.units import MIB  # noqa: E402
from rewarm.volume import create_volume  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CHUNK_BLOCKS, REQUEST_BLOCKS, LAYERS = 2, 8, 3
TINY = device.Plan(
    layers=LAYERS,
    kv_heads=1,
    head_size=32,
    tokens=REQUEST_BLOCKS * device.BLOCK_TOKENS,
    requests=3,
    rounds=2,
    chunk_tokens=CHUNK_BLOCKS * device.BLOCK_TOKENS,
    ring_bytes=MIB,
)
ALWAYS = {
    "link.in",
    "link.out",
    "read",
    "scatter",
    "load.x1",
    "load.x1.returned",
    "load.x3",
    "load.x3.returned",
    "store",
}
MARKS = {f"load.{load}.{mark}" for load in ("x1", "x3") for mark in ("first_read", "last_read", "in_place", "queueing")}


def make_cache(name: str) -> KvCache:
    return KvCache(
        device.find_device(name), layers=LAYERS, shape=(1, 16, 64), requests=3, request_blocks=REQUEST_BLOCKS
    )


@pytest.mark.parametrize("name", DEVICES)
def test_a_run_gives_every_figure_and_leaves_nothing(root: Path, name: str) -> None:
    steps: list[str] = []
    plan = replace(TINY, device=name)
    report = device.run(root, plan, command="rewarm bench device", step=steps.append)
    figures = {figure.name.removeprefix("kv.device."): figure for figure in report.figures}
    requests = {f"load.x3.{number}" for number in (1, 2, 3)}
    assert set(figures) == ALWAYS | requests | (MARKS if name == "cuda" else set())
    assert len(steps) == plan.num_steps
    assert all(figure.spread.count == 2 and figure.value > 0 for figure in report.figures)
    without_floor = {name for name, figure in figures.items() if figure.floor_ratio is None}
    assert without_floor == {"link.in", "link.out"}
    assert {name for name, figure in figures.items() if figure.unit == "GiB/s"} == {"link.in", "link.out", "store"}
    assert figures["load.x3.3"].value == figures["load.x3"].value
    assert not unmeasured(report.figures, read_goals(GOALS_FILE, "device"))
    assert list(root.iterdir()) == []
    environment = json.loads(report.to_json())["environment"]
    assert environment["kv"]["chunk_tokens"] == plan.chunk_tokens
    assert environment["chunk_bytes"] * 4 == environment["request_bytes"]
    assert (environment["accelerator"] == "cpu") == bool(report.notes) == (name == "cpu")


def test_one_request_is_loaded_alone_only(root: Path) -> None:
    steps: list[str] = []
    plan = replace(TINY, device="cpu", requests=1, rounds=1)
    names = {figure.name for figure in device.run(root, plan, command="", step=steps.append).figures}
    assert {name for name in names if ".load." in name} == {"kv.device.load.x1", "kv.device.load.x1.returned"}
    assert len(steps) == plan.num_steps


@pytest.mark.parametrize("name", DEVICES)
def test_a_load_brings_back_what_was_stored_and_a_wrong_byte_is_seen(root: Path, name: str) -> None:
    create_volume([str(root / "volume")], capacity_bytes=64 * MIB)
    cache = make_cache(name)
    kv = KvConfig(roots=(str(root / "volume"),), ring_bytes=MIB)
    rank = DeviceRank(cache, kv, request_blocks=REQUEST_BLOCKS, chunk_blocks=CHUNK_BLOCKS)
    try:
        for request in range(2):
            cache.paint(request)
            assert rank.fill(request) > 0
        cache.shuffle(1)
        cache.poison()
        with pytest.raises(DamageError, match="request 0 was loaded with other bytes"):
            cache.check([0])
        rank.load([0])
        cache.check([0])
        with pytest.raises(DamageError, match="not its own"):
            cache.check([])
        rank.load([0, 1])
        cache.check([0, 1])
        cache._words[1][cache.blocks(1, 3, 1)[0], 5] ^= 1
        with pytest.raises(DamageError, match=r"request 1 .* layer 1"):
            cache.check([0, 1])
        written = len(rank.record_files())
        assert rank.store_gib_s(0) > 0
        assert len(list((root / "volume").rglob("*.rec"))) == written == 8, "what was written anew is removed again"
        rank.record_files()[0].unlink()
        with pytest.raises(StorageError, match="chunks were not loaded: MISS"):
            rank.load([0, 1])
        with pytest.raises(StorageError, match="a record was not read: MISS"):
            [rank.read_ms(request) for request in (0, 1)]
    finally:
        rank.close()


def test_every_word_of_a_cache_is_its_own() -> None:
    cache = make_cache("cpu")
    for request in range(3):
        cache.paint(request)
    painted = [torch.cat([words[list(cache.blocks(r, 0, REQUEST_BLOCKS))] for r in range(3)]) for words in cache._words]
    assert len(torch.stack(painted).unique()) == torch.stack(painted).numel()


def test_a_store_that_fails_is_an_error_not_a_figure(root: Path) -> None:
    create_volume([str(root / "volume")], capacity_bytes=MIB)
    cache = KvCache(device.find_device("cpu"), layers=8, shape=(4, 16, 128), requests=1, request_blocks=64)
    kv = KvConfig(roots=(str(root / "volume"),), ring_bytes=MIB)
    rank = DeviceRank(cache, kv, request_blocks=64, chunk_blocks=2)  # 8 MiB into a volume of 1 MiB
    try:
        cache.paint(0)
        with pytest.raises(StorageError, match="chunks were not stored"):
            rank.fill(0)
    finally:
        rank.close()


def test_devices_and_sizes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.find_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match="'warp' is not a device"):
        device.find_device("warp")
    with pytest.raises(UnsupportedError, match="there is no device cuda:99 here"):
        device.find_device("cuda:99")
    with pytest.raises(UsageError, match="128 tokens a request are no multiple of a chunk of 48") as caught:
        replace(TINY, chunk_tokens=48).chunk_blocks(on_host=True)
    assert "--tokens 144" in caught.value.hint
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match="needs torch") as missing:
        device.find_device("auto")
    assert "pip install torch" in missing.value.hint


def test_the_command_judges_no_goal_in_host_memory(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    goals = root / "goals.toml"
    goals.write_text('[device."kv.device.load.x1"]\nat_most = 0\n')
    words = "--device cpu --layers 2 --kv-heads 1 --head-size 32 --tokens 64 --requests 2 --rounds 1 --chunk-tokens 32"
    chosen = ["--root", str(root), "--ring-bytes", "1MiB", "--check", "--goals", str(goals), "--json"]
    assert run(cli, ["bench", "device", *words.split(), *chosen]) == ExitCode.DONE
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["schema"] == "rewarm.bench/1"
    assert all(figure["holds"] is None for figure in document["figures"])
    assert "the floor is a copy within it" in err
    assert [path.name for path in root.iterdir()] == ["goals.toml"]


def test_the_goal_is_a_ratio_to_the_link() -> None:
    goals = read_goals(GOALS_FILE, "device")
    near, far = (measured("kv.device.load.x1", "ms", [value], floors=[80.0]) for value in (99.0, 101.0))
    assert [figure.holds for figure in judge([near, far], goals)] == [True, False]


def test_the_chart_is_the_waterfall(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    times = {
        "read": 60,
        "load.x1": 86,
        "load.x1.first_read": 4,
        "load.x1.last_read": 80,
        "load.x2": 170,
        "load.x2.1": 90,
    }
    figures: list[Figure] = [measured(f"kv.device.{name}", "ms", [ms], floors=[78.0]) for name, ms in times.items()]
    figures.append(measured("kv.device.store", "GiB/s", [3.0]))
    report = Report(command="", started="", seconds=1.0, figures=figures, environment={})
    path = tmp_path / "chart.svg"
    write_chart(report, path)
    text = path.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    for label in ("load.x1: chunks read and checked, first to last", "load.x2: request 1", "link: a plain copy"):
        assert label in text
    assert "store" not in text
    with pytest.raises(UsageError, match=r"does not end in \.svg"):
        write_chart(report, tmp_path / "chart.png")
