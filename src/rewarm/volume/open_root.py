"""One root as an open volume sees it: where it is, how it does, what this process did there."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from rewarm.errors import StorageError
from rewarm.volume.health import RootHealth
from rewarm.volume.layout import RootFile, RootPaths
from rewarm.volume.session import Session
from rewarm.volume.usage import UsageFile
from rewarm.volume.wear import WearFile


@dataclass(slots=True)
class Root:
    """Shared by the threads of one process."""

    paths: RootPaths
    file: RootFile
    session: Session | None
    """None: this process only reads, and leaves no trace."""
    usage: UsageFile
    wear: WearFile
    health: RootHealth = field(default_factory=RootHealth)
    is_member: bool = True
    """False: it was removed from the volume, and only keeps its number."""
    is_away: bool = False
    """Its directory is no longer the root that was opened, when somebody last looked: it was unmounted, or moved."""
    identity: tuple[int, int] = (0, 0)
    """Device and inode of the volume file: an unmounted root leaves an empty directory that must not be written to."""

    @property
    def name(self) -> str:
        """Its directory."""
        return self.paths.root

    def is_mounted(self) -> bool:
        """Whether the directory is still the root that was opened. Asks the file system."""
        try:
            return file_identity(self.paths.volume_file) == self.identity
        except OSError:
            return False


def file_identity(path: str) -> tuple[int, int]:
    """(device, inode) of a regular file.

    Raises:
        OSError: It is not there.
        StorageError: It is something else.
    """
    found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"{path} is not a regular file", path=path)
    return found.st_dev, found.st_ino


def device_bytes(root: str) -> int:
    """Size of the file system that a root lies on, which stands for that of its device.

    Raises:
        OSError: It does not answer.
    """
    numbers = os.statvfs(root)
    return max(1, numbers.f_blocks * numbers.f_frsize)
