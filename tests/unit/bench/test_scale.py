"""The bench of many records, small: every figure is there, the janitor evicts meanwhile, nothing is left."""

from __future__ import annotations

import re
from pathlib import Path

from rewarm.bench.goals import GOALS_FILE, judge, read_goals
from rewarm.bench.scale import Plan, run


def test_a_small_run_has_every_figure_and_evicts(tmp_path: Path) -> None:
    plan = Plan(num_records=6000, num_roots=3, rounds=1, work_s=2.0, stores_per_s=200, touches_per_s=100)
    steps: list[str] = []
    report = run(tmp_path, plan, command="rewarm bench scale", step=steps.append)
    figures = {figure.name: figure for figure in report.figures}
    assert steps == ["names made", "index", "janitor ready", "at rest", "at work"]
    assert all(figure.value >= 0 for figure in figures.values())
    assert figures["scale.lookups_1000"].value > 0
    evicted = re.search(r"([0-9,]+) evicted", figures["scale.janitor.cpu_at_work"].note)
    assert evicted is not None
    assert int(evicted[1].replace(",", "")) > 0, "the volume is full from the start"
    parts = ("scale.index_bytes_per_record", "scale.janitor.bytes_per_record")
    assert figures["scale.bytes_per_record"].value == sum(figures[name].value for name in parts)
    judged = judge(report.figures, read_goals(GOALS_FILE, "scale"))
    assert {one.name for one in judged if one.goal} == {
        "scale.lookups_1000",
        "scale.bytes_per_record",
        "scale.janitor.cpu_at_work",
    }
    assert list(tmp_path.iterdir()) == []
