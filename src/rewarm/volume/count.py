"""What a root holds, counted from its directories: names only, since a namespace's records all have one size."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from rewarm.engine.scan import scan_keys
from rewarm.errors import RewarmError
from rewarm.volume.layout import NamespaceFile, RootPaths, key_of_name, namespace_ids, read_namespace_file
from rewarm.volume.session import inflight_bytes, session_directories
from rewarm.volume.usage import UsageFile


def described_namespaces(paths: RootPaths, but: Collection[bytes] = ()) -> list[NamespaceFile]:
    """The namespaces of a root whose description can be read, without those whose ids are in ``but``."""
    found = []
    for namespace_id in namespace_ids(paths.root):
        if namespace_id not in but:
            with suppress(RewarmError):
                found.append(read_namespace_file(paths.root, namespace_id))
    return found


def record_entries(
    namespace_directory: str, on_error: Callable[[OSError], None] | None = None
) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """(key, entry) of what has a record's name in a namespace's directory, in the order of the first two digits.

    Args:
        namespace_directory: Where to look; one that is not there has none.
        on_error: Called for a directory that cannot be read, which is then left out; None: the error is raised.
    """
    found = sorted(
        entry.name for entry in _entries(namespace_directory, on_error) if entry.is_dir(follow_symlinks=False)
    )
    for digits in found:
        if len(digits) != 2:
            continue
        for entry in _entries(os.path.join(namespace_directory, digits), on_error):
            key = key_of_name(entry.name)
            if key is not None and entry.name.startswith(digits):
                yield key, entry


def _entries(directory: str, on_error: Callable[[OSError], None] | None) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if on_error is None:
            raise
        on_error(error)


def count_namespace(paths: RootPaths, namespace_id: bytes) -> tuple[int, int]:
    """(records, bytes) of a namespace; without a description of it, each file is asked for its size."""
    directory = paths.namespace(namespace_id)
    try:
        record_bytes = read_namespace_file(paths.root, namespace_id).record_bytes
    except RewarmError:
        count = total = 0
        for _, entry in record_entries(directory):
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
                count += 1
        return count, total
    count = len(scan_keys(directory))
    return count, count * record_bytes


def written_now(paths: RootPaths) -> int:
    """Bytes that live processes have reserved on a root and not yet in place."""
    return sum(map(inflight_bytes, session_directories(paths)))


def quarantined_bytes(paths: RootPaths) -> int:
    """Bytes of damaged records that were put aside."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(paths.quarantine) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def recount(paths: RootPaths, usage: UsageFile) -> bool:
    """Count a root's records and what else it holds, and write it down.

    What is reserved meanwhile counts on top, and what is written meanwhile may count twice: never too little.

    Returns:
        Whether nobody was writing, so that the number is exact.
    """
    before = usage.read()
    # What is being written comes first: a record that gets its name meanwhile is counted twice, never not at all.
    inflight = counted = written_now(paths)
    counted += sum(count_namespace(paths, namespace_id)[1] for namespace_id in namespace_ids(paths.root))
    counted += quarantined_bytes(paths)
    with usage.update() as now:
        grown = max(0, now.reserved_bytes - before.reserved_bytes) if before.is_known and now.is_known else 0
        now.used_bytes = counted + grown
        if not now.is_known:
            now.pressure_bytes = now.reserved_bytes = now.evicted_records = now.evicted_bytes = 0
        now.is_known = True
    return not inflight and not grown
