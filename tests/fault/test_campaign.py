"""Faults on real files, each block that is reported good compared with the bytes that its key demands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faultshim
import pytest
import results
from faultlist import FAULTS, deal

from rewarm.engine import ENGINE_KINDS, probe_engines

pytestmark = pytest.mark.skipif(bool(faultshim.missing()), reason=faultshim.missing())
PROGRAM = Path(__file__).with_name("run.py")
NATIVE = "pure" if probe_engines()["threads"] else "threads"
READS = [fault.name for fault in FAULTS if fault.name.startswith("read-")]


def campaign(*arguments: str, limit_s: float = 600) -> tuple[dict[str, Any], str]:
    """The report of a campaign, and the stories of cases that are not as they should be."""
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


def test_each_hundred_holds_every_kind_and_a_number_gives_the_same_case_again() -> None:
    for block in (0, 7):
        dealt = [deal(1, number) for number in range(block * 100, block * 100 + 100)]
        assert {case.fault for case in dealt} == set(FAULTS)
        assert dealt == [deal(1, number) for number in range(block * 100, block * 100 + 100)]
        assert dealt != [deal(2, number) for number in range(block * 100, block * 100 + 100)]
    case = deal(1, 42)
    assert case.rng().random() == case.rng().random()


@pytest.mark.vllm
def test_the_campaign_sees_wrong_bytes_where_a_tier_checks_nothing() -> None:
    """vLLM's fs tier believes what lies under a name: the campaign's eyes are open, and the shim strikes."""
    pytest.importorskip("vllm", reason="needs vLLM's own classes")
    report, _ = campaign("--subject", "vllm-fs", "--count", "100")
    assert report["injected"] == 100
    kinds = report["kinds"]
    for name in ("flip-payload", "swap", "alien-key", "alien-namespace", "zero-file", "read-flip", "store-flip"):
        assert kinds[name]["cases_with_wrong_bytes"] == kinds[name]["injected"] > 0, name
    for name in ("missing", "read-eio", "store-eio", "kill-store"):
        assert kinds[name]["injected"] > 0, name
        assert kinds[name]["wrong_blocks_served"] == 0, name


def test_the_page_has_the_table_of_the_results() -> None:
    document = json.loads(results.RESULTS.read_text(encoding="utf-8"))
    assert results.page_with(document) == results.PAGE.read_text(encoding="utf-8"), "run results.py --page"


@pytest.mark.parametrize("subject", ["engine", "volume"])
@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_no_wrong_byte_from(subject: str, kind: str) -> None:
    """The parts below the server, each alone: what fails here need not be looked for in the whole."""
    if reason := probe_engines()[kind]:
        pytest.skip(reason)
    report, stories = campaign("--subject", subject, "--engine", kind, "--count", "60")
    assert report["injected"] == 60
    assert report["wrong_blocks_served"] == report["failed_cases"] == 0, stories


def test_every_fault_in_a_read_strikes_a_ring_too() -> None:
    if reason := probe_engines()["io_uring"] or faultshim.missing_for_rings():
        pytest.skip(reason)
    only = [f"--kind={name}" for name in READS]
    report, stories = campaign("--subject", "volume", "--engine", "io_uring", "--count", "70", *only)
    assert report["wrong_blocks_served"] == report["failed_cases"] == 0, stories
    assert {name: kind["injected"] for name, kind in report["kinds"].items()} == {
        name: kind["cases"] for name, kind in report["kinds"].items()
    }
    assert set(report["kinds"]) == set(READS)


def test_no_wrong_byte_from_a_volume_that_syncs() -> None:
    """A store has more steps that can fail, or be the last."""
    kinds = [f"--kind={kind}" for kind in ("store-enospc", "store-eio", "kill-store")]
    report, stories = campaign("--subject", "volume", "--engine", NATIVE, "--durable", "--count", "40", *kinds)
    assert report["wrong_blocks_served"] == report["failed_cases"] == 0, stories
    assert report["injected"] == 40


@pytest.mark.parametrize(
    ("broken", "kinds"),
    [("reader", ("flip-payload", "swap", "alien-namespace", "read-stale")), ("writer", ("kill-store", "store-enospc"))],
)
def test_a_broken_engine_below_a_volume_is_seen(broken: str, kinds: tuple[str, ...]) -> None:
    """The reader checks nothing; the writer writes under the record's own name."""
    only = [f"--kind={kind}" for kind in kinds]
    report, _ = campaign("--subject", "volume", "--engine", "pure", "--broken", broken, "--count", "30", *only)
    for kind in kinds:
        assert report["kinds"][kind]["failed_cases"] > 0, kind
    assert (report["wrong_blocks_served"] > 0) == (broken == "reader")


@pytest.mark.vllm
@pytest.mark.parametrize("engine", [NATIVE, "io_uring"])
def test_the_whole_serves_no_wrong_byte(engine: str) -> None:
    """A seeded sample of 300 faults through the connector's two halves; the full count is `make test-deep`."""
    pytest.importorskip("vllm", reason="needs vLLM's own classes")
    if reason := probe_engines()[engine]:
        pytest.skip(reason)
    report, stories = campaign("--engine", engine, "--count", "300")
    assert report["injected"] >= 300
    assert report["wrong_blocks_served"] == report["failed_cases"] == 0, stories


@pytest.mark.vllm
def test_a_broken_reader_below_the_connector_is_seen() -> None:
    pytest.importorskip("vllm", reason="needs vLLM's own classes")
    only = ["--kind=flip-payload", "--kind=swap"]
    report, _ = campaign("--engine", "pure", "--broken", "reader", "--count", "4", *only)
    assert report["wrong_blocks_served"] >= 4


@pytest.mark.deep
@pytest.mark.vllm
def test_ten_thousand() -> None:
    """On each engine; keeps the figures in bench/results/faults.json, and their table in docs/guides/faults.md."""
    pytest.importorskip("vllm", reason="needs vLLM's own classes")
    command = [sys.executable, str(PROGRAM.with_name("results.py")), "--count", "10000", "--parallel", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * 3600, check=False)
    assert done.returncode == 0, done.stderr
