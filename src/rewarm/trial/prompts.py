"""Prompts as token numbers, all from the seed: nothing about them can be known before it is drawn.

Contexts differ from their first token on, so that no prefix of one serves another.
"""

from __future__ import annotations

import hashlib
import random

FILL, PROBE, WARM_UP, CANARY = "fill", "probe", "warm-up", "canary"

TOKENS = range(3, 256)
"""Low token numbers are ordinary text in every vocabulary that we know, and exist in the tiny model's; the first three
are often padding, begin and end."""


def context(seed: int, kind: str, number: int, num_tokens: int) -> list[int]:
    """One prompt: the same for the same arguments, on every machine.

    Args:
        seed: The trial's.
        kind: FILL, PROBE, WARM_UP or CANARY: prompts of different kinds share nothing.
        number: Which one of its kind.
        num_tokens: Its length.
    """
    digest = hashlib.sha256(f"rewarm trial {seed} {kind} {number}".encode()).digest()
    draw = random.Random(digest)
    return [draw.choice(TOKENS) for _ in range(num_tokens)]
