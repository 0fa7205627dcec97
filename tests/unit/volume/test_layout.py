"""Small files are read with a bound, and with memory for what they hold."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import pytest

from rewarm.volume.layout import read_small_file


def test_a_high_limit_takes_no_memory(tmp_path: Path) -> None:
    """In a guest of 1 GiB the janitor died of it, found by the power-cut proof."""
    (tmp_path / "order").write_bytes(b"x" * 10_000)
    tracemalloc.start()
    try:
        assert read_small_file(str(tmp_path / "order"), limit=4 << 30) == b"x" * 10_000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("limit", [1, 1 << 20, (1 << 20) + 1, (3 << 20) - 1])
def test_a_file_may_be_as_long_as_the_limit_and_no_longer(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * limit)
    assert len(read_small_file(str(path), limit)) == limit
    path.write_bytes(b"x" * (limit + 1))
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        read_small_file(str(path), limit)
