"""A volume is made whole or not at all, and what is wrong is said in one line."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from volumes import MIB, Bench, namespace_of, store, tree

from rewarm.cli.common import run
from rewarm.cli.main import cli
from rewarm.errors import StorageError, UsageError, VolumeFull
from rewarm.units import TIB
from rewarm.volume import create_volume

Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, code: int, says: str, *words: str) -> None:
    """The command line's answer: code, one line, a hint."""
    assert run(cli, ["volume", "create", *words]) == code
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert not captured.out
    assert says in lines[0]
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")


def test_missing_foreign_and_odd_directories(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "deep")
    before = tree(str(tmp_path))
    refused(capsys, 4, "does not exist", str(tmp_path / "no" / "such"), "--size", "10MiB")
    refused(capsys, 2, "is not empty", str(tmp_path / "foreign"), "--size", "10MiB")
    refused(capsys, 4, "is not a directory", str(tmp_path / "file"), "--size", "10MiB")
    refused(capsys, 4, "does not exist", str(tmp_path / "dangling"), "--size", "10MiB")
    refused(capsys, 2, "named twice", str(tmp_path / "a"), str(tmp_path / "." / "a"), "--size", "10MiB")
    good_and_bad = (str(tmp_path / "good"), str(tmp_path / "foreign"))
    refused(capsys, 2, "is not empty", *good_and_bad, "--size", "10MiB")
    assert tree(str(tmp_path)) == before


def test_a_volume_inside_a_volume_is_refused(tmp_path: Path, root: str, capsys: Captured) -> None:
    inside = Path(root) / "inside"
    inside.mkdir()
    before = tree(str(tmp_path))
    refused(capsys, 2, "lies inside a volume", str(inside), "--size", "10MiB")
    refused(capsys, 2, "lies inside a volume", str(inside / "deeper"), "--size", "10MiB")
    (tmp_path / "link").symlink_to(inside)
    refused(capsys, 2, "lies inside a volume", str(tmp_path / "link"), "--size", "10MiB")
    (tmp_path / "link").unlink()
    refused(capsys, 2, "lies inside a volume", str(tmp_path / "a"), str(tmp_path / "a" / "b"), "--size", "10MiB")
    assert tree(str(tmp_path)) == before


@pytest.mark.parametrize(
    ("size", "code", "says"),
    [
        ("0", 2, "too small"),
        ("1000", 2, "too small"),
        ("-5GiB", 2, "is not a size"),
        ("many", 2, "is not a size"),
        ("", 2, "is not a size"),
        ("100000TiB", 4, "are needed"),
    ],
)
def test_a_size_that_makes_no_sense(size: str, code: int, says: str, tmp_path: Path, capsys: Captured) -> None:
    refused(capsys, code, says, str(tmp_path / "kv"), f"--size={size}")
    assert not (tmp_path / "kv").exists()


def test_a_volume_that_is_there_is_left_alone(tmp_path: Path, capsys: Captured) -> None:
    root = str(tmp_path / "kv")
    create_volume([root], capacity_bytes=2 * MIB)
    before = tree(root)
    refused(capsys, 2, "holds a volume already", root, "--size", "10MiB")
    assert tree(root) == before


def test_lost_and_found_is_no_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert create_volume([str(tmp_path)], capacity_bytes=2 * MIB).capacity_bytes == 2 * MIB


def test_a_directory_that_cannot_be_written_to(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    refused(capsys, 4, "is not writable", str(tmp_path / "kv"), "--size", "10MiB")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_is_mounted_read_only(small_disk: Callable[[str], Path], capsys: Captured) -> None:
    refused(capsys, 4, "is not writable", str(small_disk("size=64m,ro")), "--size", "2MiB")


def test_more_than_the_disk_has(small_disk: Callable[[str], Path], capsys: Captured) -> None:
    disk = small_disk("size=20m")
    refused(capsys, 4, "are needed", str(disk), "--size", "10MiB")
    with pytest.raises(VolumeFull) as caught:
        create_volume([str(disk)], capacity_bytes=TIB)
    assert caught.value.need_bytes == TIB
    assert 0 < caught.value.free_bytes < 20 * MIB
    assert not list(disk.iterdir())


def test_a_disk_without_room_for_another_file(small_disk: Callable[[str], Path], capsys: Captured) -> None:
    for inodes in range(2, 6):
        disk = small_disk(f"size=64m,nr_inodes={inodes}")
        refused(capsys, 4, "free, 16.0 MiB are needed", str(disk), "--size", "2MiB")
        assert not list(disk.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
def test_an_error_at_any_step_leaves_nothing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    (tmp_path / "b").mkdir()
    for step in itertools.count(1):
        left = iter(range(step - 1))
        with monkeypatch.context() as patch:
            for name in ("mkdir", "open", "write", "fsync"):
                patch.setattr(os, name, failing(getattr(os, name), left, number))
            error = None
            try:
                create_volume(roots, capacity_bytes=4 * MIB)
            except StorageError as caught:
                error = caught
        if error is None:
            break
        assert type(error) is (VolumeFull if number in {errno.ENOSPC, errno.EDQUOT} else StorageError)
        assert "\n" not in error.message
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["b"], f"step {step} left something"
    assert step > 20


def failing(call: Callable[..., object], left: Iterator[int], number: int) -> Callable[..., object]:
    """The call, until ``left`` is used up: then it fails."""

    def wrapped(*arguments: object, **options: object) -> object:
        if next(left, None) is None:
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return call(*arguments, **options)

    return wrapped


def test_two_volumes_mixed_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in "ab"]
    for root in roots:
        create_volume([root], capacity_bytes=2 * MIB)
    before = tree(str(tmp_path))
    bench = Bench()
    for read_only in (False, True):
        with pytest.raises(UsageError, match="belong to two different volumes"):
            bench.open(*roots, read_only=read_only)
    with pytest.raises(UsageError, match="named twice"):
        bench.open(roots[0], roots[0])
    with pytest.raises(UsageError, match="no directory"):
        bench.open()
    bench.close()
    assert tree(str(tmp_path)) == before


@pytest.mark.parametrize("words", [["info"], ["verify"], ["top"], ["evict", "--until", "1%"], ["export", "--to", "x"]])
def test_every_command_names_what_is_wrong_with_a_directory(words: list[str], tmp_path: Path, capsys: Captured) -> None:
    for name in "ab":
        create_volume([str(tmp_path / name)], capacity_bytes=2 * MIB)
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer").mkdir()
    good = json.loads((tmp_path / "a" / "rewarm.volume").read_text())
    (tmp_path / "newer" / "rewarm.volume").write_text(json.dumps({**good, "version": 2}))
    before = tree(str(tmp_path))
    cases = [
        ([str(tmp_path / "nowhere")], 2, "holds no volume"),
        ([str(tmp_path / "empty")], 2, "holds no volume"),
        ([str(tmp_path / "newer")], 3, "format version 2; this release reads up to 1"),
        ([str(tmp_path / "a"), str(tmp_path / "b")], 2, "two different volumes"),
    ]
    for roots, code, says in cases:
        assert run(cli, ["volume", words[0], *roots, *words[1:]]) == code
        lines = capsys.readouterr().err.splitlines()
        assert says in lines[0]
        assert lines[1].startswith("hint: ")
        assert len(lines) == 2
    assert tree(str(tmp_path)) == before


def test_capacity_follows_the_free_space(small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    roots = [str(small_disk("size=48m") / "kv"), str(small_disk("size=80m") / "kv")]
    made = create_volume(roots, capacity_bytes=48 * MIB)
    assert [root.capacity_bytes // MIB for root in made.roots.values()] == [16, 32]
    bench = Bench()
    assert all(store(namespace_of(bench.open(*roots)), range(20)))
    bench.close()
