"""The contract with each release of vLLM, from the oldest to the newest that is known, over its real classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sources
from vllm_server import needs_vllm

DRIVE = Path(__file__).with_name("drive.py")
FAULT, SUPPORT = (Path(__file__).resolve().parents[2] / name for name in ("fault", "support"))
INSTALLED = "0.32.0"
FAILS_REQUESTS = (0, 30, 0)
"""From here on a server can be told that the load of a whole request failed."""
MIDDLE = [version for version in sources.VERSIONS[1:-1] if version != INSTALLED]

pytestmark = [pytest.mark.vllm, needs_vllm]


def drive(folder: Path, *python_path: str) -> dict[str, object]:
    path = os.pathsep.join([*python_path, str(FAULT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(DRIVE), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(said, dict)
    return said


def check(said: dict[str, object], version: str) -> None:
    assert str(said["version"]).startswith(version)
    assert said["abstract"] == []
    assert said["signatures"] == []
    assert said["stored"] == [0, 0, 0]
    assert said["loaded"] == [16, 16, 16]
    good, failed = said["damaged"]  # type: ignore[misc]
    assert failed > 0
    assert good == 0
    assert said["preempted"] > 0  # type: ignore[operator]
    assert said["aborted"] is True
    assert {"rewarm_kv_lookup_tokens_total", "rewarm_kv_load_seconds_bucket"} <= set(said["metrics"])  # type: ignore[call-overload]
    assert "allow_untested" in str(said["refused"])
    if tuple(map(int, version.split("."))) >= FAILS_REQUESTS:
        assert said["all slide"] == said["some slide"] == [16, 0]
    else:
        for name, hint in (("all slide", "use vLLM 0.30"), ("some slide", "--disable-hybrid-kv-cache-manager")):
            (refusal,) = said[name]  # type: ignore[misc]
            assert "cannot be told that a request of theirs failed" in str(refusal)
            assert hint in str(refusal)
    assert said["events"] == {"stored_blocks": 16, "differ": [], "removed": True}


def test_the_installed_release(tmp_path: Path) -> None:
    check(drive(tmp_path), INSTALLED)


def published(version: str) -> str:
    try:
        return str(sources.ensure(version))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"vLLM {version} cannot be fetched here: {error}")


@pytest.mark.parametrize("version", [sources.VERSIONS[0], sources.VERSIONS[-1]])
def test_the_oldest_and_the_newest_release(version: str, tmp_path: Path) -> None:
    check(drive(tmp_path, published(version)), version)


@pytest.mark.deep
@pytest.mark.network
@pytest.mark.parametrize("version", MIDDLE)
def test_the_releases_between(version: str, tmp_path: Path) -> None:
    check(drive(tmp_path, published(version)), version)
