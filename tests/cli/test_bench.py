from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.errors import ExitCode


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--root", "{root}/none"], ExitCode.IO, "none is not a directory"),
        (["--root", "{root}", "--check", "--goals", "{root}/none.toml"], ExitCode.USAGE, "cannot read the goals"),
        (["--root", "{root}", "--chart", "{root}/chart.png"], ExitCode.USAGE, "does not end in .svg"),
        (["--root", "{root}", "--floor", "dd"], ExitCode.USAGE, "'dd' is not one of"),
        (["--root", "{root}", "--engine", "warp"], ExitCode.USAGE, "there is no engine 'warp'"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: ExitCode, said: str
) -> None:
    words = [word.format(root=tmp_path) for word in arguments]
    assert run(cli, ["bench", "kv", *words]) == code
    assert said in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--root", "{root}/none", "--device", "cpu"], ExitCode.IO, "none is not a directory"),
        (["--root", "{root}", "--device", "warp"], ExitCode.USAGE, "'warp' is not a device"),
        (["--root", "{root}", "--device", "cpu", "--tokens", "1000"], ExitCode.USAGE, "hint: use --tokens 1008"),
        (["--root", "{root}", "--device", "cpu", "--tokens", "1"], ExitCode.USAGE, "hint: use --tokens 16\n"),
        (
            ["--root", "{root}", "--device", "cpu", "--tokens", "48", "--chunk-tokens", "32"],
            ExitCode.USAGE,
            "or --chunk-tokens 16",
        ),
        (["--root", "{root}", "--device", "cpu", "--requests", "99999999"], ExitCode.IO, "fewer --requests"),
        (["--root", "{root}", "--ring-bytes", "much"], ExitCode.USAGE, "'much' is not a size"),
        (["--root", "{root}", "--chart", "{root}/chart.png"], ExitCode.USAGE, "does not end in .svg"),
    ],
)
def test_the_device_bench_refuses_bad_input_and_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: ExitCode, said: str
) -> None:
    pytest.importorskip("torch", reason="torch is not installed in this environment")
    words = [word.format(root=tmp_path) for word in arguments]
    assert run(cli, ["bench", "device", *words]) == code
    assert said in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_written_replayed_and_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace, chart = tmp_path / "agents.jsonl", tmp_path / "hits.svg"
    assert run(cli, ["bench", "trace", "agents", "--to", str(trace), "--scale", "0.05"]) == ExitCode.DONE
    assert run(cli, ["bench", "trace", "agents", "--to", str(trace)]) == ExitCode.USAGE, "it is there"
    capfd.readouterr()
    words = ["--trace", str(trace), "--memory", "2GiB", "--chart", str(chart), "--json"]
    assert run(cli, ["bench", "eviction", *words]) == ExitCode.DONE
    document = json.loads(capfd.readouterr().out)
    assert {figure["name"] for figure in document["figures"]} >= {
        "eviction.token_hits.agents.10pct@rewarm",
        "eviction.written_gb_per_day.agents@on_reuse",
    }
    assert "<svg" in chart.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--trace", "poems"], ExitCode.USAGE, "'poems' is no trace"),
        (["--trace", "{root}/bad.jsonl"], ExitCode.DAMAGE, "bad.jsonl:1 is no line of a trace"),
        (["--memory", "much"], ExitCode.USAGE, "'much' is not a size"),
        (["--scale", "0"], ExitCode.USAGE, "--scale is 0"),
        (["--scale", "nan"], ExitCode.USAGE, "--scale is nan"),
        (["--scale", "-1"], ExitCode.USAGE, "--scale is -1"),
        (["--trace", "/dev/zero"], ExitCode.USAGE, "is not a regular file"),
        (["--chart", "{root}/chart.png"], ExitCode.USAGE, "does not end in .svg"),
    ],
)
def test_the_eviction_bench_refuses_bad_input(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: ExitCode, said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n", encoding="utf-8")
    assert run(cli, ["bench", "eviction", *(word.format(root=tmp_path) for word in arguments)]) == code
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("scale", ["-1", "0", "inf", "nan", "1e-12", "1e9"])
def test_a_trace_of_no_scale_is_not_begun(tmp_path: Path, capfd: pytest.CaptureFixture[str], scale: str) -> None:
    target = tmp_path / "made.jsonl"
    assert run(cli, ["bench", "trace", "chat", "--to", str(target), "--scale", scale]) == ExitCode.USAGE
    assert "hint: " in capfd.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("seconds", ["-1", "0", "inf", "nan", "1e9"])
def test_a_bench_of_no_length_is_not_begun(tmp_path: Path, capfd: pytest.CaptureFixture[str], seconds: str) -> None:
    assert run(cli, ["bench", "scale", "--root", str(tmp_path), "--seconds", seconds]) == ExitCode.USAGE
    assert "hint: 1 to 3600" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_goals_file_that_is_none_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "noise"), str(tmp_path / "pipe")):
        assert run(cli, ["bench", "policy", "--cases", "2", "--check", "--goals", path]) == ExitCode.USAGE
        assert "cannot read the goals" in capfd.readouterr().err
