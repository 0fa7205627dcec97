"""Files that a person names: read whole, and only as much as may be in one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rewarm.errors import StorageError, UsageError
from rewarm.units import MIB, format_size

SHOWN = 40
"""Characters of a value that an error repeats."""


def shown(value: object) -> str:
    """A value as an error repeats it: quoted where it is text, on one line, and cut where it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}..."
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def read_input(path: str, limit_bytes: int = 256 * MIB) -> bytes:
    """The whole of a file; a link is followed.

    Raises:
        StorageError: It cannot be read.
        UsageError: It is no regular file, or longer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UsageError(f"{path} is not a regular file", hint="name a file with the contents themselves")
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(limit_bytes + 1)
    except ValueError:  # a null character
        raise UsageError(f"{shown(path)} is no path", hint="name a file") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error
    if len(content) > limit_bytes:
        raise UsageError(
            f"{path} has more than {format_size(limit_bytes)}", hint=f"is {Path(path).name} the file that was meant?"
        )
    return content
