from __future__ import annotations

from rewarm.errors import FormatVersionError, RewarmError, StorageError, VolumeFull


def test_a_version_error_names_both_versions() -> None:
    error = FormatVersionError("/v/rewarm.volume", found=3, known=1)
    assert "3" in error.message
    assert "up to 1" in error.message
    assert error.hint


def test_a_full_volume_carries_its_numbers_and_a_next_step() -> None:
    error = VolumeFull("/v", need_bytes=10, free_bytes=3)
    assert (error.path, error.need_bytes, error.free_bytes) == ("/v", 10, 3)
    assert "rewarm volume evict /v" in error.hint


def test_messages_are_one_line() -> None:
    for error in (
        FormatVersionError("x", found=2, known=1),
        VolumeFull("x", need_bytes=1, free_bytes=0),
        StorageError("y"),
    ):
        assert isinstance(error, RewarmError)
        assert "\n" not in error.message + error.hint
