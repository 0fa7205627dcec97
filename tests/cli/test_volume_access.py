"""rewarm volume for a user who may not read or change what is there: one clear line, a next step, the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from volumes import MIB, Bench, mounted, namespace_of, record_files, store, tree

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.volume import create_volume

Captured = pytest.CaptureFixture[str]
NOBODY = 65534
RECORDS = 6


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        for directory, _, _ in os.walk(path):
            Path(directory).chmod(0o700)


@pytest.fixture
def root(place: Path) -> str:
    """A volume with a few records."""
    return fill(str(place / "kv"))


def fill(root: str) -> str:
    create_volume([root], capacity_bytes=8 * MIB)
    bench = Bench()
    assert all(store(namespace_of(bench.open(root)), range(RECORDS)))
    bench.close()
    return root


@contextmanager
def somebody() -> Iterator[None]:
    """Be a user whom modes bind: not root, who may do all; whoever else runs the tests already is one."""
    if os.geteuid():
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def give_away(path: str) -> None:
    """Let somebody() own a tree."""
    if not os.geteuid():
        for directory, names, files in os.walk(path):
            for name in (".", *names, *files):
                os.chown(os.path.join(directory, name), NOBODY, NOBODY)


def set_modes(path: str, directories: int, files: int) -> None:
    for directory, names, found in os.walk(path, topdown=False):
        for name in (*names, *found):
            (Path(directory) / name).chmod(directories if name in names else files)
    Path(path).chmod(directories)


def says(capsys: Captured, code: int, *words: str) -> list[str]:
    """Run a command as somebody(), and look at its exit code; returns what it said on stderr."""
    assert run(cli, ["volume", "info", words[1], "-q"]) == 0  # all that is imported late is there now
    capsys.readouterr()
    with somebody():
        found = run(cli, ["volume", *words])
    lines = capsys.readouterr().err.splitlines()
    assert found == code, lines
    return lines


def assert_refused(lines: list[str], what: str) -> None:
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    whose = "the mode or an attribute of " if os.geteuid() else " belongs to root: run this as that user"
    assert lines[1].startswith("hint: ")
    assert whose in lines[1]


@pytest.mark.parametrize("words", [("info",), ("verify",), ("verify", "--repair"), ("export", "--to", "{out}/kv.tar")])
def test_a_volume_that_one_may_only_read_is_read(
    words: tuple[str, ...], root: str, place: Path, capsys: Captured
) -> None:
    out = place / "out"
    out.mkdir()
    out.chmod(0o777)
    set_modes(root, 0o555, 0o444)
    before = tree(root)
    says(capsys, 0, words[0], root, *(word.format(out=out) for word in words[1:]))
    assert tree(root) == before


@pytest.mark.parametrize(
    "words", [("evict", "--until", "50%"), ("evict", "--namespace", "{id}"), ("import", "--from", "{archive}")]
)
def test_a_volume_that_one_may_only_read_is_not_changed(
    words: tuple[str, ...], root: str, place: Path, capsys: Captured
) -> None:
    archive = place / "kv.tar"
    assert run(cli, ["volume", "export", root, "--to", str(archive), "-q"]) == 0
    (namespace_id,) = (name for name in os.listdir(root) if len(name) == 64)
    set_modes(root, 0o555, 0o444)
    before = tree(root)
    lines = says(capsys, 4, words[0], root, *(w.format(id=namespace_id[:12], archive=archive) for w in words[1:]))
    assert_refused(lines, f"{root} cannot be written to: Permission denied (.rewarm/")
    assert tree(root) == before


@pytest.mark.parametrize(
    "words",
    [("info",), ("top", "--once"), ("verify",), ("evict", "--until", "50%"), ("export", "--to", "kv.tar")],
)
def test_a_volume_that_one_may_not_enter(words: tuple[str, ...], root: str, place: Path, capsys: Captured) -> None:
    assert run(cli, ["volume", "info", root, "-q"]) == 0
    Path(root).chmod(0o000)
    capsys.readouterr()
    with somebody():
        assert run(cli, ["volume", words[0], root, *words[1:]]) == 4
    assert_refused(capsys.readouterr().err.splitlines(), f"{root}/rewarm.volume cannot be read: Permission denied")


def test_a_file_or_directory_of_somebody_else(root: str, place: Path, capsys: Captured) -> None:
    closed = place / "closed"
    closed.mkdir()
    archive = closed / "kv.tar"
    assert run(cli, ["volume", "export", root, "--to", str(archive), "-q"]) == 0
    archive.chmod(0o000)
    closed.chmod(0o555)
    give_away(root)
    assert_refused(says(capsys, 4, "import", root, "--from", str(archive)), f"Permission denied: {archive}")
    target = str(closed / "new.tar")
    assert_refused(says(capsys, 4, "export", root, "--to", target), f"{target} cannot be written: Permission denied")
    with somebody():
        assert run(cli, ["volume", "create", str(closed / "kv"), "--size", "2MiB"]) == 4
    assert_refused(capsys.readouterr().err.splitlines(), f"{closed} is not writable")


def test_records_whose_description_may_not_be_read_are_named_and_not_passed_over(
    root: str, place: Path, capsys: Captured
) -> None:
    give_away(root)
    (description,) = Path(root).glob("*/namespace.json")
    description.chmod(0o000)
    with somebody():
        assert run(cli, ["volume", "verify", root, "--json"]) == 4
        report = json.loads(capsys.readouterr().out)
        assert [problem["path"] for problem in report["unreadable"]] == [str(description)]
        assert run(cli, ["volume", "evict", root, "--until", "100%"]) == 4
        lines = capsys.readouterr().err.splitlines()
        assert f"{description} cannot be read: Permission denied" in lines[0]
        assert "the mode or an attribute" in lines[1]
        out = place / "out"
    out.mkdir()
    out.chmod(0o777)
    with somebody():
        assert run(cli, ["volume", "export", root, "--to", str(out / "kv.tar"), "--json"]) == 5
    done = json.loads(capsys.readouterr().out)
    assert (done["num_records"], done["num_left_out"]) == (0, RECORDS)
    assert len(record_files(root)) == RECORDS


def test_verify_goes_on_after_a_directory_that_cannot_be_read(root: str, capsys: Captured) -> None:
    give_away(root)
    closed = record_files(root)[0].parent
    num_hidden = len(list(closed.iterdir()))
    closed.chmod(0o000)
    with somebody():
        assert run(cli, ["volume", "verify", root, "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert [problem["path"] for problem in report["unreadable"]] == [str(closed)]
    assert report["num_records"] == RECORDS - num_hidden


def test_a_read_only_mount(place: Path, capsys: Captured) -> None:
    disk = place / "disk"
    unmount = mounted(disk, "size=32m")
    if unmount is None:
        pytest.skip("mounting a tmpfs needs root")
    try:
        root = fill(str(disk / "kv"))
        record_files(root)[0].write_bytes(b"damage")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert run(cli, ["volume", "evict", root, "--until", "50%"]) == 4
        lines = capsys.readouterr().err.splitlines()
        assert "cannot be written to: Read-only file system" in lines[0]
        assert "mounted read-only" in lines[1]
        assert run(cli, ["volume", "verify", root, "--repair", "--json"]) == 5
        report = json.loads(capsys.readouterr().out)
        (problem,) = report["damaged"]
        assert not problem["is_removed"]
        assert problem["reason"].endswith("not removed: Read-only file system")
        assert report["num_records"] == RECORDS
        assert run(cli, ["volume", "create", str(disk / "new"), "--size", "2MiB"]) == 4
        assert "mounted read-only" in capsys.readouterr().err
    finally:
        unmount()
