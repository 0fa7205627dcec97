"""Removing single records because their owner says so."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing, suppress

from rewarm.engine.base import Priority, Unlink
from rewarm.errors import StorageError
from rewarm.volume.namespace import Namespace
from rewarm.volume.usage import UsageFile
from rewarm.volume.volume import Volume


def remove_records(volume: Volume, namespace: Namespace, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
    """Remove records from every root that answers, and wait for it.

    Args:
        volume: An open volume that may be written to.
        namespace: Theirs.
        keys: N keys.
        timeout_s: How long to wait for a root.
    Returns:
        Of each key, whether it is gone, be it only now; False: a root did not answer, or refused.
    Raises:
        VolumeClosed: The volume was closed.
    """
    volume.check_usable()
    gone = [True] * len(keys)
    namespace.note_absent(keys)
    for root in list(volume.roots):
        if not root.is_member or not keys:
            continue
        transfers = [Unlink(root.paths.record(namespace.id, key)) for key in keys]
        completion = volume.engine.submit(transfers, priority=Priority.STORE, deadline_s=timeout_s)
        completion.wait(timeout_s + 1.0)
        completion.cancel()
        results = completion.results() if completion.done() else [errno.ETIMEDOUT] * len(keys)
        num_removed = results.count(0)
        if num_removed:
            with suppress(OSError, StorageError), closing(UsageFile(root.paths.usage)) as usage:
                usage.free(num_removed * namespace.file.record_bytes)
        gone = [was_gone and result in (0, errno.ENOENT) for was_gone, result in zip(gone, results, strict=True)]
    return gone
