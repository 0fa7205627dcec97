"""LMCache's own tests of L2 adapters, run from its source with Rewarm's seat in place of its mock and its fs adapter.

    pip download --no-deps --no-binary lmcache lmcache==0.5.6; tar xf lmcache-0.5.6.tar.gz
    python bench/lmcache_suite.py lmcache-0.5.6 --output bench/results/lmcache-suite.json

Needs that LMCache installed, with what its tests import; lmcache_plugged.py swaps the classes in the pytest that this
script starts. What is left out, and why, stands in LEFT_OUT.
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
    "test_report_status_shape_with_l2": "asks for the mock's own name",
}
TIMEOUT_S = 1500


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
        command = [sys.executable, "-m", "pytest", "-q", "-p", "lmcache_plugged", "-p", "no:cacheprovider"]
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
