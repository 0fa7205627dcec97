"""A root that hangs: the server goes on answering, with right bytes, and uses the root again when it answers again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faultshim
import pytest

from rewarm.engine import probe_engines

pytest.importorskip("vllm", reason="needs vLLM's scheduler and connector classes")

MISSING = faultshim.missing() or probe_engines()["threads"]
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
PROGRAM = Path(__file__).with_name("run.py")


def hang(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A root that hangs for as long as 20 requests take."""
    command = [sys.executable, str(PROGRAM), "--hang", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_requests_are_answered_while_the_root_hangs() -> None:
    done = hang()
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["answered"] >= 20
    assert report["operations_hung_at_the_end"] > 0
    assert report["loads_given_up"] > 0


def test_a_scheduler_that_looks_at_the_root_itself_is_seen() -> None:
    done = hang("--broken", "scheduler")
    assert done.returncode != 0
    assert "in looks_first" in done.stderr
