from __future__ import annotations

from pathlib import Path

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli

Captured = pytest.CaptureFixture[str]


def test_a_plan_with_a_typo_is_one_line_and_exits_2(tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[load]\ncontxt_tokens = 4096\n")
    out = tmp_path / "out"
    assert run(cli, ["trial", "run", str(plan), "--out", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"error: {plan}: [load] has no key 'contxt_tokens'; did you mean 'context_tokens'?"
    assert lines[1].startswith("hint: known: context_tokens, concurrency")
    assert not out.exists()


def test_a_missing_plan_exits_4(tmp_path: Path, capsys: Captured) -> None:
    assert run(cli, ["trial", "run", str(tmp_path / "none.toml")]) == 4
    assert "cannot be read" in capsys.readouterr().err


def test_a_missing_root_exits_4_and_changes_nothing(tmp_path: Path, capsys: Captured) -> None:
    missing, out = tmp_path / "none", tmp_path / "out"
    assert run(cli, ["trial", "run", "--root", str(missing), "--out", str(out)]) == 4
    err = capsys.readouterr().err
    assert f"error: {missing} is not a directory" in err
    assert f"hint: mkdir {missing}" in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_trial_exits_2(tmp_path: Path, capsys: Captured) -> None:
    for command in ("verify", "report"):
        assert run(cli, ["trial", command, str(tmp_path)]) == 2
        assert "holds no trial" in capsys.readouterr().err


def test_a_broken_log_exits_5(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "events.jsonl").write_text("{}\n")
    assert run(cli, ["trial", "verify", str(tmp_path)]) == 5
    assert "line 1 is not an event" in capsys.readouterr().err
    assert run(cli, ["trial", "verify", "--json", str(tmp_path)]) == 5
    assert '"whole": false' in capsys.readouterr().out
