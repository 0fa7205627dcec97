"""Whether a prefix that is on flash is loaded or computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rewarm.errors import UsageError


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What is known of a request when the server asks how much of its prompt can be loaded."""

    num_request_tokens: int
    """Tokens whose KV the request needs before it can go on."""
    num_resident_tokens: int
    """Leading tokens whose KV lies in the server's own blocks already."""
    num_stored_tokens: int
    """Tokens after those that the volume holds without a gap."""
    load_bytes: int
    """Bytes to read for them, of all ranks together."""


LoadPolicy = Callable[[PrefixHit], int]
"""Tokens to load: 0, or a number of tokens up to num_stored_tokens that ends on a chunk boundary."""


def always_load(hit: PrefixHit) -> int:
    """Load all that is stored."""
    return hit.num_stored_tokens


def never(_hit: PrefixHit) -> int:
    """Load nothing: the server computes, and its KV is stored for others."""
    return 0


POLICIES: dict[str, LoadPolicy] = {"always_load": always_load, "never": never}


def load_policy(name: str) -> LoadPolicy:
    """The policy called ``name``.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in POLICIES:
        raise UsageError(f"no load policy is called {name!r}", hint=f"use one of: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
