"""What a root holds, counted from its directories: names only, since a namespace's records all have one size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from rewarm.errors import RewarmError
from rewarm.volume.layout import NamespaceFile, RootPaths, key_of_name, namespace_ids, read_namespace_file
from rewarm.volume.session import NEW_PREFIX, inflight_bytes
from rewarm.volume.usage import UsageFile


def described_namespaces(paths: RootPaths) -> list[NamespaceFile]:
    """The namespaces of a root whose description can be read."""
    found = []
    for namespace_id in namespace_ids(paths.root):
        with suppress(RewarmError):
            found.append(read_namespace_file(paths.root, namespace_id))
    return found


def record_names(namespace_directory: str) -> Iterator[str]:
    """File names of the records below a namespace's directory, in the order of their first two digits."""
    try:
        directories = sorted(name for name in os.listdir(namespace_directory) if len(name) == 2)
    except FileNotFoundError:
        return
    for directory in directories:
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(os.path.join(namespace_directory, directory)):
                if key_of_name(name) is not None:
                    yield name


def count_root(paths: RootPaths) -> int:
    """Bytes of all record files, of quarantined ones, and of those that live processes are writing."""
    total = 0
    for namespace_id in namespace_ids(paths.root):
        directory = paths.namespace(namespace_id)
        try:
            total += read_namespace_file(paths.root, namespace_id).record_bytes * sum(
                1 for _ in record_names(directory)
            )
        except RewarmError:
            for name in record_names(directory):
                with suppress(FileNotFoundError):
                    total += os.stat(f"{directory}/{name[:2]}/{name}").st_size
    with suppress(FileNotFoundError), os.scandir(paths.quarantine) as entries:
        total += sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    with suppress(FileNotFoundError):
        for name in os.listdir(paths.sessions):
            if not name.startswith(NEW_PREFIX):
                total += inflight_bytes(os.path.join(paths.sessions, name))
    return total


def recount(paths: RootPaths, usage: UsageFile) -> int:
    """Count anew and write it down; returns the bytes. What is stored meanwhile counts on top, on the safe side."""
    before = usage.read()
    counted = count_root(paths)
    with usage.update() as now:
        grown = max(0, now.total_stored_bytes - before.total_stored_bytes) if before.is_known and now.is_known else 0
        now.used_bytes = counted + grown
        if not now.is_known:
            now.pressure_bytes = now.total_stored_bytes = now.evicted_records = now.evicted_bytes = 0
        now.is_known = True
        return now.used_bytes
