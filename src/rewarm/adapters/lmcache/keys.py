"""LMCache's keys as Rewarm's names and back: of its multi-process server, and of its in-process engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewarm.adapters.lmcache.names import Group
from rewarm.adapters.lmcache.objects import ObjectName

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey

ENGINE_HASH_BYTES = 32
_HASH_MODULUS = 1 << 8 * ENGINE_HASH_BYTES
WHOLE = -1
"""For the layer of an object that holds all of them."""


def object_name(key: ObjectKey) -> ObjectName:
    """Of a key of the multi-process server; from 0.5.0 on it tells an object group."""
    topology = (("kv_rank", int(key.kv_rank)), ("object_group", int(getattr(key, "object_group_id", 0))))
    return ObjectName(Group(key.model_name, topology, key.cache_salt), key.chunk_hash)


def object_fields(group: Group) -> dict[str, Any]:
    """The fields of a key of the multi-process server that name a group."""
    numbers = dict(group.topology)
    fields: dict[str, Any] = {"model_name": group.model, "kv_rank": numbers["kv_rank"], "cache_salt": group.tenant}
    if numbers["object_group"]:
        fields["object_group_id"] = numbers["object_group"]  # which no release before 0.5.0 ever asked for
    return fields


def object_key(group: Group, chunk_hash: bytes) -> ObjectKey:
    """The key of an object of the multi-process server."""
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=chunk_hash, **object_fields(group))


def engine_name(key: Any) -> ObjectName:
    """Of a key of the in-process engine: a CacheEngineKey, or a LayerCacheEngineKey of one layer."""
    topology = (
        ("layer", int(getattr(key, "layer_id", WHOLE))),
        ("worker", int(key.worker_id)),
        ("world_size", int(key.world_size)),
    )
    tenant = "@".join(f"{name}%{value}" for name, value in key.tags or ())
    chunk_hash = key.chunk_hash
    if isinstance(chunk_hash, int):  # little-endian: the folder of a record is named by its key's first byte
        chunk_hash = (chunk_hash % _HASH_MODULUS).to_bytes(ENGINE_HASH_BYTES, "little")
    return ObjectName(Group(key.model_name, topology, tenant), bytes(chunk_hash))
