"""One small trial on real vLLM servers, by the command that a user types."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from leftovers import Leftovers

from rewarm.cli.common import run
from rewarm.cli.main import cli

pytestmark = [pytest.mark.server, pytest.mark.deep]

PLAN = """
[load]
context_tokens = 1024
pairs = 3
noise_pairs = 3
[baseline]
throttle = 0.66
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's CPU build")
def test_every_token_is_right_and_every_proof_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leftovers = Leftovers()
    (tmp_path / "plan.toml").write_text(PLAN)
    out = tmp_path / "out"
    code = run(cli, ["trial", "run", str(tmp_path / "plan.toml"), "--out", str(out), "--root", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["verdict"] == "pass" else 1)
    gates = {gate["name"]: gate for gate in result["gates"]}
    assert (gates["tokens"]["outcome"], gates["cold"]["outcome"]) == ("pass", "pass"), result["proofs"]
    assert all(gates[name]["pairs"] == 3 for name in ("recovery", "peer", "g3_ttft", "g3_throughput"))
    assert result["arms"]["fs_limited"]["limit_bytes_s"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plan.toml"]
    assert run(cli, ["trial", "verify", str(out)]) == 0
    assert leftovers.left() == []
