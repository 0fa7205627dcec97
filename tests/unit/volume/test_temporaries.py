"""What replace_file() leaves where it is interrupted does not stay for ever; a power cut in the VM proof found this."""

from __future__ import annotations

import os
import time
from pathlib import Path

from volumes import Bench, namespace_of, store

from rewarm.volume.janitor.root_janitor import RootJanitor
from rewarm.volume.layout import DEAD_TEMPORARY_S, RootPaths


def test_the_janitor_removes_small_files_whose_writer_died(root: str, bench: Bench) -> None:
    namespace = namespace_of(bench.open(root))
    assert store(namespace, range(2)) == [True] * 2
    paths = RootPaths(root)
    dead = [
        Path(paths.state, "sync-0123456789abcdef.7.00c0ffee.tmp"),
        Path(paths.state, "order.7.00c0ffee.tmp"),
        Path(paths.namespace(namespace.id), "namespace.json.7.00c0ffee.tmp"),
    ]
    alive = Path(paths.state, "order.8.00c0ffee.tmp")
    folder = Path(paths.state, "folder.tmp")
    folder.mkdir()
    before = time.time() - 2 * DEAD_TEMPORARY_S
    for path in (*dead, alive):
        path.write_bytes(b"half")
    for path in (*dead, folder):
        os.utime(path, (before, before))
    janitor = RootJanitor(root)
    with janitor.alone() as is_alone:
        assert is_alone
        janitor.prepare()
        janitor.finish()
    assert [path for path in (*dead, alive, folder) if path.exists()] == [alive, folder]
