from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewarm.bench import table
from rewarm.bench.chart import write_chart
from rewarm.bench.goals import GOALS_FILE, judge, read_goals, unmeasured
from rewarm.bench.report import Report, measured
from rewarm.bench.stats import paired_ratios, percentile, spread
from rewarm.errors import UsageError


def test_a_ratio_is_the_median_of_each_rounds_own_ratio() -> None:
    # The device halved its rate in the second round: the medians alone would say 0.67.
    found = paired_ratios([1.8, 0.9, 1.0], [2.0, 1.0, 1.0])
    assert (found.median, found.least, found.greatest, found.count) == (0.9, 0.9, 1.0, 3)


def test_spread_and_percentile() -> None:
    assert spread([3.0, 1.0, 2.0]).median == 2.0
    assert percentile(range(1, 101), 0.99) == 100
    assert percentile([5.0], 0.99) == 5.0


def _report() -> Report:
    figures = [
        measured("kv.read.1MiB.x1", "GiB/s", [1.9, 0.96], floors=[2.0, 1.0], peers=[1.0, 0.5], engine="threads"),
        measured("kv.read.1MiB.x1@pure", "GiB/s", [1.0, 0.5], floors=[2.0, 1.0], peers=[1.0, 0.5], engine="pure"),
        measured("kv.read.1MiB.x1@ours", "GiB/s", [1.0, 0.5], floors=[2.0, 1.0], engine="fs_tier_in_our_memory"),
        measured("kv.cpu.1MiB.x1", "CPU s/GB", [0.25, 0.26], floors=[0.1, 0.1]),
        measured("kv.gil.load_added_by_thread", "ms", [9.0], floors=[120.0]),
        measured("kv.index.scan", "s", [2.0]),
    ]
    return Report(command="rewarm bench kv", started="2026-12-01T00:00:00+00:00", seconds=1.0, figures=figures,
                  environment={"floor": "fio"})  # fmt: skip


def test_goals_bind_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "goals.toml"
    path.write_text(
        '[kv."kv.read.1MiB.x1"]\nfloor_ratio_at_least = 0.95\nwhy = "because"\n'
        '[kv."kv.cpu.1MiB.x1"]\nabove_floor_at_most = 0.1\n'
        '[kv."kv.gil.load_added_by_thread"]\nat_most = 6\nor_share_of_floor_at_most = 0.1\n'
        '[kv."kv.index.scan"]\nat_most = 3\nat_least = 2.5\n'
        '[kv."kv.never"]\nat_most = 3\n'
        '[device."kv.device.load.x1"]\nat_most = 3\n'
    )
    goals = read_goals(path, "kv")
    report = _report()
    report.figures = judge(report.figures, goals)
    held = {figure.name: figure.holds for figure in report.figures}
    assert held == {
        "kv.read.1MiB.x1": True,
        "kv.read.1MiB.x1@pure": None,
        "kv.read.1MiB.x1@ours": None,
        "kv.cpu.1MiB.x1": False,
        "kv.gil.load_added_by_thread": True,  # 9 ms is more than 6, but less than a tenth of 120
        "kv.index.scan": False,
    }
    assert [figure.name for figure in report.shortfalls()] == ["kv.cpu.1MiB.x1", "kv.index.scan"]
    assert report.figures[4].goal == "<= 6 ms or <= 0.1 of the floor"
    assert unmeasured(report.figures, goals) == ["kv.never"], "another bench's goals are not missed"
    assert unmeasured(report.figures, read_goals(path, "device")) == ["kv.device.load.x1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[kv."kv.x"]\nat_leats = 1\n', "kv.x has at_leats"),
        ('[device."kv.device.x"]\nat_leats = 1\n', "kv.device.x has at_leats"),
        ("[kv]\nat_least = 1\n", "at_least has a value outside of a table"),
        ("at_least = 1\n", "at_least is no bench with goals"),
        ('["kv.x"]\nat_least = 1\n', "kv.x is no bench with goals"),
        ("[", "cannot read the goals"),
    ],
)
def test_a_goals_file_with_a_typo_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "goals.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_goals(path, "kv")


def test_the_goals_of_the_source_tree_are_well_formed() -> None:
    in_the_clone = Path(__file__).parents[3] / "bench" / "goals.toml"
    assert GOALS_FILE.read_bytes() == in_the_clone.read_bytes()  # installed or in place, they are these
    for bench, known in (("kv", "kv.read.1MiB.x1"), ("device", "kv.device.load.x1")):
        goals = read_goals(GOALS_FILE, bench)
        assert known in goals
        assert all(table["why"] for table in goals.values())


def test_the_document_is_what_the_schema_promises() -> None:
    document = json.loads(_report().to_json())
    assert document["schema"] == "rewarm.bench/1"
    assert document["environment"] == {"floor": "fio"}
    figure = document["figures"][0]
    assert {"name", "value", "unit", "floor", "peer", "goal", "holds"} <= set(figure)
    assert (figure["value"], figure["floor"], figure["peer"]) == (1.43, 1.5, 0.75)
    assert figure["floor_ratio"] == {"median": 0.955, "least": 0.95, "greatest": 0.96, "count": 2}
    assert figure["rounds"]["value"] == [1.9, 0.96]


def test_rows_put_the_ratio_first() -> None:
    first, *_, last = table.rows(_report().figures)
    assert first[:4] == ("0.95x", "kv.read.1MiB.x1", "threads", "1.43 GiB/s")
    assert last[0] == "-"
    assert {len(row) for row in table.rows(_report().figures)} == {len(table.HEADERS)}


def test_columns_that_nothing_fills_are_left_out() -> None:
    headers, rows = table.filled([measured("kv.device.read", "ms", [3.0], floors=[2.0])])
    assert headers == ("of the floor", "figure", "value", "floor")
    assert rows == [("1.50x", "kv.device.read", "3.00 ms", "2.00")]


def test_the_chart_is_one_svg_with_every_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "chart.svg"
    write_chart(_report(), path)
    text = path.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    for label in ("rewarm threads", "rewarm pure", "fs tier in our memory", "vLLM fs tier", "floor"):
        assert label in text
    assert "rewarm fs" not in text
    with pytest.raises(UsageError, match=r"does not end in \.svg"):
        write_chart(_report(), tmp_path / "chart.png")
