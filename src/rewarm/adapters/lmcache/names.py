"""What LMCache calls an object, and what Rewarm calls its record.

LMCache's key has a model's name, a rank, a group and a hash of the tokens up to the chunk's end. It says nothing of
weights, dtypes or shapes, so those go into the namespace, together with LMCache's version: no release of it promises
that the next one lays KV out alike. The record's key is the chunk's hash itself, so that a listing can tell it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from rewarm.engine.record import KEY_BYTES
from rewarm.kv.fingerprint import Fingerprint
from rewarm.kv.identity import KvIdentity, canonical_json

LAYOUT_VERSION = 1
"""Of what a record holds of LMCache's objects; changes when the seats map them otherwise."""


@dataclass(frozen=True, slots=True)
class Group:
    """Objects that differ only in their tokens and, where the user changed something, in their layout."""

    model: str
    topology: tuple[tuple[str, int], ...]
    """Whose part of the KV this is, in the seat's own numbers, sorted by name."""
    tenant: str = ""
    """The cache_salt, or the tags, that keep tenants apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How an object's bytes are to be read."""

    payload_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    format: str
    """LMCache's name of the order of its dimensions; empty: the shapes say it."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in an identity."""
        return {"shapes": [list(s) for s in self.shapes], "dtypes": list(self.dtypes), "format": self.format}

    @classmethod
    def of(cls, found: Any, payload_bytes: int) -> Layout | None:
        """What an identity's layout says; None: it is no such layout."""
        try:
            shapes = tuple(tuple(int(length) for length in shape) for shape in found["shapes"])
            return cls(payload_bytes, shapes, tuple(str(dtype) for dtype in found["dtypes"]), str(found["format"]))
        except (TypeError, ValueError, KeyError):
            return None


@dataclass(frozen=True, slots=True)
class Naming:
    """What all objects of one server have in common."""

    seat: str
    """``lmcache`` in a server's process, ``lmcache-mp`` in LMCache's own server."""
    lmcache_version: str
    weights: Mapping[str, Fingerprint]
    """Of each model that was asked for."""
    chunk_tokens: int
    """LMCache's chunk size; 0: not known to this seat, where it follows from the shapes."""
    salt: str = ""
    """What was configured to keep servers apart."""

    def identity(self, group: Group, hash_bytes: int, layout: Layout | None) -> dict[str, Any]:
        """The identity of a namespace; without a layout, what all namespaces of the group have in common."""
        return KvIdentity(
            server={"kind": self.seat, "layout_version": LAYOUT_VERSION, "lmcache": self.lmcache_version},
            model={"name": group.model, "weights": self.weights[group.model].to_json()},
            kv={"chunk_tokens": self.chunk_tokens},
            topology=dict(group.topology),
            hashing={"hash_bytes": hash_bytes},
            layout=layout.to_json() if layout else {},
            salt=salt_digest(self.salt, group.tenant),
        ).to_json()

    def family(self, group: Group, hash_bytes: int) -> str:
        """One text for all namespaces of a group."""
        return canonical_json(self.identity(group, hash_bytes, None))


def family_of(identity: Mapping[str, Any]) -> str:
    """The family() of a namespace's identity."""
    return canonical_json({**identity, "layout": {}})


def group_of(identity: Mapping[str, Any], tenant: str) -> Group | None:
    """The group that an identity of these seats is of, where its tenant is known; None: it is no such identity."""
    try:
        topology = tuple(sorted((str(name), int(number)) for name, number in identity["topology"].items()))
        return Group(str(identity["model"]["name"]), topology, tenant)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


@lru_cache(maxsize=4096)
def salt_digest(configured: str, tenant: str) -> str:
    """What stands for a salt on the volume, where nobody should read it; empty: no salt."""
    if not (configured or tenant):
        return ""
    return sha256(canonical_json({"salt": configured, "tenant": tenant}).encode()).hexdigest()


def record_key(chunk_hash: bytes) -> bytes | None:
    """The key of a chunk's record; None: a hash that is too long for one."""
    return chunk_hash.ljust(KEY_BYTES, b"\0") if 0 < len(chunk_hash) <= KEY_BYTES else None
