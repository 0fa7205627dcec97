"""rewarm kv explain, and rewarm bench policy on the same log, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.errors import ExitCode
from rewarm.kv.decision_log import SCHEMA, DecisionLog
from rewarm.volume import create_volume

Captured = pytest.CaptureFixture[str]

HEAD = {
    "schema": SCHEMA, "policy": "always_load", "chunk_tokens": 256, "chunk_bytes": 10_000_000, "step_tokens": 4096,
    "shares": [1.0], "root_bytes_a_s": [1e9], "prefill_s": [0.01, 1e-4, 0.0],
}  # fmt: skip


def decision(number: int, **more: Any) -> dict[str, Any]:
    return {
        "time": 1000.0 + number, "request_id": f"cmpl-{number}", "at": 50.0 + number, "waited_s": 0.0,
        "reason": "always_load", "num_request_tokens": 16384, "num_resident_tokens": 0, "num_stored_tokens": 16384,
        "num_load_tokens": 16384, "load_bytes": 640_000_000, "predicted_load_s": 0.6, "predicted_compute_s": 1.7,
        "predicted_s": 0.6, "load_s": 0.61, "actual_s": 0.75, "was_cut": False, **more,
    }  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> str:
    made = str(tmp_path / "kv")
    create_volume([made], capacity_bytes=64 << 20)
    return made


def write_log(root: str, *lines: dict[str, Any]) -> Path:
    folder = Path(root) / ".rewarm" / "policy"
    log = DecisionLog(str(folder), "host-namespace")
    for line in lines:
        log.add(line)
    log.close()
    return folder / "host-namespace.jsonl"


def test_decisions_are_shown_with_what_was_predicted_and_what_it_took(root: str, capsys: Captured) -> None:
    write_log(root, HEAD, decision(1), decision(2, was_cut=True), decision(3, reason="not_stored", predicted_s=None))
    assert run(cli, ["kv", "explain", root]) == ExitCode.DONE
    said = capsys.readouterr()
    (row,) = (line for line in said.out.splitlines() if "cmpl-1" in line)
    assert " ".join(row.split()) == "cmpl-1 16384 16384 16384 always_load 0.600 s 1.700 s 0.600 s 0.750 s 20%"
    assert "always_load, cut" in said.out
    assert "median error 20%" in said.err
    write_log(root, decision(4, host_bytes=160_000_000), decision(5, host_bytes="many"), decision(6, host_bytes=-1e308))
    assert run(cli, ["kv", "explain", root]) == ExitCode.DONE
    said = capsys.readouterr()
    assert "16384 (25% from memory)" in said.out
    assert said.out.count("from memory") == 1
    assert "storage 1.00 GB/s; prefill 1.65 s for 16,384 tokens" in said.err


def test_the_json_has_all_of_it(root: str, capsys: Captured) -> None:
    path = write_log(root, HEAD, *(decision(number) for number in range(30)))
    for where in (root, str(path)):
        assert run(cli, ["kv", "explain", where, "--last", "5", "--json"]) == ExitCode.DONE
        document = json.loads(capsys.readouterr().out)
        assert document["schema"] == "rewarm.kv-explain/1"
        assert [one["request_id"] for one in document["decisions"]] == [f"cmpl-{n}" for n in range(25, 30)]
        assert document["reasons"] == {"always_load": 30}
        assert document["num_decisions"] == 30


def test_a_volume_without_decisions_is_no_error(root: str, capsys: Captured) -> None:
    assert run(cli, ["kv", "explain", root]) == ExitCode.ANSWER_IS_NO
    assert "no decisions" in capsys.readouterr().err


def test_what_is_no_volume_is_said(tmp_path: Path, capsys: Captured) -> None:
    assert run(cli, ["kv", "explain", str(tmp_path)]) == ExitCode.USAGE
    assert "rewarm volume create" in capsys.readouterr().err
    assert run(cli, ["kv", "explain", str(tmp_path / "none.jsonl")]) == ExitCode.IO
    assert "cannot be read" in capsys.readouterr().err


def test_a_hostile_log_does_no_harm(root: str, capsys: Captured) -> None:
    hostile = [
        {"request_id": "\x1b[2J", "reason": "x\ny", "actual_s": "soon", "time": []},
        {"request_id": 5},
        decision(1),
    ]
    path = write_log(root, *hostile)
    path.write_bytes(path.read_bytes() + b'\xff\xfe{"half')
    assert run(cli, ["kv", "explain", root]) == ExitCode.DONE
    said = capsys.readouterr()
    assert "\x1b" not in said.out
    assert "cmpl-1" in said.out


ODD_NUMBERS = (
    "NaN",
    "-Infinity",
    "1e999",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "-1",
    "1e300",
    "true",
    "[]",
    '"x"',
    "null",
)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("odd", ODD_NUMBERS, ids=lambda odd: odd[:12])
@pytest.mark.parametrize(
    "field", ["time", "at", "num_load_tokens", "predicted_s", "actual_s", "request_id", "host_bytes"]
)
def test_an_odd_number_is_left_out_or_unknown_and_hides_no_other(
    field: str, odd: str, root: str, capsys: Captured
) -> None:
    path = write_log(root, HEAD, decision(1), decision(2))
    text = json.dumps({**decision(3), field: "@"}).replace('"@"', odd)
    path.write_text(path.read_text() + text + "\n")
    assert run(cli, ["kv", "explain", str(path), "--json"]) == ExitCode.DONE
    said = capsys.readouterr()
    document = json.loads(said.out, parse_constant=no_constant)
    names = [one["request_id"] for one in document["decisions"]]
    assert {"cmpl-1", "cmpl-2"} <= set(names)
    assert document["num_left_out"] + len(names) == 3
    assert document["median_prediction_error"] == pytest.approx(0.2)
    assert run(cli, ["kv", "explain", str(path)]) == ExitCode.DONE
    said = capsys.readouterr()
    assert ("left out: 1 lines" in said.err) == (len(names) == 2)
    assert run(cli, ["bench", "policy", "--trace", str(path), "--json"]) in (ExitCode.DONE, ExitCode.DAMAGE)
    said = capsys.readouterr()
    if said.out:
        json.loads(said.out, parse_constant=no_constant)
    else:
        assert "error: " in said.err


@pytest.mark.parametrize("odd", ODD_NUMBERS, ids=lambda odd: odd[:12])
def test_odd_rates_in_a_log_count_as_unknown(odd: str, root: str, capsys: Captured) -> None:
    path = write_log(root, decision(1))
    head = json.dumps({**HEAD, "root_bytes_a_s": [1e9, "@"], "prefill_s": [0.01, "@", 0.0]}).replace('"@"', odd)
    path.write_text(head + "\n" + path.read_text())
    assert run(cli, ["kv", "explain", str(path), "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert document["prefill_s"] == []
    assert document["root_bytes_a_s"] in ([], [1e9, 0.0])


def test_a_trace_that_would_be_simulated_for_ever_is_refused(root: str, capsys: Captured) -> None:
    slow = {**HEAD, "root_bytes_a_s": [1e3], "step_tokens": 1}
    path = write_log(root, slow, *(decision(number) for number in range(20)))
    assert run(cli, ["bench", "policy", "--trace", str(path)]) == ExitCode.USAGE
    assert "simulated steps" in capsys.readouterr().err


def test_a_log_is_replayed_under_each_policy(root: str, capsys: Captured) -> None:
    path = write_log(root, HEAD, *(decision(number, at=50.0) for number in range(4)))
    assert run(cli, ["bench", "policy", "--trace", str(path), "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["requests"] == 4
    ends = {one["policy"]: one["end_s"] for one in document["policies"]}
    assert ends["auto"] <= 1.02 * min(ends.values())
    assert run(cli, ["bench", "policy", "--trace", str(path)]) == ExitCode.DONE
    assert "as it was: 0.750 s" in capsys.readouterr().err


def test_a_study_of_few_cases_prints_its_figures(capsys: Captured) -> None:
    assert run(cli, ["bench", "policy", "--cases", "4", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    names = {figure["name"] for figure in document["figures"]}
    assert {
        "policy.seen.at_once.to_best.mean",
        "policy.prediction_error",
        "policy.slow_storage.to_compute.worst",
    } <= names
    assert run(cli, ["bench", "policy", "--cases", "1"]) == ExitCode.USAGE
