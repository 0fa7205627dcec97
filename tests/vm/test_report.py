"""The report fails where the proof does, and the guide's table is the one that the results give; needs no guest."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import report
from report import PHASES, Moment
from writelog import Loss, Rebuilt

WANTED = dict.fromkeys(PHASES, 1)
LOADS = [{"phase": phase, "evicted": 1} for phase in PHASES]
VOLUME: dict[str, Any] = {
    "is_there": True, "is_recovered": True, "works_on": True, "error": "", "hits": [0, 1], "wrong": 0,
    "whole_but_missed": 0, "present_but_missed": 0, "damaged_after": 0, "leftovers": [], "budget_off_bytes": 0,
    "files_before": {"whole": 2, "damaged": 1},
}  # fmt: skip
FOUND: dict[str, Any] = {"careless": {"whole": 3, "torn": 1}, "volumes": dict.fromkeys(PHASES, VOLUME)}


def judge(found: dict[str, Any], acknowledged: dict[str, int]) -> dict[str, bool | None]:
    rows = [
        report.row_of(Moment(phase, 7, Loss.ALL, acknowledged), Rebuilt(2, 8192), copy.deepcopy(found))
        for phase in PHASES
    ]
    figures = report.figures_of(rows, LOADS, WANTED, dict.fromkeys(PHASES, 0.5))
    return {figure.name: figure.holds for figure in figures}


def test_all_holds_and_flushes_are_told_only() -> None:
    held = judge(FOUND, dict.fromkeys(PHASES, 2))
    assert {name for name, holds in held.items() if holds is not True} == {
        f"powercut.flushes.{phase}" for phase in PHASES
    }


def spoil(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["volumes"]["durable"].update({name: value})


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        (spoil("wrong", 1), "powercut.wrong_records"),
        (spoil("error", "ask: OSError"), "powercut.failed_opens"),
        (spoil("is_there", False), "powercut.failed_opens"),
        (spoil("is_recovered", False), "powercut.opens_without_recovery"),
        (spoil("hits", [0]), "powercut.durable_records_lost"),
        (spoil("whole_but_missed", 1), "powercut.whole_but_missed"),
        (spoil("present_but_missed", 1), "powercut.present_but_missed"),
        (spoil("damaged_after", 1), "powercut.damaged_after_recovery"),
        (spoil("leftovers", ["tmp-1"]), "powercut.leftovers"),
        (spoil("budget_off_bytes", -4096), "powercut.budget_off"),
        (spoil("works_on", False), "powercut.does_not_work_on"),
        (lambda found: found.update(careless={"whole": 4}), "powercut.control_damaged_files"),
    ],
)
def test_each_failure_fails_its_figure(change: Callable[[dict[str, Any]], None], figure: str) -> None:
    found = copy.deepcopy(FOUND)
    change(found)
    held = judge(found, dict.fromkeys(PHASES, 2))
    assert [name for name, holds in held.items() if holds is False] == [figure]


def test_a_volume_that_was_not_made_yet_is_not_asked_for() -> None:
    found = copy.deepcopy(FOUND)
    found["volumes"]["durable"] = {"is_there": False, "hits": [], "error": ""}
    held = judge(found, {"cache": 2, "paged": 2})
    assert False not in held.values()


def test_the_guide_shows_the_results() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert page == report.page_of(page, json.loads(report.RESULTS.read_text(encoding="utf-8")))
