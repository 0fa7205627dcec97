"""The frame of the command line: help, unknown words, exit codes, what goes where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest

from rewarm.cli import common
from rewarm.cli.main import _COMMANDS, cli
from rewarm.errors import BusyError, DamageError, ExitCode, RewarmError, StorageError, UnsupportedError, UsageError
from rewarm.volume.access import access_hint

Captured = pytest.CaptureFixture[str]
REWARM = [sys.executable, "-m", "rewarm.cli.main"]


def run_rewarm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*REWARM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def command_raising(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = run_rewarm("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name in ("bench", "config", "doctor", "kv", "trial", "vllm", "volume"):
        assert f"\n  {name} " in done.stdout
    assert "1 the answer is no" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rewarm.cli.common import run\nfrom rewarm.cli.main import cli\n"
        "assert run(cli, ['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'scipy', 'matplotlib', 'httpx', 'vllm', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "ours = {m for m in sys.modules if m.startswith('rewarm.') and m.count('.') == 2}\n"
        "assert ours == {'rewarm.cli.common', 'rewarm.cli.main'}, ours\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_no_arguments_is_a_usage_error_that_shows_help_on_stderr() -> None:
    done = run_rewarm()
    assert done.returncode == ExitCode.USAGE
    assert done.stdout == ""
    assert "Commands:" in done.stderr


def test_an_unknown_command_names_the_nearest() -> None:
    done = run_rewarm("volumes")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "error: no command 'volumes'; did you mean 'volume'?\nhint: rewarm --help\n"


def test_an_unknown_option_is_a_usage_error() -> None:
    done = run_rewarm("--no-such-option")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("error: ")
    assert done.stdout == ""


def test_a_missing_optional_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def refuse(name: str) -> types.ModuleType:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr("rewarm.cli.main.importlib.import_module", refuse)
    assert common.run(cli, ["trial"]) == ExitCode.CANNOT
    assert capsys.readouterr().err == (
        "error: rewarm trial needs the Python package 'scipy', which is not installed\n"
        "hint: pip install 'rewarm[trial]'\n"
    )


def test_a_missing_module_of_our_own_is_our_bug(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def refuse(name: str) -> types.ModuleType:
        raise ModuleNotFoundError("No module named 'rewarm.nowhere'", name="rewarm.nowhere")

    monkeypatch.setattr("rewarm.cli.main.importlib.import_module", refuse)
    assert common.run(cli, ["trial"]) == ExitCode.BUG


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (UsageError("a", hint="b"), 2, "error: a\nhint: b\n"),
        (UnsupportedError("a"), 3, "error: a\n"),
        (StorageError("a", path="/x", errno=5), 4, "error: a\n"),
        (OSError(5, "Input/output error", "/x"), 4, "error: Input/output error: /x\n"),
        (
            OSError(30, "Read-only file system", "/x"),
            4,
            f"error: Read-only file system: /x\nhint: {access_hint('/x', 30)}\n",
        ),
        (DamageError("a"), 5, "error: a\n"),
        (BusyError("a"), 6, "error: a\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException, code: int, stderr: str, capsys: Captured) -> None:
    assert common.run(command_raising(error), []) == code
    captured = capsys.readouterr()
    assert captured.err == stderr
    assert captured.out == ""


def test_every_error_class_has_a_documented_exit_code() -> None:
    def tree(cls: type[RewarmError]) -> set[type[RewarmError]]:
        return {cls}.union(*(tree(sub) for sub in cls.__subclasses__()))

    for cls in tree(RewarmError) - {RewarmError}:
        assert cls.exit_code in set(ExitCode) - {ExitCode.DONE, ExitCode.BUG}, cls
        assert cls.__name__ in (sys.modules["rewarm.errors"].__doc__ or ""), cls


def test_an_unexpected_exception_is_our_bug_and_says_how_to_report_it(capsys: Captured) -> None:
    assert common.run(command_raising(ZeroDivisionError("x")), []) == ExitCode.BUG
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: unexpected ZeroDivisionError: x" in err
    assert "rewarm doctor --json" in err


def test_a_command_returns_its_exit_code() -> None:
    @click.command()
    def no() -> ExitCode:
        return ExitCode.ANSWER_IS_NO

    assert common.run(no, []) == 1


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    code = (
        "import sys, click\nfrom rewarm.cli.common import run\n"
        "@click.command()\ndef many():\n    for _ in range(100000): click.echo('x' * 100)\n"
        "sys.exit(run(many, []))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=60) == 128 + signal.SIGPIPE
        assert child.stderr.read() == b""


_SAY = (
    "import sys, click\nfrom rewarm.cli.common import note, run\n"
    "@click.command()\ndef say():\n    note('a note')\n    click.echo('x')\n"
    "sys.exit(run(say, []))"
)


@pytest.mark.parametrize(
    ("redirection", "code", "stderr"),
    [
        (
            ">/dev/full",
            ExitCode.IO,
            "a note\nerror: a standard stream or a file cannot be used: No space left on device\n",
        ),
        (">&-", ExitCode.IO, "a note\nerror: a standard stream or a file cannot be used: Bad file descriptor\n"),
        (">/dev/null 2>&-", ExitCode.DONE, ""),
        (">/dev/null 2>/dev/full", ExitCode.DONE, ""),
        ("<&- >/dev/null", ExitCode.DONE, "a note\n"),
    ],
)
def test_a_stream_that_is_full_or_closed(redirection: str, code: int, stderr: str) -> None:
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", _SAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (code, stderr, "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os, click, sys\nfrom rewarm.cli.common import run\n"
        "@click.command()\ndef look():\n    sys.exit(os.open(sys.argv[1], os.O_CREAT))\n"
        "run(look, [])"
    )
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(tmp_path / "file")]
    assert subprocess.run(command, timeout=60, check=False).returncode > 2


def test_a_line_is_one_line_whatever_is_in_it(capsys: Captured) -> None:
    assert common.run(command_raising(UsageError("a\nb\x1b[2J\udcff")), []) == 2
    assert capsys.readouterr().err == "error: a\\nb\\x1b[2J\\udcff\n"


def test_json_and_quiet_options(capsys: Captured) -> None:
    @click.command()
    @common.json_option
    @common.quiet_option
    def command(as_json: bool) -> None:
        common.note("a note")
        with common.progress("reading", 3) as advance:
            advance(3)
        if as_json:
            common.print_json({"ä": 1})

    assert common.run(command, []) == 0
    assert capsys.readouterr() == ("", "a note\n")
    assert common.run(command, ["--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ä": 1}
    assert err == ""


def test_table_sets_numbers_to_the_right(capsys: Captured) -> None:
    common.print_table(("name", "bytes"), [("a", "5 B"), ("long", "10 KiB")])
    assert capsys.readouterr().out == "name   bytes\na        5 B\nlong  10 KiB\n"


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_every_command_module_loads_and_has_help(name: str) -> None:
    done = run_rewarm(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: rewarm {name}")
