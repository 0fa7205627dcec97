"""Files that a person names, and values as errors repeat them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rewarm.errors import StorageError, UsageError
from rewarm.inputs import SHOWN, read_input, shown


def test_a_file_is_read_whole_through_a_link_and_no_further_than_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_input(str(tmp_path / "link"), 5) == b"12345"
    with pytest.raises(UsageError, match="more than 4 B"):
        read_input(str(tmp_path / "file"), 4)
    with pytest.raises(StorageError):
        read_input(str(tmp_path / "missing"))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path), "a\0b"):
        with pytest.raises(UsageError) as caught:
            read_input(path)
        assert caught.value.hint


@pytest.mark.parametrize(
    "value", ["x" * 10_000, b"x" * 10_000, ["y" * 10_000], 10**300, {"a": "\n" * 1000}, "short", None]
)
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    text = shown(value)
    assert len(text) <= 4 * SHOWN + 10
    assert "\n" not in text
    assert shown("it's") == '"it\'s"'
