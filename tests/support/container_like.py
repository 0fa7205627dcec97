"""Run a command as a container runtime would: small /dev/shm, no io_uring, 64 KiB of locked memory, its own processes.

    unshare --user --map-root-user --mount --pid --fork python tests/support/container_like.py COMMAND...

What the default profiles of Docker and containerd do to io_uring, a seccomp filter of five instructions does here: its
three system calls answer EPERM.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import subprocess
import sys

SHM_BYTES = 64 << 20
LOCKED_BYTES = 64 << 10
IO_URING_SETUP, IO_URING_REGISTER = 425, 427  # the same on every architecture

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_WORD, JUMP_GE, JUMP_GT, RETURN = 0x20, 0x35, 0x25, 0x06
ALLOW, REFUSE_EPERM = 0x7FFF0000, 0x00050000 | 1


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_io_uring() -> None:
    instructions = (
        (LOAD_WORD, 0, 0, 0),  # the number of the system call
        (JUMP_GE, 0, 2, IO_URING_SETUP),
        (JUMP_GT, 1, 0, IO_URING_REGISTER),
        (RETURN, 0, 0, REFUSE_EPERM),
        (RETURN, 0, 0, ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    program = Program(len(instructions), code)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"prctl{arguments[:2]}")


def main() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "tmpfs", "/dev/shm"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED_BYTES, LOCKED_BYTES))
    refuse_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
