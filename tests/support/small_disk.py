"""A small ext4 file system of its own in a file: it can really be full, turn read-only, answer with EIO and go away."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


class SmallDisk:
    """Mounted below a folder; ``close`` unmounts it whatever befell it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.root = folder / "disk"
        self._filler = self.root / "filler"
        image = folder / "disk.img"
        self.root.mkdir()
        with image.open("wb") as file:
            file.truncate(num_bytes)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(self.root))
        shutil.rmtree(self.root / "lost+found")
        self.root.chmod(0o700)

    @staticmethod
    def missing(folder: Path) -> str:
        """Why there can be none here; empty where there can."""
        if not shutil.which("mkfs.ext4"):
            return "no mkfs.ext4 on PATH"
        folder.mkdir()
        try:
            SmallDisk(folder, 16 << 20).close()
        except OSError as error:
            return f"a file cannot be mounted here, which takes root and a loop device: {error}"
        finally:
            shutil.rmtree(folder)
        return ""

    def fill(self) -> None:
        """Take all the room that is left, and again when it is called again."""
        with self._filler.open("ab") as file:
            for step in (1 << 20, 1 << 16, 4096):
                while _has_room(file.fileno(), file.seek(0, os.SEEK_END), step):
                    pass

    def make_read_only(self) -> None:
        """As ext4 does it itself when its journal fails: files that are open for writing do not keep it from that."""
        _run("mount", "-o", "remount,abort", str(self.root))

    def fail(self) -> None:
        """From here on every read and write is EIO."""
        fd = os.open(self.root, os.O_RDONLY)
        fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        os.close(fd)

    def remove(self) -> None:
        """The directory is empty from here on, as where a drive was pulled and unmounted."""
        _run("umount", "--lazy", str(self.root))

    def error_of_a_write(self) -> int:
        """What whoever stores there is told; 0: nothing."""
        probe = self.root / "probe"
        try:
            with probe.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 4096)
        except OSError as error:
            return error.errno or 0
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
        return 0

    def close(self) -> None:
        """Unmount it."""
        if self.root.is_mount():
            self.remove()


def _has_room(fd: int, offset: int, num_bytes: int) -> bool:
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
