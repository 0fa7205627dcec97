from __future__ import annotations

import os
from pathlib import Path

import pytest

from rewarm.platform import directory, host
from rewarm.platform.findings import Finding, Verdict, worst
from rewarm.volume import create_volume


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_worst_is_the_worst() -> None:
    findings = [Finding(verdict, "a", "b") for verdict in (Verdict.OK, Verdict.WARN, Verdict.INFO)]
    assert worst(findings) is Verdict.WARN
    assert worst([*findings, Finding(Verdict.FAIL, "a", "b")]) is Verdict.FAIL
    assert worst([]) is Verdict.OK


def test_an_empty_private_directory_is_fine_and_stays_empty(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    findings = by_name(directory.check_directory(str(tmp_path)))
    assert findings["directory.private"].verdict is Verdict.OK
    assert findings["directory.content"].found == "empty"
    assert findings["directory.writable"].verdict is Verdict.OK
    assert findings["directory.o_direct"].verdict in {Verdict.OK, Verdict.WARN}
    assert findings["directory.filesystem"].verdict is not Verdict.UNKNOWN
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_read_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    finding = by_name(directory.check_directory(str(tmp_path)))["directory.private"]
    assert (finding.verdict, finding.expected) == (Verdict.WARN, f"mode 0700, user {os.geteuid()}")
    assert finding.hint


def test_a_foreign_directory_is_a_warning_and_a_root_is_not(tmp_path: Path) -> None:
    (tmp_path / "photo").touch()
    assert by_name(directory.check_directory(str(tmp_path)))["directory.content"].verdict is Verdict.WARN
    create_volume([str(tmp_path / "root")], capacity_bytes=1 << 20)
    assert by_name(directory.check_directory(str(tmp_path / "root")))["directory.content"].found == "a volume's root"


def test_a_root_that_cannot_be_opened_fails(tmp_path: Path) -> None:
    (tmp_path / "rewarm.volume").touch()
    finding = by_name(directory.check_directory(str(tmp_path)))["directory.content"]
    assert (finding.verdict, "is not JSON" in finding.found) == (Verdict.FAIL, True)
    assert finding.hint


def test_a_missing_directory_and_a_file_fail(tmp_path: Path) -> None:
    (missing,) = directory.check_directory(str(tmp_path / "none"))
    assert (missing.verdict, missing.found) == (Verdict.FAIL, "No such file or directory")
    assert "mkdir" in missing.hint
    (tmp_path / "file").touch()
    (finding,) = directory.check_directory(str(tmp_path / "file"))
    assert (finding.verdict, finding.found) == (Verdict.FAIL, "not a directory")


def test_a_file_system_without_nameless_files_or_space_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    finding = by_name(directory.check_directory(str(tmp_path)))["directory.writable"]
    assert (finding.verdict, finding.found) == (Verdict.FAIL, "No space left on device")


def test_memory_is_no_flash() -> None:
    finding = by_name(directory.check_directory("/dev/shm"))["directory.filesystem"]
    assert finding.verdict is Verdict.WARN
    assert finding.found.startswith("tmpfs")


def test_the_host_answers_every_check() -> None:
    findings = by_name(host.check_host())
    assert findings["python.version"].verdict is Verdict.OK
    assert {"engine.io_uring", "engine.threads", "engine.pure"} <= set(findings)
    assert findings["engine.pure"].verdict is Verdict.OK
    assert {"vllm.version", "shm.size", "limits.open_files", "limits.locked_memory"} <= set(findings)


def test_only_the_pure_engine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"io_uring": "no library", "threads": "no library", "pure": ""}
    monkeypatch.setattr(host, "probe_engines", lambda: missing)
    findings = by_name(host.check_host())
    assert findings["engine.threads"].verdict is Verdict.WARN
    assert findings["engine.threads"].found == "no library"
    monkeypatch.setattr(host, "probe_engines", lambda: {**missing, "threads": ""})
    assert by_name(host.check_host())["engine.io_uring"].verdict is Verdict.INFO


def test_a_small_shm_and_few_files_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHM_BYTES", 1 << 62)
    monkeypatch.setattr(host.resource, "getrlimit", lambda _which: (1024, 2048))
    findings = by_name(host.check_host())
    assert findings["shm.size"].verdict is Verdict.WARN
    assert findings["limits.open_files"].found == "1024 (may be raised to 2048)"
    assert findings["limits.open_files"].verdict is Verdict.WARN
