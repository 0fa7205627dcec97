"""A listing of what is on a volume, a page at a time, in an order that stands still while records come and go."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from rewarm.adapters.lmcache.keys import object_fields
from rewarm.adapters.lmcache.names import Group
from rewarm.adapters.lmcache.objects import Objects

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import KeyListPage


def list_page(objects: Objects, model: str | None, page_size: int, cursor: str | None) -> KeyListPage:
    """A page of the objects that this server can name.

    Args:
        objects: The volume.
        model: Only this model's; None: all.
        page_size: Objects at most.
        cursor: What the page before said; None: from the beginning.
    Raises:
        ValueError: A page size or cursor that is none.
    """
    from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage

    if type(page_size) is not int or page_size <= 0:
        raise ValueError(f"page_size must be a positive whole number, not {page_size!r}")
    after = _parse(cursor)
    groups = sorted(objects.catalog.groups(), key=_order)
    entries: list[KeyEntry] = []
    for group, hash_bytes in groups:
        place = _order((group, hash_bytes))
        if (model is not None and group.model != model) or (after and place < after[0]):
            continue
        start = after[1] if after and place == after[0] else b""
        left = page_size - len(entries)
        listed = dict(objects.listing(group, hash_bytes))
        chosen = heapq.nsmallest(left + 1, (chunk_hash for chunk_hash in listed if chunk_hash > start))
        for chunk_hash in chosen[:left]:
            key = EncodedObjectKey(chunk_hash_hex=chunk_hash.hex(), **object_fields(group))
            entries.append(KeyEntry(key=key, size_bytes=listed[chunk_hash]))
        if len(chosen) > left:
            last = chosen[left - 1] if left else start
            return KeyListPage(entries=tuple(entries), next_page_token=_token(place, last))
    return KeyListPage(entries=tuple(entries), next_page_token=None)


def _order(entry: tuple[Group, int]) -> str:
    group, hash_bytes = entry
    return "@".join(
        [group.model, *(f"{number:08x}" for _, number in group.topology), f"{hash_bytes:02x}", group.tenant]
    )


def _token(place: str, last: bytes) -> str:
    return f"{place.encode(errors='surrogatepass').hex()}:{last.hex()}"


def _parse(cursor: str | None) -> tuple[str, bytes] | None:
    if cursor is None:
        return None
    place, colon, last = cursor.partition(":")
    try:
        if not colon:
            raise ValueError
        return bytes.fromhex(place).decode(errors="surrogatepass"), bytes.fromhex(last)
    except ValueError:
        raise ValueError(f"this is no cursor of a listing: {cursor[:80]!r}") from None
