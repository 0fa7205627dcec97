"""The keys of a prompt's chunks, as a vLLM server makes them, without vLLM.

vLLM names a KV block by a hash of the block before it, its tokens, and what else its KV depends on. How it hashes
stands in a namespace's identity; a test compares this file with vLLM's own code.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rewarm.errors import UnsupportedError, UsageError
from rewarm.kv.keys import chunk_id, group_chunk, shard_key

MAX_TOKENS = 1 << 24
_SEED_VARIABLE = "PYTHONHASHSEED"


def chunk_ids(identity: Mapping[str, Any], tokens: Sequence[int], cache_salt: str = "") -> list[list[bytes]]:
    """Ids of the whole chunks of a prompt of text, one list for each way in which releases of vLLM spell it.

    Args:
        identity: Of the namespace.
        tokens: Of the prompt, 0 to 2**32 - 1.
        cache_salt: As requests send it. With one there are two spellings (vLLM 0.32 changed it), without it one.
    Raises:
        UnsupportedError: A namespace whose keys cannot be computed here.
        UsageError: Tokens that are none, or no whole chunk.
    """
    hash_blocks, chunk_tokens, block_tokens = _hashing(identity)
    if len(tokens) > MAX_TOKENS or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise UsageError(
            "these are no tokens of a prompt", hint="a list of at most 16,777,216 whole numbers, 0 or more"
        )
    if len(tokens) < chunk_tokens:
        raise UsageError(
            f"this prompt has {len(tokens)} tokens, less than a chunk of {chunk_tokens}",
            hint="only whole chunks are stored: there is nothing of it to pin or prefetch",
        )
    spellings: list[tuple[Any, ...] | None] = [(cache_salt,), (("cache_salt", cache_salt),)] if cache_salt else [None]
    last = slice(chunk_tokens // block_tokens - 1, None, chunk_tokens // block_tokens)
    hashes = [hash_blocks(tokens, extra) for extra in spellings]
    return [[chunk_id(block_hash) for block_hash in list(found)[last]] for found in hashes]


def prompt_entries(
    namespaces: Mapping[bytes, Mapping[str, Any]], tokens: Sequence[int], cache_salt: str = ""
) -> tuple[int, list[tuple[bytes, bytes]]]:
    """(number of chunks, (namespace id, key) of every record that may be a part of one): as a pin has them.

    Args:
        namespaces: Id to identity of those that the ranks of one server use, which differ in their layout alone.
        tokens: Of the prompt.
        cache_salt: As requests send it.
    Raises:
        UnsupportedError, UsageError: As chunk_ids() gives them.
    """
    identity = next(iter(namespaces.values()))
    spellings = chunk_ids(identity, tokens, cache_salt)
    ranks = range(num_ranks(identity))
    entries = [
        (namespace_id, shard_key(group_chunk(chunk, group), rank))
        for chunks in zip(*spellings, strict=True)
        for chunk in chunks
        for group in range(_num_groups(identity))
        for namespace_id in namespaces
        for rank in ranks
    ]
    return len(spellings[0]), entries


def num_ranks(identity: Mapping[str, Any]) -> int:
    """Ranks that may store a part of each chunk."""
    topology = identity.get("topology")
    sizes = [topology.get(name, 1) for name in ("tp", "pp", "pcp")] if isinstance(topology, Mapping) else [0]
    count = 1
    for size in sizes:
        count *= size if type(size) is int and size > 0 else 0
    if not 0 < count <= 1024:
        raise UnsupportedError("this namespace does not say how many ranks store it", hint=_OTHER)
    return count


def _num_groups(identity: Mapping[str, Any]) -> int:
    """KV cache groups, each of which has a record of each chunk."""
    groups = identity["kv"].get("groups")
    return len(groups) if isinstance(groups, list) and 0 < len(groups) <= 64 else 1


_OTHER = "rewarm volume info DIR shows what namespaces are of; only those of a vLLM server have prompts"
HashBlocks = Callable[[Sequence[int], "tuple[Any, ...] | None"], Iterator[bytes]]


def _hashing(identity: Mapping[str, Any]) -> tuple[HashBlocks, int, int]:
    """(what hashes the blocks of a prompt, tokens a chunk, tokens a block)"""
    try:
        kind, run = identity["server"]["kind"], identity["run"]
        algorithm, seed = identity["hashing"]["algorithm"], identity["hashing"]["seed"]
        block_tokens, chunk_tokens = identity["kv"]["block_tokens"], identity["kv"]["chunk_tokens"]
    except (KeyError, TypeError):
        raise UnsupportedError("this namespace is not of a vLLM server", hint=_OTHER) from None
    sizes_fit = type(block_tokens) is int is type(chunk_tokens) and block_tokens > 0 and chunk_tokens > 0
    if kind != "vllm" or not sizes_fit or chunk_tokens % block_tokens:
        raise UnsupportedError("this namespace is not of a vLLM server", hint=_OTHER)
    if run:
        raise UnsupportedError(
            "this namespace ends with the server's run: something that its records depend on cannot be told",
            hint="the server's log says at start what that is",
        )
    if algorithm not in _HASHES:
        raise UnsupportedError(
            f"the keys of a server that hashes its blocks with {str(algorithm)[:40]!r} cannot be computed here",
            hint=f"start it with --prefix-caching-hash-algo, one of: {', '.join(sorted(_HASHES))}",
        )
    digest = _HASHES[algorithm]
    start = digest(_seed_text(str(seed)))

    def hash_blocks(tokens: Sequence[int], extra: tuple[Any, ...] | None) -> Iterator[bytes]:
        before, rest = start, iter(tokens)
        while len(block := tuple(islice(rest, block_tokens))) == block_tokens:
            before = digest((before, block, extra))
            yield before
            extra = None  # a cache_salt is in the first block alone

    return hash_blocks, chunk_tokens, block_tokens


def _seed_text(seed: str) -> str:
    """What the hashes start from; where that is the server's PYTHONHASHSEED, only its digest is known."""
    if not seed.startswith(_SEED_VARIABLE):
        return seed
    wanted = seed.removeprefix(_SEED_VARIABLE).strip()
    for text in (os.environ.get(_SEED_VARIABLE), "0"):
        if text is not None and hashlib.sha256(text.encode()).hexdigest()[:16] == wanted:
            return text
    raise UsageError(
        f"the server of this namespace was started with another {_SEED_VARIABLE}",
        hint=f"run this command with the server's: {_SEED_VARIABLE}=... rewarm kv ...",
    )


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(_cbor(value)).digest()


_HASHES: dict[str, Callable[[Any], bytes]] = {"sha256": _sha256, "sha256_cbor": _sha256_cbor}


def _cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949, section 4.2) of what vLLM hashes."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _cbor_head(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes([kind << 5 | number])
    for code, layout, limit in ((24, ">BB", 1 << 8), (25, ">BH", 1 << 16), (26, ">BI", 1 << 32)):
        if number < limit:
            return struct.pack(layout, kind << 5 | code, number)
    return struct.pack(">BQ", kind << 5 | 27, number)
