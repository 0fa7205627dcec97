"""Archives from anybody: taken as a whole, or refused, and never another byte than a record's own."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from archive_cases import NAMESPACE, Entry, make_head, make_manifest, make_record, record_entry, to_bytes
from archive_reader import no_disk, wrong_about
from fuzz import fuzz_archives
from hypothesis import given, settings
from hypothesis import strategies as st

import rewarm.volume.archive
from rewarm.volume import create_volume
from rewarm.volume.archive import export_archive, import_archive
from rewarm.volume.layout import RootPaths, read_roots

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = 2_000


def test_a_seeded_sample() -> None:
    outcomes, findings = fuzz_archives(seed=1, count=SAMPLE)
    assert not findings, findings[:5]
    assert min(outcomes["taken"], outcomes["refused"]) > SAMPLE // 10


@given(
    st.lists(
        st.builds(
            Entry,
            st.sampled_from(["rewarm.archive", "rewarm.manifest", record_entry(b"k" * 32).name]) | st.text(max_size=20),
            st.binary(max_size=600) | st.just(make_record(b"k" * 32)) | st.just(make_head().data),
            st.sampled_from([b"0", b"0", b"0", b"1", b"2", b"5", b"x", b"L", b"\0"]),
        ),
        max_size=4,
    ),
    st.binary(max_size=1100),
)
@settings(deadline=None, max_examples=300)
def test_any_members(entries: list[Entry], tail: bytes) -> None:
    raw = b"".join(map(to_bytes, entries)) + tail
    with no_disk() as volume:
        _, finding = wrong_about(raw, None, is_certain=False, volume=volume)
    assert not finding


@given(st.binary(max_size=2000))
@settings(deadline=None, max_examples=300)
def test_any_bytes(raw: bytes) -> None:
    with no_disk() as volume:
        _, finding = wrong_about(raw, None, is_certain=False, volume=volume)
    assert not finding


def test_a_real_volume_takes_what_the_cases_are_made_of_and_writes_nowhere_else(tmp_path: Path) -> None:
    """The cases' own archive, not one that export wrote: both read docs/format/archive-v1.md the same way."""
    records = [record_entry(bytes([n]) * 32) for n in range(5)]
    head, manifest = make_head(), make_manifest(records)
    raw = b"".join(map(to_bytes, [head, *records, manifest])) + bytes(1024)
    root = tmp_path / "root"
    create_volume([str(root)], capacity_bytes=64 << 20)
    done = import_archive(io.BytesIO(raw), [str(root)])
    assert (done.num_records, done.num_present) == (5, 0)
    for n, record in enumerate(records):
        stored = (root / record.name).read_bytes()
        created = slice(96, 104)
        assert stored[: created.start][8:] == record.data[: created.start][8:]
        assert stored[4096:] == record.data[4096:]
        assert RootPaths(str(root)).record(NAMESPACE, bytes([n]) * 32) == str(root / record.name)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert import_archive(io.BytesIO(raw), [str(root)]).num_present == 5
    again = io.BytesIO()
    assert export_archive([str(root)], again).num_records == 5
    assert read_roots([str(root)])


def test_an_importer_that_checks_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewarm.volume.archive, "check_record", lambda *_: None)
    _, findings = fuzz_archives(seed=1, count=300)
    assert any("stored other bytes" in finding for finding in findings)


def test_an_importer_that_crashes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise IndexError

    monkeypatch.setattr(rewarm.volume.archive, "_described", crash)
    _, findings = fuzz_archives(seed=1, count=50)
    assert any("raised IndexError" in finding for finding in findings)
