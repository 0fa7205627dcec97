"""What the tier learns of the machine under it: bytes a second of each root, and seconds of a prefill.

Estimates follow what is observed and let go of what is old. Nothing here reads a clock or the machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

KEPT_BUSY_S = 2.0
"""Seconds of busy time after which an observation of a root weighs half."""
KEPT_A_WINDOW = 0.92
"""What it weighs at most after the next one: short loads would else take hundreds to change an estimate."""
JUMP = 2.0
"""A window this many times faster or slower than expected, twice in a row, means that the root has changed."""
MIN_WINDOW_S = 0.02
"""Shorter windows are kept until they add up: a single chunk says more of latency than of bandwidth."""
STEP_DECAY = 0.96
"""What an observed prefill step weighs after the next one: half after 17."""
ODD_STEP, ODD_WEIGHT = 3.0, 0.1
"""A step so many times slower or faster than expected (something was compiled, say) weighs little
unless the next one is odd too."""
STEP_WORK = 256
"""Tokens that cost about what a step costs by itself."""
PRIOR_WEIGHT = 0.5
"""What the last run's estimate weighs, in observed steps."""
UNEVEN = 0.7
"""How far above its share the root that gets most of a few chunks lies, in standard deviations."""
ROOT_RATES = (1e3, 1e14)
"""Bytes a second that a root may be known to deliver, least and most."""
MIN_PREFILL_S, MAX_PREFILL_S = 1e-12, 1e3
"""Of a token with its pair, least; of a step, a token or a pair, most."""
TYPICAL_PAIR = 1 / 24576
"""What a pair costs in tokens where nothing is known: attention takes as long as all else for the token at 24,576."""


class RootRate:
    """Bytes a second of one root, from the bytes that it delivered while it had something to deliver."""

    def __init__(self, bytes_a_s: float = 0.0) -> None:
        """
        Args:
            bytes_a_s: The last run's estimate; 0: there is none.
        """
        self._bytes = bytes_a_s * MIN_WINDOW_S
        self._busy_s = MIN_WINDOW_S if bytes_a_s > 0 else 0.0
        self._open_bytes = 0.0
        self._open_s = 0.0
        self._jumps = 0

    @property
    def bytes_a_s(self) -> float:
        """The estimate; 0 before anything was observed."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def observe(self, num_bytes: float, busy_s: float) -> None:
        """Take in a window: what was delivered in it, and for how long of it reads were under way."""
        if busy_s <= 0:
            return
        self._open_bytes += num_bytes
        self._open_s += busy_s
        if self._open_s >= MIN_WINDOW_S or (self._open_bytes and not self._bytes):
            self._close_window()

    def _close_window(self) -> None:
        num_bytes, busy_s = self._open_bytes, self._open_s
        self._open_bytes = self._open_s = 0.0
        expected_s = num_bytes / self.bytes_a_s if self.bytes_a_s > 0 else busy_s
        has_jumped = not expected_s / JUMP <= busy_s <= expected_s * JUMP
        self._jumps = self._jumps + 1 if has_jumped else 0
        kept = min(0.5 ** (busy_s / KEPT_BUSY_S), KEPT_A_WINDOW)
        if self._jumps >= 2 and self._busy_s:
            kept = min(kept, busy_s / 4 / self._busy_s)
        self._bytes = self._bytes * kept + num_bytes
        self._busy_s = self._busy_s * kept + busy_s


class StorageRates:
    """All roots of a volume, whose chunks are spread over them by known shares; and its host tier, which has copies of
    some chunks and is read at the same time. Where nothing is known of the host tier it counts as flash.
    """

    def __init__(self, shares: Sequence[float], known: Sequence[float] = (), known_host: float = 0.0) -> None:
        """
        Args:
            shares: R parts of all bytes, which add up to 1.
            known: The last run's bytes a second of each root; 0 or missing: unknown.
            known_host: The same of the host tier.
        """
        self.host = RootRate(known_host)
        self.shares = tuple(shares)
        padded = itertools.chain(known, itertools.repeat(0.0))
        self.roots = [RootRate(bytes_a_s) for _, bytes_a_s in zip(self.shares, padded, strict=False)]

    def change(self, shares: Sequence[float], roots: Sequence[RootRate | None]) -> None:
        """Other roots from now on, with what is known of each; None: nothing."""
        self.shares = tuple(shares)
        self.roots = [root or RootRate() for root in roots]

    def seconds_a_byte(self) -> float | None:
        """Of a long load, which is spread over all roots: that of the root which ends last. None: nothing is known yet.

        A root that was not observed yet counts as fast as the mean of the others.
        """
        rates = self._rates()
        return max(share / rate for share, rate in zip(self.shares, rates, strict=True)) if rates else None

    def seconds(self, num_chunks: float, chunk_bytes: int, host_share: float = 0.0) -> float:
        """Of a load of a few chunks, which never lie as evenly as many do; 0 where nothing is known.

        Args:
            num_chunks: How many.
            chunk_bytes: Of each.
            host_share: The part of them that lies in the host tier.
        """
        num_host = num_chunks * host_share if self.host.bytes_a_s > 0 else 0.0
        num_flash = num_chunks - num_host
        flash_s = max(
            (
                (num_flash * share + UNEVEN * math.sqrt(num_flash * share * (1 - share))) * chunk_bytes / rate
                for share, rate in zip(self.shares, self._rates(), strict=False)
            ),
            default=0.0,
        )
        return max(flash_s, num_host * chunk_bytes / self.host.bytes_a_s) if num_host else flash_s

    def weight(self, host_share: float) -> float:
        """What a chunk takes of a long load of which this part lies in the host tier; 1: as long as one from flash."""
        pace, host_rate = self.seconds_a_byte(), self.host.bytes_a_s
        if not host_share or not pace or not host_rate:
            return 1.0
        return max(1 - host_share, host_share / host_rate / pace)

    def _rates(self) -> list[float]:
        rates = [root.bytes_a_s for root in self.roots]
        known = [rate for rate in (*rates, 0.0 if any(rates) else self.host.bytes_a_s) if rate > 0]
        if not known:
            return []
        mean = sum(known) / len(known)
        return [rate or mean for rate in rates]


class PrefillModel:
    """Seconds of a step that computes: ``base + a_token * tokens + a_pair * pairs``, fitted to steps that were seen.

    Pairs are (token, earlier token) that attention looks at: what makes late tokens dearer than early ones. The fit is
    least squares, weighted by work, with coefficients that are not negative. Where the steps seen do not tell tokens
    and pairs apart, TYPICAL_PAIR does; where they do not tell either from what a step costs by itself, that is nothing.
    """

    _SCALE = (1.0, 1e-3, 1e-6)
    _RIDGE = (1e-2, 1e-6, 1e-2)

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """
        Args:
            prior: (base, a_token, a_pair) of the last run; empty: there is none.
        """
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._target = [0.0] * 3
        self._has_seen = False
        self._was_odd = False
        self._solved: tuple[float, float, float] | None = None
        if len(prior) == 3 and prior[1] + prior[2] > 0:
            for tokens, begin in ((256, 0), (4096, 0), (4096, 12288)):
                pairs = pairs_of(begin, begin + tokens)
                self._add(tokens, pairs, _step_s(prior, tokens, pairs), PRIOR_WEIGHT / 3)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to predict from."""
        return self._has_seen

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(base, a_token, a_pair), in seconds."""
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Take in a step that computed ``tokens`` prompt tokens."""
        if seconds <= 0 or tokens <= 0:
            return
        weight = 1.0
        if self._has_seen:
            expected_s = _step_s(self.coefficients, tokens, pairs)
            is_odd = not expected_s / ODD_STEP <= seconds <= expected_s * ODD_STEP
            weight = ODD_WEIGHT if is_odd and not self._was_odd else 1.0
            self._was_odd = is_odd
        for row in self._moments:
            row[:] = [value * STEP_DECAY for value in row]
        self._target = [value * STEP_DECAY for value in self._target]
        self._add(tokens, pairs, seconds, weight)

    def seconds(self, begin: int, end: int) -> float:
        """Seconds that the tokens [begin, end) of one prompt cost, without what each step costs by itself."""
        _, a_token, a_pair = self.coefficients
        return a_token * (end - begin) + a_pair * pairs_of(begin, end)

    def _add(self, tokens: int, pairs: float, seconds: float, weight: float) -> None:
        # By columns: a step, tokens with their typical pairs, pairs beyond those.
        work = tokens + TYPICAL_PAIR * pairs
        row = (self._SCALE[0], work * self._SCALE[1], pairs * self._SCALE[2])
        weight /= (work + STEP_WORK) ** 2  # by work, not by seconds: a step that was slow counts as much as a fast one
        for i in range(3):
            self._target[i] += weight * row[i] * seconds
            for j in range(3):
                self._moments[i][j] += weight * row[i] * row[j]
        self._has_seen = True
        self._solved = None

    def _solve(self) -> tuple[float, float, float]:
        """The best coefficients of which none is negative: of all three where that can be, else of fewer."""
        for subsets in _SUBSETS:
            best: tuple[float, tuple[float, float, float]] = (0.0, (0.0, 0.0, 0.0))
            for used in subsets:
                gain, coefficients = self._fit(used)
                if gain > best[0] and min(coefficients) >= 0:
                    best = (gain, coefficients)
            if best[0] > 0:
                return best[1]
        return 0.0, 0.0, 0.0

    def _fit(self, used: tuple[int, ...]) -> tuple[float, tuple[float, float, float]]:
        """(how much of the squares it explains, coefficients) with the columns ``used`` alone."""
        moments, ridge = self._moments, self._RIDGE
        # Cramer's rule on a symmetric matrix; a column that is not used is one of the identity.
        has = [index in used for index in range(3)]
        a, e, i = (moments[n][n] * (1 + ridge[n]) if has[n] else 1.0 for n in range(3))
        b = moments[0][1] if has[0] and has[1] else 0.0
        c = moments[0][2] if has[0] and has[2] else 0.0
        f = moments[1][2] if has[1] and has[2] else 0.0
        x, y, z = (target if is_used else 0.0 for target, is_used in zip(self._target, has, strict=True))
        cofactors = (e * i - f * f, c * f - b * i, b * f - c * e)
        determinant = a * cofactors[0] + b * cofactors[1] + c * cofactors[2]
        if determinant <= 0:
            return 0.0, (0.0, 0.0, 0.0)
        base = (cofactors[0] * x + cofactors[1] * y + cofactors[2] * z) / determinant
        token = (cofactors[1] * x + (a * i - c * c) * y + (b * c - a * f) * z) / determinant
        pair = (cofactors[2] * x + (b * c - a * f) * y + (a * e - b * b) * z) / determinant
        a_token = token * self._SCALE[1]
        coefficients = (base * self._SCALE[0], a_token, pair * self._SCALE[2] + a_token * TYPICAL_PAIR)
        return base * x + token * y + pair * z, coefficients


_SUBSETS = (((0, 1, 2),), ((0, 1), (1, 2), (0, 2)), ((1,), (2,)))


def pairs_of(begin: int, end: int) -> float:
    """(token, earlier token) pairs of the tokens [begin, end) of a prompt."""
    return (end - begin) * (begin + end) / 2


def _step_s(coefficients: Sequence[float], tokens: int, pairs: float) -> float:
    base, a_token, a_pair = coefficients
    return base + a_token * tokens + a_pair * pairs


def rates_to_json(storage: StorageRates, prefill: PrefillModel) -> dict[str, Any]:
    """What the next start begins with."""
    host = {"host_bytes_a_s": round(storage.host.bytes_a_s)} if storage.host.bytes_a_s else {}
    return {
        "root_bytes_a_s": [round(root.bytes_a_s) for root in storage.roots],
        **host,
        "prefill_s": list(prefill.coefficients) if prefill.is_known else [],
    }


def rates_from_json(shares: Sequence[float], document: Mapping[str, Any]) -> tuple[StorageRates, PrefillModel]:
    """The reverse; whatever is not as it was written, or could not be, counts as unknown."""
    storage = learned_roots(document)
    if len(storage) != len(shares):
        storage = []  # roots came or went: which is which is not known
    host: Any = document.get("host_bytes_a_s")
    known_host = float(host) if _is_between(host, *ROOT_RATES) else 0.0
    return StorageRates(shares, storage, known_host), PrefillModel(learned_prefill(document))


def learned_roots(document: Mapping[str, Any]) -> list[float]:
    """Bytes a second of each root; 0 where that is unknown, nothing where there is no list."""
    value = document.get("root_bytes_a_s")
    return [x if _is_between(x, *ROOT_RATES) else 0.0 for x in value] if isinstance(value, list) else []


def learned_prefill(document: Mapping[str, Any]) -> list[float]:
    """(base, a_token, a_pair), or nothing."""
    value = document.get("prefill_s")
    if not isinstance(value, list) or len(value) != 3 or not all(_is_between(x, 0, MAX_PREFILL_S) for x in value):
        return []
    return list(value) if value[1] + value[2] >= MIN_PREFILL_S else []


def _is_between(value: object, least: float, most: float) -> bool:
    """Whether it is a number, and one of those; NaN is not."""
    return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]
