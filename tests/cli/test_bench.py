from __future__ import annotations

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
