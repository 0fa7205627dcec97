"""Helpers are plain modules: servers in tests/support, the miniature server and the fault shim in tests/fault."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "fault"), str(Path(__file__).parent / "vllm")]
