from __future__ import annotations

import pytest

from rewarm.errors import FormatVersionError, RewarmError, StorageError, UsageError, VolumeFull
from rewarm.units import GIB, MIB


def test_a_version_error_names_both_versions() -> None:
    error = FormatVersionError("/v/rewarm.volume", found=3, known=1)
    assert "3" in error.message
    assert "up to 1" in error.message
    assert error.hint


def test_a_full_volume_carries_its_numbers_and_a_next_step() -> None:
    error = VolumeFull("/v", need_bytes=10, free_bytes=3)
    assert (error.path, error.need_bytes, error.free_bytes) == ("/v", 10, 3)
    assert "rewarm volume evict /v" in error.hint


@pytest.mark.parametrize(
    ("need_bytes", "free_bytes", "said"),
    [
        (4 * GIB, 3 * MIB, "/v has 3.0 MiB free, 4.0 GiB are needed"),
        (16 * MIB, 0, "/v has 0 B free, 16.0 MiB are needed"),
        (GIB + 1, GIB, "/v has 1.0 GiB (1073741824 bytes) free, 1.0 GiB (1073741825 bytes) are needed"),
    ],
)
def test_a_full_volume_says_sizes_that_differ(need_bytes: int, free_bytes: int, said: str) -> None:
    assert VolumeFull("/v", need_bytes=need_bytes, free_bytes=free_bytes).message == said


def test_messages_are_one_line() -> None:
    for error in (
        FormatVersionError("x", found=2, known=1),
        VolumeFull("x", need_bytes=1, free_bytes=0),
        StorageError("y"),
    ):
        assert isinstance(error, RewarmError)
        assert "\n" not in error.message + error.hint


def test_a_text_that_is_far_too_long_is_cut_in_the_middle() -> None:
    error = UsageError("x is " + "y" * 1_000_000 + ", which is not a number", hint="z" * 1_000_000)
    assert len(error.message) < 700
    assert str(error) == error.message
    assert error.message.startswith("x is yyy")
    assert error.message.endswith("which is not a number")
    assert len(error.hint) < 700
    path = "/" + "d" * 250
    assert UsageError(f"{path} is no volume").message == f"{path} is no volume"
