"""A process has seats of one kind, and each volume once."""

from __future__ import annotations

import pytest

from rewarm.adapters.seats import CONNECTOR, LMCACHE, claim, hinted, release
from rewarm.errors import UsageError


@pytest.mark.parametrize(("first", "second"), [(CONNECTOR, LMCACHE), (LMCACHE, CONNECTOR)])
def test_the_second_kind_is_refused_while_the_first_is_there(first: str, second: str) -> None:
    seat = claim(first, "volume")
    with pytest.raises(UsageError, match="stored twice") as raised:
        claim(second, "another volume")
    assert "RewarmConnector out of" in raised.value.hint
    release(seat)
    release(seat)
    release(claim(second))


def test_two_sides_of_a_connector_share_its_seat() -> None:
    sides = claim(CONNECTOR), claim(CONNECTOR)
    release(sides[0])
    with pytest.raises(UsageError):
        claim(LMCACHE)
    release(sides[1])
    release(claim(LMCACHE))


def test_one_volume_has_one_seat_of_a_kind() -> None:
    seats = [claim(LMCACHE, "a"), claim(LMCACHE, "b")]
    with pytest.raises(UsageError, match="twice on one volume"):
        claim(LMCACHE, "a")
    for seat in seats:
        release(seat)


def test_a_seat_that_nobody_has_any_more_is_free() -> None:
    claim(CONNECTOR)
    release(claim(LMCACHE))


def test_the_hint_is_in_what_a_server_prints() -> None:
    assert str(hinted(UsageError("what", hint="then"))) == "what; then"
    assert str(hinted(UsageError("what"))) == "what"
