"""Checks of a directory that is to hold a volume's root. Nothing that is there is changed; a probe file has no name."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
from pathlib import Path

from rewarm.errors import RewarmError
from rewarm.platform.findings import Finding, Verdict
from rewarm.units import GIB, format_size
from rewarm.volume.layout import read_root_file

FREE_BYTES = 10 * GIB
"""Less holds no more than a context or two of a large model."""
ON_MEMORY = {"tmpfs", "ramfs"}
LAYERED = {"overlay", "aufs"}
PAGE_BYTES = 4096


def check_directory(path: str) -> list[Finding]:
    """All checks of one directory; those that make no sense after a failure are left out."""
    try:
        mode = os.stat(path)
    except OSError as error:
        hint = f"mkdir -m 700 {path}" if error.errno == errno.ENOENT else ""
        return [
            Finding(
                Verdict.FAIL, "directory.exists", error.strerror or "", expected="a directory", subject=path, hint=hint
            )
        ]
    if not stat.S_ISDIR(mode.st_mode):
        return [Finding(Verdict.FAIL, "directory.exists", "not a directory", expected="a directory", subject=path)]
    return [
        _private(path, mode),
        _content(path),
        _free(path),
        _filesystem(path),
        *_writes(path),
    ]


def _private(path: str, mode: os.stat_result) -> Finding:
    bits = stat.S_IMODE(mode.st_mode)
    private = not bits & 0o077 and mode.st_uid == os.geteuid()
    return Finding(
        Verdict.OK if private else Verdict.WARN,
        "directory.private",
        f"mode {bits:04o}, user {mode.st_uid}",
        expected=f"mode 0700, user {os.geteuid()}",
        subject=path,
        source="stat",
        hint=""
        if private
        else "others can read prompts back out of stored KV: chmod 700, or a directory of the server's own",
    )


def _content(path: str) -> Finding:
    try:
        names = os.listdir(path)
    except OSError as error:
        return Finding(Verdict.UNKNOWN, "directory.content", error.strerror or "", subject=path, source="listdir")
    if "rewarm.volume" in names:
        found, verdict, hint = "a volume's root", Verdict.OK, ""
        try:
            read_root_file(path)
        except RewarmError as error:
            found, verdict, hint = error.message, Verdict.FAIL, error.hint
    elif not names or names == ["lost+found"]:
        found, verdict, hint = "empty", Verdict.OK, ""
    else:
        found, verdict = f"{len(names)} other entries", Verdict.WARN
        hint = "a volume is made in an empty directory only: give it one of its own"
    return Finding(
        verdict,
        "directory.content",
        found,
        expected="empty, or a volume's root",
        subject=path,
        source="listdir",
        hint=hint,
    )


def _free(path: str) -> Finding:
    numbers = os.statvfs(path)
    free, total = numbers.f_bavail * numbers.f_frsize, numbers.f_blocks * numbers.f_frsize
    return Finding(
        Verdict.OK if free >= FREE_BYTES else Verdict.WARN,
        "directory.free",
        f"{format_size(free)} of {format_size(total)}",
        expected=f"at least {format_size(FREE_BYTES)}",
        subject=path,
        source="statvfs",
        hint="" if free >= FREE_BYTES else "long contexts weigh gigabytes: take a larger file system",
    )


def _filesystem(path: str) -> Finding:
    kind, options = _mount_of(path)
    verdict, hint = Verdict.OK, ""
    if not kind:
        verdict = Verdict.UNKNOWN
    elif kind in ON_MEMORY:
        verdict, hint = Verdict.WARN, "this is memory, not flash: it is gone after a reboot"
    elif kind in LAYERED:
        verdict, hint = Verdict.WARN, "this is a container's own layer: mount a directory of the host instead"
    return Finding(
        verdict,
        "directory.filesystem",
        f"{kind}, {options}" if kind else "not found",
        expected="a file system on flash",
        subject=path,
        source="/proc/self/mountinfo",
        hint=hint,
    )


def _mount_of(path: str) -> tuple[str, str]:
    """(file system, mount options) below a directory; empty where /proc does not tell."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path)
    best = ("", "", "")
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ("", "")
    for line in lines:
        left, _, right = line.partition(" - ")
        words, kind = left.split(), right.split()[0]
        mount = words[4].encode().decode("unicode_escape")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        same_device = words[2] == wanted or kind in LAYERED | {"btrfs"}
        if inside and same_device and len(mount) >= len(best[0]):
            best = (mount, kind, words[5])
    return best[1:]


def _writes(path: str) -> list[Finding]:
    """Whether a file can be made, written and read back, through the page cache and past it."""
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file, mmap.mmap(-1, PAGE_BYTES) as page:
            page[:] = b"\xa5" * PAGE_BYTES  # anonymous memory is aligned to a page, as O_DIRECT wants it
            os.pwrite(file.fileno(), page, 0)
            os.fsync(file.fileno())
            direct = _direct_io(path, file.fileno(), page)
    except OSError as error:
        return [
            Finding(
                Verdict.FAIL,
                "directory.writable",
                error.strerror or "",
                expected="yes",
                subject=path,
                source="a file without a name",
                hint="give it to the server's user" if error.errno in {errno.EACCES, errno.EPERM} else "",
            )
        ]
    source = "a file without a name, fsynced"
    return [Finding(Verdict.OK, "directory.writable", "yes", expected="yes", subject=path, source=source), direct]


def _direct_io(path: str, descriptor: int, page: mmap.mmap) -> Finding:
    wanted = page[:]
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT)
        try:
            os.pwrite(direct, page, 0)
            page[:] = bytes(PAGE_BYTES)
            os.preadv(direct, [page], 0)
        finally:
            os.close(direct)
        same = page[:] == wanted
        found, verdict, hint = ("works", Verdict.OK, "") if same else ("reads back other bytes", Verdict.FAIL, "")
    except OSError as error:
        found, verdict = error.strerror or "", Verdict.WARN
        hint = "reads go through the page cache: slower, and they push other data out"
    source = "open O_DIRECT, pwrite, preadv"
    return Finding(verdict, "directory.o_direct", found, expected="works", subject=path, source=source, hint=hint)
