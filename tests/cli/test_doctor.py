from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli

Captured = pytest.CaptureFixture[str]


def test_a_good_directory_exits_0_and_prints_a_table(tmp_path: Path, capsys: Captured) -> None:
    assert run(cli, ["doctor", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["verdict", "check", "found", "expected", "of"]
    assert "directory.writable" in out


def test_a_missing_directory_exits_1_and_says_what_to_do(tmp_path: Path, capsys: Captured) -> None:
    missing = tmp_path / "none"
    assert run(cli, ["doctor", "--root", str(missing)]) == 1
    assert f"FAIL: directory.exists of {missing}: mkdir -m 700 {missing}" in capsys.readouterr().out
    assert not missing.exists()


def test_json_has_a_verdict_and_every_field_of_a_finding(tmp_path: Path, capsys: Captured) -> None:
    assert run(cli, ["doctor", "--json", "--root", str(tmp_path / "none")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"]) == ("rewarm.doctor/1", "FAIL")
    fields = {"verdict", "name", "subject", "expected", "found", "source", "hint"}
    assert all(set(finding) == fields for finding in document["findings"])
    assert document["findings"][-1]["subject"] == str(tmp_path / "none")
