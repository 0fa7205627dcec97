"""What a chunk of KV is called.

A server hashes its KV blocks so that each hash names the whole prefix up to its block. The hash at the end of a chunk
therefore names the chunk: that, and a salt for what the server's hash does not cover, make the chunk id. Each shard
(one rank's part of the chunk) is a record of its own, and its key is derived from the chunk id.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TypeAlias

BlockHash: TypeAlias = "bytes | int | str"
"""How servers spell a block hash; vLLM: bytes since 0.11, an int before, and hexadecimal text in its events."""


def _hash_bytes(block_hash: BlockHash) -> bytes:
    if isinstance(block_hash, bytes):
        return b"b" + block_hash
    if isinstance(block_hash, int):
        return b"i" + block_hash.to_bytes(32, "big", signed=True)
    return b"s" + block_hash.encode()


def chunk_id(block_hash: BlockHash, salt: bytes = b"") -> bytes:
    """32 bytes that name a chunk, the same in every process.

    Args:
        block_hash: The server's hash of the chunk's last block, chained over the whole prefix.
        salt: What the server's hash leaves out and the bytes depend on: the contents of a LoRA adapter, a reset.
    """
    return sha256(len(salt).to_bytes(4, "big") + salt + _hash_bytes(block_hash)).digest()


def group_chunk(chunk: bytes, group: int) -> bytes:
    """32 bytes that name what one of the server's KV cache groups keeps of a chunk; the first group's name is the
    chunk's own.
    """
    return sha256(chunk + b"group" + group.to_bytes(4, "big")).digest() if group else chunk


def shard_key(chunk: bytes, rank: int) -> bytes:
    """32 bytes: the record key of one rank's part of a chunk.

    Args:
        chunk: What chunk_id() or group_chunk() gave.
        rank: The rank whose part it is; the first of the ranks that hold the same bytes.
    """
    return sha256(chunk + rank.to_bytes(4, "big") + bytes(4)).digest()
