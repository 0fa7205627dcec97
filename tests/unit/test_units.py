from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import UsageError
from rewarm.units import GIB, KIB, MIB, TIB, format_rate, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("200GiB", 200 * GIB),
        ("200 gib", 200 * GIB),
        ("1.5TB", 1_500_000_000_000),
        (" 2 MiB ", 2 * MIB),
        ("0", 0),
        ("1KiB", KIB),
        ("3TiB", 3 * TIB),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "1 2", "1e9", "1XB", "0x10", "nan", "1..5GiB", "9" * 5000, "9" * 400 + ".0", "9" * 19, "9EiB"],
)
def test_what_is_no_size_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * MIB, "1.5 GiB"),
        (5 * TIB, "5.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_rates_are_written_in_gib() -> None:
    assert format_rate(2 * GIB, 4) == "0.50 GiB/s"
    assert format_rate(1, 0) == "- GiB/s"


@given(st.integers(0, 2**60), st.integers(1, 2**20))
def test_round_up_is_the_least_multiple_not_below(number: int, multiple: int) -> None:
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0
    assert number <= rounded < number + multiple
