"""What a container runtime takes away: tests/support/container_like.py takes it away here, without root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support" / "container_like.py"
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]


def in_container(*command: str) -> subprocess.CompletedProcess[str]:
    words = [*UNSHARE, sys.executable, str(SUPPORT), *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    try:
        done = in_container("true")
    except FileNotFoundError:
        pytest.skip("this machine lacks unshare (util-linux)")
    if done.returncode:
        pytest.skip(f"this machine refuses user namespaces, or mounts in them: {done.stderr.strip()[-200:]}")


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = in_container(sys.executable, "-m", "rewarm.cli.main", "doctor", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_doctor_names_what_the_container_lacks(tmp_path: Path) -> None:
    code, findings = doctor("--root", str(tmp_path))
    assert code == 0
    assert findings["shm.size"]["verdict"] == "WARN"
    assert findings["shm.size"]["found"] == "64.0 MiB"
    assert findings["limits.locked_memory"]["found"] == "64.0 KiB"
    assert findings["engine.io_uring"]["found"] != "available"
    assert findings["engine.pure"]["verdict"] == "OK"
    assert findings["directory.writable"]["verdict"] == "OK"


def test_the_native_library_says_that_io_uring_was_refused() -> None:
    _, findings = doctor()
    if findings["engine.threads"]["verdict"] != "OK":
        pytest.skip("this install has no native library")
    assert "not permitted" in findings["engine.io_uring"]["found"]
    assert findings["engine.io_uring"]["verdict"] == "INFO"


def test_auto_falls_back_and_moves_bytes(tmp_path: Path) -> None:
    code = f"""
import os
from rewarm.engine import alloc_aligned, open_engine
from rewarm.engine.base import EngineConfig, Read, Write
engine = open_engine(EngineConfig(kind="auto"))
assert engine.name != "io_uring", engine.name
path = {str(tmp_path / "file")!r}
open(path, "wb").close()
out, back = alloc_aligned(8192), alloc_aligned(8192)
out.view[:] = os.urandom(8192)
for transfer in (Write(path, 0, out.address, 8192), Read(path, 0, back.address, 8192)):
    done = engine.submit([transfer])
    assert done.wait(60) and done.results() == [0], done.results()
assert bytes(back.view) == bytes(out.view)
engine.close()
"""
    done = in_container(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_host_tier_has_what_dev_shm_has_room_for() -> None:
    """Nothing of another size than fits is made, and who asked is told what to do."""
    code = """
import os
from rewarm.errors import StorageError
from rewarm.volume.host_tier import host_root, prepare
root = host_root("0" * 32)
try:
    prepare(root, 64 << 20)
except StorageError as error:
    print(error.message, error.hint, os.path.exists(root), sep="|")
prepare(root, 16 << 20)
print(os.path.exists(root))
"""
    done = in_container(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    refused, made = done.stdout.splitlines()
    assert "needs 64.0 MiB, and the tmpfs below /dev/shm/rewarm-0 has 32.0 MiB left" in refused
    assert "--shm-size" in refused
    assert refused.endswith("|False")
    assert made == "True"


def test_io_uring_by_name_is_refused_with_the_reason() -> None:
    code = """
from rewarm.engine import open_engine
from rewarm.engine.base import EngineConfig
from rewarm.errors import UnsupportedError
try:
    open_engine(EngineConfig(kind="io_uring"))
except UnsupportedError as error:
    print(error.message)
"""
    done = in_container(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "io_uring" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_root_of_an_unmapped_user_fails_by_name(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    os.chown(root, 4242, 4242)
    tmp_path.chmod(0o755)
    code, findings = doctor("--root", str(root))
    assert code == 1
    assert findings["directory.writable"]["verdict"] == "FAIL"
    assert findings["directory.writable"]["found"] == "Permission denied"
    assert "user 0" in findings["directory.private"]["expected"]
