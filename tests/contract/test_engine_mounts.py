"""File systems that are full, and those that refuse O_DIRECT, in a mount namespace of the test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rewarm.engine import ENGINE_KINDS, probe_engines

PROGRAM = """
import errno, os, sys
from rewarm.engine import open_engine
from rewarm.engine.base import EngineConfig, ToMemory
from rewarm.testing.engine_contract.helpers import random_buffer, read_of, run, write_of
from pathlib import Path
kind, folder, refuses = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "ramfs"
try:
    os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    assert not refuses, "this file system was to refuse O_DIRECT"
except OSError as error:
    assert error.errno == errno.EINVAL
os.unlink(folder / "probe")
engine = open_engine(EngineConfig(kind=kind))
buffer, out = random_buffer(3 << 20), random_buffer(3 << 20, seed=1)
for num_bytes in (5000, 600_000):
    assert run(engine, write_of(folder / "r.rec", buffer, num_bytes)) == [0]
    assert run(engine, read_of(folder / "r.rec", num_bytes, ToMemory(out.address))) == [0]
    assert out.view[:num_bytes] == buffer.view[:num_bytes]
if not refuses:
    assert run(engine, write_of(folder / "large.rec", buffer, 3 << 20)) == [errno.ENOSPC]
    assert [path.name for path in folder.iterdir()] == ["r.rec"]
engine.close()
"""


@pytest.mark.parametrize("kind", ENGINE_KINDS)
@pytest.mark.parametrize("file_system", ["tmpfs", "ramfs"])
def test_small_and_odd_file_systems(kind: str, file_system: str, tmp_path: Path) -> None:
    """tmpfs of 2 MiB, which fills up; ramfs, which has no O_DIRECT."""
    if reason := probe_engines()[kind]:
        pytest.skip(f"{kind}: {reason}")
    size = "-o size=2m" if file_system == "tmpfs" else ""
    mount = f"mount -t {file_system} {size} none {tmp_path}"
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        tried = subprocess.run([*in_namespace, mount], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("this machine lacks unshare (util-linux)")
    if tried.returncode:
        pytest.skip(f"this machine does not let users mount a {file_system}: {tried.stderr.strip()}")
    script = f'{mount} && exec "$@"'
    command = [*in_namespace, script, "sh", sys.executable, "-c", PROGRAM, kind, str(tmp_path), file_system]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
