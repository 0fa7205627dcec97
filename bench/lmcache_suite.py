"""LMCache's own tests of L2 adapters, run from its source with Rewarm's seat in place of its mock and its fs adapter.

    pip download --no-deps --no-binary lmcache lmcache==0.5.6; tar xf lmcache-0.5.6.tar.gz
    python bench/lmcache_suite.py lmcache-0.5.6 --output bench/results/lmcache-suite.json

Needs that LMCache installed, with what its tests import. Nothing of its source is copied: this file is the script and,
inside the pytest that it starts, the plug-in that swaps the classes. What is left out, and why, stands in LEFT_OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

FILES = (
    "test_mock_l2_adapter.py",
    "test_fs_l2_adapter_delete.py",
    "test_cache_salt_l2_eviction.py",
    "test_store_controller.py",
    "test_prefetch_controller.py",
    "test_distributed_storage_manager.py",
    "test_runtime_adapters.py",
    "test_l1_l2_state_metrics.py",
    "test_fault_inject_l2_adapter.py",
    "test_multimodel.py",
    "test_report_status.py",
    "serde/test_serde_e2e.py",
    "serde/test_serde_fs_e2e.py",
)
LEFT_OUT = {
    "TestBandwidthSimulation": "asks the mock for a bandwidth that it makes up",
    "TestFp8SerdeFsRoundTrip": "counts the fs adapter's own files",
}
TIMEOUT_S = 1500


def pytest_configure(config: Any) -> None:
    """In pytest: put the seat where LMCache's tests take their adapters from."""
    import lmcache
    from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, mock_l2_adapter

    from rewarm.adapters.lmcache import RewarmL2
    from rewarm.volume import create_volume

    class Plugged(RewarmL2):
        """The seat, made from the configuration of the adapter that it stands in for."""

        def __init__(self, config: Any) -> None:
            base = getattr(config, "base_path", None)
            self._own = None if base else tempfile.mkdtemp(prefix="rewarm-suite-")
            root = os.path.join(base or self._own, "volume")
            if not os.path.exists(root):
                create_volume([root], capacity_bytes=1 << 30)
            super().__init__({"roots": [root], "weights": dict.fromkeys(MODELS, "label:suite")})
            if not base:
                self._max_capacity_bytes = int(config.max_size_gb * (1 << 30))

        def debug_get_stored_object_count(self) -> int:
            return len(self._sizes)

        def debug_get_locked_key_count(self) -> int:
            return 0

        def debug_has_key(self, key: Any) -> bool:
            return key in self._sizes

        def close(self) -> None:
            super().close()
            if self._own:
                shutil.rmtree(self._own, ignore_errors=True)

    mock_l2_adapter.MockL2Adapter = Plugged
    fs_l2_adapter.FSL2Adapter = Plugged
    if not lmcache.torch_dev.is_available():  # its tests are then left out, though they use no more than host memory
        config.stash[_HIDDEN] = lmcache.torch_dev.is_available
        lmcache.torch_dev.is_available = lambda: True


def pytest_collection_finish(session: Any) -> None:
    """In pytest: LMCache itself is told the truth about its device."""
    if _HIDDEN in session.config.stash:
        import lmcache

        lmcache.torch_dev.is_available = session.config.stash[_HIDDEN]


_HIDDEN: pytest.StashKey[Any] = pytest.StashKey()
MODELS = ("test_model", "llama", "model", "m", "test-model")


def main() -> int:
    """Run the files that this version has; print and write what passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="LMCache's source, unpacked")
    parser.add_argument("--output", type=Path, help="a JSON file to add this version's result to")
    parser.add_argument("--file", action="append", help="only these files")
    asked = parser.parse_args()
    import lmcache

    with tempfile.TemporaryDirectory() as scratch:
        # Beside its source pytest would import that in place of the LMCache that is installed.
        tests = Path(shutil.copytree(asked.source / "tests", Path(scratch) / "tests")) / "v1" / "distributed"
        files = [name for name in asked.file or FILES if (tests / name).exists()]
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "lmcache_suite", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-k", " and ".join(f"not {name}" for name in LEFT_OUT)]
        command += [str(tests / name) for name in files]
        path = os.pathsep.join([str(Path(__file__).parent.absolute()), *map(os.path.abspath, sys.path[1:])])
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"},
            cwd=scratch,
            timeout=TIMEOUT_S,
            check=False,
        )
        result = counts(report.read_text(encoding="utf-8"))
    result["files"] = files
    print(json.dumps(result, indent=2))
    if asked.output:
        whole = json.loads(asked.output.read_text(encoding="utf-8")) if asked.output.exists() else {}
        whole[lmcache.__version__] = result
        asked.output.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return int(bool(result["failed"]))


def counts(xml: str) -> dict[str, Any]:
    """What a JUnit report says: numbers, and the name and reason of all that did not pass."""
    passed, skipped, failed = 0, {}, {}
    root = ET.fromstring(xml)  # noqa: S314 - our own pytest wrote it
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            failed[name] = (bad.get("message") or "").splitlines()[0][:200] if bad.get("message") else "?"
        elif skip is not None:
            skipped[name] = (skip.get("message") or "")[:200]
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped, "left_out": LEFT_OUT}


if __name__ == "__main__":
    sys.exit(main())
