"""Whole trials over a fake server: real processes, real files, real requests, no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rewarm.errors import StorageError, UnsupportedError
from rewarm.trial import run, server
from rewarm.trial.analysis import analyse
from rewarm.trial.arms import Installation, Places
from rewarm.trial.evidence import check_files, read_events
from rewarm.trial.plan import Plan, from_document

FAKE = Path(__file__).with_name("fake_server.py")
PLAN = {"load": {"context_tokens": 512, "groups": 2, "pairs": 3, "noise_pairs": 3}, "trial": {"model": "m"}}


def command_of(_install: Installation, plan: Plan, name: str, places: Places) -> list[str]:
    words = [sys.executable, str(FAKE), "m", *plan.server.args]
    root = places.root_of(name)
    return [*words, "--kv-transfer-config", json.dumps({"root": str(root)})] if root else words


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install = Installation(sys.executable, (), {"vllm": "fake"}, on_cpu=True, drains=True)
    monkeypatch.setattr(run, "find_vllm", lambda: install)
    monkeypatch.setattr(run, "server_command", command_of)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of our own, with a name as short as the usual one's."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def run_it(out: Path, **server_table: object) -> dict[str, object]:
    plan = from_document({**PLAN, "server": {"start_timeout_s": 60, **server_table}}, where="test")
    return run.run_trial(plan, out, lambda _progress: None)


def proofs(result: dict[str, object]) -> dict[str, str]:
    return {proof["name"]: proof["verdict"] for proof in result["proofs"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("servers", ["together", "in_turn"])
def test_a_trial_measures_proves_reports_and_leaves_nothing(
    tmp_path: Path, servers: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAN, "trial", {"model": "m", "servers": servers, "root": str(tmp_path)})
    out = tmp_path / "out"
    result = run_it(out)
    found = proofs(result)
    # The fake reads its files not at all, and "computes" as fast as it "loads".
    assert found.pop("cold.reads") == "FAIL"
    found.pop("control.empty_tier")
    assert set(found.values()) == {"OK"}, result["proofs"]
    gates = {gate["name"]: gate for gate in result["gates"]}  # type: ignore[attr-defined]
    assert gates["tokens"]["outcome"] == "pass"
    assert gates["peer"]["pairs"] == 3
    assert not check_files(out, analyse(read_events(out)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert list(temporary.iterdir()) == []
    assert not [path for path in out.iterdir() if path.is_dir() and path.name != "logs"]


def test_wrong_tokens_from_a_tier_fail(tmp_path: Path) -> None:
    result = run_it(tmp_path / "out", env={"FAKE_FAULT": "wrong"})
    assert result["verdict"] == "fail"


def test_a_server_that_leaks_shared_memory_is_cleaned_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_it(out, env={"FAKE_FAULT": "leaks"})
    assert proofs(result)["server.clean"] == "FAIL"
    left = [name for event in read_events(out) for name in event.get("left_in_shm", ())]
    assert len(left) == 5
    assert not [name for name in left if Path(name).exists()]


def test_a_server_has_a_temporary_directory_with_a_short_name(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for usual, chosen in ((temporary, temporary), (temporary / ("x" * 60), Path("/tmp"))):
        usual.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        folder = server._temporary_folder()
        assert folder.parent == chosen
        assert len(f"{folder}/{uuid.uuid4()}") <= 107
        folder.rmdir()


def test_a_server_that_stays_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.2)
    result = run_it(tmp_path / "out", env={"FAKE_FAULT": "stays"})
    assert proofs(result)["server.clean"] == "FAIL"


def test_a_server_that_dies_is_one_line_with_its_last_words_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UnsupportedError, match="ended with 1: RuntimeError: Error: no such model"):
        run_it(out, env={"FAKE_FAULT": "dies"})
    result = analyse(read_events(out))
    assert (result["outcome"], result["verdict"]) == ("failed", "inconclusive")
    assert (out / "report.html").exists()


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="did not answer within 1 s"):
        run_it(tmp_path / "out", env={"FAKE_FAULT": "slow start"}, start_timeout_s=1)


def test_refused_requests_end_the_trial_with_the_servers_words(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"HTTP 400.*too long"):
        run_it(tmp_path / "out", env={"FAKE_FAULT": "refuses"})


def test_a_missing_root_is_one_line_and_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLAN, "trial", {"model": "m", "root": str(tmp_path / "none")})
    with pytest.raises(StorageError, match="none is not a directory"):
        run_it(tmp_path / "out")
    assert not (tmp_path / "out").exists()


_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
sys.path.insert(0, {folder!r})
import pytest, test_run
from rewarm.cli.common import run as run_command
from rewarm.cli.main import cli
from rewarm.trial import run
run.find_vllm = lambda: test_run.Installation(sys.executable, (), {{}}, on_cpu=True, drains=True)
run.server_command = test_run.command_of
sys.exit(run_command(cli, sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_server_behind(tmp_path: Path, temporary: Path, number: signal.Signals) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[trial]\nmodel = 'm'\n[load]\ncontext_tokens = 512\npairs = 400\n")
    out = tmp_path / "out"
    program = _PROGRAM.format(folder=str(FAKE.parent))
    words = [sys.executable, "-c", program, "trial", "run", str(plan), "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as child:
        events = out / "events.jsonl"
        deadline = time.monotonic() + 120
        while not (events.exists() and '"phase":"recover"' in events.read_text()):
            assert child.poll() is None, child.stderr.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline, "no block was recovered within 120 s"
            time.sleep(0.05)
        servers = psutil.Process(child.pid).children(recursive=True)
        assert len(servers) == 3
        child.send_signal(number)
        child.wait(60)
        if number == signal.SIGKILL:  # each server is told by the kernel that its parent is gone
            psutil.wait_procs(servers, timeout=30)
        assert not [each for each in servers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    if number != signal.SIGKILL:
        assert child.returncode == 130
        assert list(temporary.iterdir()) == []
        result = analyse(read_events(out))
        assert (result["outcome"], result["verdict"]) == ("interrupted", "inconclusive")
        assert not check_files(out, result)
