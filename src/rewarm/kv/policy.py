"""Whether a prefix that is on flash is loaded or computed again: what a policy is told, and what it says of its choice.

``choose.py`` has the policy itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rewarm.metrics import DECISION_REASONS


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What is known of a request when the server asks how much of its prompt can be loaded."""

    request_id: str
    num_request_tokens: int
    """Tokens whose KV the request needs before it can go on."""
    num_resident_tokens: int
    """Leading tokens whose KV lies in the server's own blocks already."""
    num_stored_tokens: int
    """Tokens after those that the volume holds without a gap."""
    num_chunks: int
    """Chunks that hold them; the first may be resident in part."""
    prefix: bytes = b""
    """Says which requests begin with the same chunk, so that one load serves them all; empty: nothing is shared."""
    num_host_chunks: int = 0
    """Of the chunks, those that lie in the host tier, too."""


class Reason(str, Enum):
    """Why a request was loaded, computed or made to wait: the labels of ``rewarm_kv_decisions_total``."""

    ALWAYS_LOAD = "always_load"
    NEVER = "never"
    NOT_STORED = "not_stored"
    """Nothing of the prompt is on the volume."""
    UNMEASURED = "unmeasured"
    """Too little is known: one lane each, so that both get measured."""
    LOAD_FASTER = "load_faster"
    COMPUTE_FASTER = "compute_faster"
    SPREAD_LOAD = "spread_load"
    """Several requests wait, and the last of them ends sooner when this one is loaded."""
    SPREAD_COMPUTE = "spread_compute"
    SPLIT = "split"
    """A part of the stored prefix is loaded while others compute, the rest of it is computed."""
    PROBE_LOAD = "probe_load"
    """Storage was not seen for a while: a little is loaded to see how fast it is now."""
    PROBE_COMPUTE = "probe_compute"
    HOLD = "hold"
    """Asked again in the next step: the loads of requests behind it are ordered first."""
    CUT = "cut"
    """The rest of a load was computed instead, since that ends sooner."""


assert tuple(reason.value for reason in Reason) == DECISION_REASONS


@dataclass(slots=True)
class Decision:
    """One choice, with what was predicted and what came of it. All seconds count from the decision."""

    request_id: str
    at: float
    """The clock at the decision."""
    waited_s: float
    """Since the request was seen first."""
    reason: Reason
    num_request_tokens: int
    num_resident_tokens: int
    num_stored_tokens: int
    num_load_tokens: int
    """Tokens that were asked to be loaded."""
    load_bytes: int
    predicted_load_s: float | None
    """Until all of the prompt is there if all that is stored is loaded; None: unknown."""
    predicted_compute_s: float | None
    """The same if nothing is loaded."""
    predicted_s: float | None
    """The same for what was chosen."""
    load_s: float | None = None
    """Until the load had ended, as the scheduler learnt it."""
    actual_s: float | None = None
    """Until all of the prompt was there."""
    was_cut: bool = False
    host_bytes: int = 0
    """Of what was loaded, what came from the host tier."""

    def to_json(self) -> dict[str, Any]:
        """As a line of the decisions' log has it."""
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        document["reason"] = self.reason.value
        return {name: round(x, 6) if isinstance(x, float) else x for name, x in document.items()}


Part = tuple[str, int, int]
"""(request, first token, end) of prompt tokens that a step computes."""


def prediction_errors(decisions: Iterable[Decision]) -> list[float]:
    """|predicted - actual| / actual of the decisions that have both."""
    return [
        abs(one.predicted_s - one.actual_s) / one.actual_s
        for one in decisions
        if one.predicted_s is not None and one.actual_s and not one.was_cut
    ]
