"""A thread that dies with its process when it asks the kernel about a file: proof that a look-up does no I/O.

A seccomp filter on the calling thread alone ends the process (SIGSYS) at any system call that names, opens, reads or
lists a file, whoever makes it: Python, the C library or a native one. No privilege is needed.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from rewarm.errors import UnsupportedError

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_KILL_PROCESS = 0x80000000
_ALLOW = 0x7FFF0000
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_OFFSET_NR, _OFFSET_ARCH = 0, 4

# (AUDIT_ARCH_*, system call numbers), from the kernel's tables: stat, fstat, lstat, newfstatat, statx, access,
# faccessat, faccessat2, open, openat, openat2, read, pread64, readv, preadv, getdents64, readlinkat, io_uring_enter.
_ARCHES = {
    "x86_64": (
        0xC000003E,
        (4, 5, 6, 262, 332, 21, 269, 439, 2, 257, 437, 0, 17, 19, 295, 217, 267, 426),
    ),
    "aarch64": (0xC00000B7, (79, 80, 291, 48, 439, 56, 437, 63, 67, 65, 69, 61, 78, 426)),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def forbid_file_calls() -> None:
    """Install the filter on the calling thread; there is no way back.

    Raises:
        UnsupportedError: This processor is not in the table, or the kernel or container refuses the filter.
    """
    known = _ARCHES.get(platform.machine())
    if known is None:
        raise UnsupportedError(f"no table of system calls for {platform.machine()}")
    code = _assemble(*known)
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    )
    if refused:
        raise UnsupportedError(f"seccomp filter refused: {errno.errorcode.get(ctypes.get_errno(), '?')}")


def _assemble(arch: int, forbidden: tuple[int, ...]) -> bytes:
    """BPF: another architecture is let through, a forbidden number kills, the rest is let through."""
    count = len(forbidden)
    program = [
        (_LOAD_WORD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 0, count + 1, arch),
        (_LOAD_WORD, 0, 0, _OFFSET_NR),
        *((_JUMP_EQUAL, count - position, 0, number) for position, number in enumerate(forbidden)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
