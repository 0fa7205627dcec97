from __future__ import annotations

from pathlib import Path

import pytest

from rewarm.trial import coldness
from rewarm.trial.coldness import drop_page_cache, resident_pages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """On a disk where there is one: memory file systems have nothing below their pages."""
    (tmp_path / "deep").mkdir()
    for name in ("a.rec", "deep/b.bin", "log"):
        (tmp_path / name).write_bytes(b"x" * (1 << 20))
    (tmp_path / "empty.rec").touch()
    return tmp_path


def test_what_was_just_written_is_resident_and_can_be_dropped(folder: Path) -> None:
    if resident_pages(folder)[0] == 0:
        pytest.skip("this file system keeps no page cache")
    proof = drop_page_cache(folder)
    if proof["resident_pages"]:
        pytest.skip("the temporary directory lies in memory: nothing can be dropped")
    assert (proof["files"], proof["bytes"]) == (2, 2 << 20)
    assert resident_pages(folder)[0] == 0


def test_both_ways_of_counting_agree(folder: Path) -> None:
    with (folder / "a.rec").open("rb") as file:
        counted = coldness._cachestat(file.fileno())
        if counted is None:
            pytest.skip("cachestat needs Linux 6.5")
        assert coldness._mincore(file.fileno()) == counted == (1 << 20) // 4096


def test_without_cachestat_mincore_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldness, "_cachestat", lambda _file: None)
    assert resident_pages(folder) == (2 * (1 << 20) // 4096, "mincore")


def test_pages_that_stay_are_counted_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldness, "_DROP", folder / "none")
    monkeypatch.setattr(coldness.os, "posix_fadvise", lambda *_: None)
    proof = drop_page_cache(folder)
    assert proof["resident_pages"] > 0
    assert proof["method"].startswith("POSIX_FADV_DONTNEED, ")
