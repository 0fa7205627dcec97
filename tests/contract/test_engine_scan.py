"""The scan of names and the table of fingerprints: native code and its twin agree."""

from __future__ import annotations

import errno
import os
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from rewarm.engine import _native, scan

Scan = Callable[[str], "array[int]"]


@pytest.fixture(params=["native", "pure"])
def twin(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and _native.library.calls is None:
        pytest.skip(_native.library.reason)
    return str(request.param)


def scanner(twin: str) -> Scan:
    return scan.scan_keys if twin == "native" else scan.scan_keys_pure


def fingerprint(key: bytes) -> int:
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[24:], "little")
    return low ^ ((high << 1 | high >> 63) & (1 << 64) - 1) or 1


def put(directory: Path, key: bytes) -> None:
    folder = directory / key.hex()[:2]
    folder.mkdir(exist_ok=True)
    (folder / f"{key.hex()}.rec").touch()


def test_finds_every_record_and_nothing_else(twin: str, tmp_path: Path) -> None:
    keys = [os.urandom(32) for _ in range(600)] + [bytes(32), b"\xff" * 32]
    for key in keys:
        put(tmp_path, key)
    other = os.urandom(32).hex()
    here = tmp_path / "00"
    for name in (
        f"{'0' * 63}.rec",
        f"{'0' * 65}.rec",
        f"{'0' * 64}.tmp",
        f"{'0' * 64}",
        f"01{'0' * 62}.rec",
        f"{'0' * 63}g.rec",
        f"{'0' * 62}AB.rec",
        f"{'0' * 62} 0.rec",
        f"{'0' * 60}    .rec",
    ):
        (here / name).touch()
    (tmp_path / "namespace.json").touch()
    (tmp_path / "zz").mkdir()
    (tmp_path / "zz" / f"{other}.rec").touch()
    (tmp_path / f"{other}.rec").touch()
    free = next(f"{first:02x}" for first in range(256) if not (tmp_path / f"{first:02x}").exists())
    (tmp_path / free).touch()
    assert sorted(scanner(twin)(str(tmp_path))) == sorted(map(fingerprint, keys))


def test_asks_again_for_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if _native.library.calls is None:
        pytest.skip(_native.library.reason)
    monkeypatch.setattr(scan, "_FIRST_ROOM", 3)
    for number in range(50):
        put(tmp_path, bytes([number]) * 32)
    assert len(scan.scan_keys(str(tmp_path))) == 50


def test_a_namespace_without_a_directory_is_empty(twin: str, tmp_path: Path) -> None:
    assert scanner(twin)(str(tmp_path)) == array("Q")
    assert scanner(twin)(str(tmp_path / "missing")) == array("Q")


def test_a_file_in_its_place_is_an_error(twin: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        scanner(twin)(str(tmp_path / "file"))
    assert caught.value.errno == errno.ENOTDIR


def test_the_tables_are_the_same() -> None:
    if _native.library.calls is None:
        pytest.skip(_native.library.reason)
    rng = random.Random(3)
    tables = [array("Q", bytes(8 * 256)) for _ in range(2)]
    for _ in range(6):
        more = array("Q", [rng.choice([0, 1, rng.getrandbits(64), rng.getrandbits(8)]) for _ in range(20)])
        assert scan.add_to_table(tables[0], more) == scan.add_to_table_pure(tables[1], more)
        assert tables[0] == tables[1]
    assert 0 < sum(map(bool, tables[0])) <= 120
