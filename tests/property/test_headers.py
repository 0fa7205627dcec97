"""Header pages: every parser says of every page what the format's page says, and a parser that does not is caught."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest
from fuzz import Fields, Parser, Verdict, disagreements, fuzz_headers, parsers, pure_parser
from headerpage import seal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewarm.engine import _native
from rewarm.engine.record import RecordHeader, num_pieces, pack_header, parse_header

SAMPLE = 18_000
"""With the archives' 2,000 the 20,000 cases of `make test`; `make test-deep` has a million."""
U64 = st.integers(0, 2**64 - 1)


def test_a_seeded_sample() -> None:
    verdicts, findings = fuzz_headers(seed=1, count=SAMPLE)
    assert not findings, findings[:5]
    assert min(verdicts[v.value] for v in Verdict) > SAMPLE // 20  # the sample is about all three


@given(st.binary(max_size=300), st.sampled_from([0, 1, 104, 4095, 4096, 4097]))
@settings(deadline=None, max_examples=200)
def test_any_bytes_of_any_length(start: bytes, length: int) -> None:
    page = start.ljust(length, b"\0")[:length]
    assert not disagreements(page, parsers())
    assert not disagreements(seal(bytearray(b"RWR1" + page[4:])) if length >= 104 else page, parsers())


@st.composite
def sealed_pages(draw: st.DrawFn) -> bytes:
    """Pages that a record could have, but for the fields that are drawn freely; the checksum is right."""
    piece = draw(st.sampled_from([4096, 8192, 1 << 20]) | st.integers(0, 2**32 - 1))
    payload = draw(st.integers(0, 768 * piece + 8192).map(lambda n: min(n, 2**64 - 1)) | U64)
    near = -(-(4096 + -(-payload // 4096) * 4096) // piece) if piece else 0
    count = draw(st.integers(max(0, near - 2), near + 2).map(lambda n: n % 2**32) | st.integers(0, 2**32 - 1))
    head = b"RWR1" + bytes(4) + draw(st.sampled_from([1, 1, 1, 0, 2])).to_bytes(2, "little") + bytes(2)
    head += draw(st.sampled_from([1, 1, 1, 0, 2])).to_bytes(4, "little") + payload.to_bytes(8, "little")
    head += piece.to_bytes(4, "little") + count.to_bytes(4, "little") + draw(st.binary(min_size=72, max_size=72))
    return seal(bytearray(head.ljust(4096, b"\0")))


@given(sealed_pages())
@example(seal(bytearray(b"RWR1".ljust(4096, b"\0"))))
@settings(deadline=None, max_examples=300)
def test_pages_with_a_right_checksum(page: bytes) -> None:
    assert not disagreements(page, parsers())


@given(
    st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(0, 1 << 29), U64,
    st.sampled_from([8192, 65536, 1 << 20]), st.randoms(use_true_random=False, note_method_calls=False),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_what_is_packed_is_parsed(
    key: bytes, namespace: bytes, payload: int, created: int, piece: int, rng: object
) -> None:
    payload = min(payload, 700 * piece)
    crcs = tuple(rng.getrandbits(32) for _ in range(num_pieces(payload, piece)))
    header = RecordHeader(key, namespace, payload, created, crcs, piece)
    page = pack_header(header)
    assert parse_header(page) == header
    assert not disagreements(page, parsers())


def _forgets_its_checksum(page: bytes) -> Fields | Verdict:
    return pure_parser(seal(bytearray(page)))


def _believes_the_count(page: bytes) -> Fields | Verdict:
    said = pure_parser(page)
    if said is Verdict.DAMAGE and page[:4] == b"RWR1" and seal(bytearray(page)) == page:
        return Fields(page[32:64], page[64:96], 0, 0, (), 0)
    return said


def _crashes_on_another_version(page: bytes) -> Fields | Verdict:
    if pure_parser(page) is Verdict.VERSION:
        raise ValueError("unknown version")
    return pure_parser(page)


def test_both_parsers_take_part() -> None:
    if "native" not in parsers():
        pytest.skip(_native.library.reason)
    assert list(parsers()) == ["pure", "native"]


@pytest.mark.parametrize("broken", [_forgets_its_checksum, _believes_the_count, _crashes_on_another_version])
def test_a_broken_parser_is_caught(broken: Parser) -> None:
    _, findings = fuzz_headers(seed=1, count=500, known={"broken": broken})
    assert findings


@pytest.mark.deep
def test_a_million() -> None:
    """Headers and archives; keeps its figures in bench/results/fuzz.json."""
    kept = Path(__file__).resolve().parents[2] / "bench" / "results" / "fuzz.json"
    assert fuzz.main(["both", "--count", "1000000", "--results", str(kept)]) == 0
