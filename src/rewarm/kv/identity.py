"""All that decides how the bytes of a KV record are to be read, and the namespace that follows from it.

Two servers that would read a record's bytes differently never share a namespace: its id is the sha256 of the canonical
JSON of an identity, and the JSON stands readably in the volume (``rewarm volume info``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

from rewarm.kv.fingerprint import Fingerprint, weights_fingerprint

__all__ = ["SCHEMA", "Fingerprint", "KvIdentity", "canonical_json", "weights_fingerprint"]

SCHEMA = "rewarm.kv/1"
"""Changes when the payload of a record is laid out otherwise."""


def canonical_json(value: Mapping[str, Any]) -> str:
    """One spelling of ``value``: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """What a record's bytes depend on. Values are plain JSON; a field that does not apply stays empty."""

    server: Mapping[str, Any]
    """Kind of the server and version of its layout in records."""
    model: Mapping[str, Any]
    """Weights fingerprint, revision, architecture, dtype, quantisation, overrides of the model's configuration."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """Speculative draft model, whose layers keep KV too."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """How positions are encoded, with what was overridden."""
    kv: Mapping[str, Any]
    """Dtype of the KV cache, where its scales come from, tokens a block and a chunk."""
    topology: Mapping[str, Any]
    """Sizes of tensor, pipeline, decode-context and prefill-context parallelism."""
    hashing: Mapping[str, Any]
    """How the server hashes blocks, since the keys come from its hashes."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """The planes of one rank's KV cache in physical order. Empty until a rank adds its own."""
    salt: str = ""
    """Keeps tenants apart: a hash of what was configured; else empty."""
    run: str = ""
    """A nonce of one run, where the contents of something are unknown; else empty."""

    def to_json(self) -> dict[str, Any]:
        """The mapping that Volume.namespace() takes."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return {"schema": SCHEMA, **{name: dict(v) if isinstance(v, Mapping) else v for name, v in parts.items()}}

    @property
    def id(self) -> bytes:
        """32 bytes: the namespace."""
        return sha256(canonical_json(self.to_json()).encode()).digest()


def with_layout(shared: str, layout: str) -> dict[str, Any]:
    """The identity of one rank: what all ranks share and the rank's own layout, each canonical JSON."""
    identity: dict[str, Any] = json.loads(shared)
    identity["layout"] = json.loads(layout)
    return identity
