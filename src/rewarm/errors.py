"""The one tree of errors that Rewarm raises on purpose.

::

    RewarmError                     exit code
    ├── UsageError                  2   an argument, option or configuration value is wrong
    ├── UnsupportedError            3   this machine, platform or version cannot do what was asked
    │   ├── FormatVersionError      3   a file of a format version that this release does not read
    │   └── AdapterError            3   a foreign package of a version that the adapter does not know
    ├── StorageError                4   the storage refused: I/O error, permission, missing directory
    │   ├── VolumeFull              4
    │   └── VolumeClosed            4
    ├── DamageError                 5   bytes do not match their checksum or their name
    └── BusyError                   6   somebody else holds what was asked for

Every error carries one line of text, and most a hint: the next step that the reader can take. A damaged or unreadable
KV record never raises: it is a MISS and a counter. Weights and checkpoints raise DamageError for the same damage.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What every ``rewarm`` command exits with; a signal N ends it with 128 + N."""

    DONE = 0
    ANSWER_IS_NO = 1
    USAGE = 2
    CANNOT = 3
    IO = 4
    DAMAGE = 5
    BUSY = 6
    BUG = 10


_HEAD, _TAIL = 400, 150
"""Characters that are left of a text that is far too long: what a value of a megabyte stood in is still told."""


def shortened(text: str) -> str:
    """A text as a person can read it: the middle of a very long one, which is a value that it repeats, is left out."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


class RewarmError(Exception):
    """Root of the tree.

    Args:
        message: One line, without a full stop at its end; cut where it is far too long.
        hint: What to do next, one line; shown as ``hint: ...``.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(shortened(message))
        self.message = shortened(message)
        self.hint = shortened(hint)


class UsageError(RewarmError):
    """An argument, option or configuration value is wrong."""

    exit_code = ExitCode.USAGE


class UnsupportedError(RewarmError):
    """This machine, platform or version cannot do what was asked for by name."""

    exit_code = ExitCode.CANNOT


class FormatVersionError(UnsupportedError):
    """A file of a format version that this release does not read."""

    def __init__(self, path: str, *, found: int, known: int) -> None:
        super().__init__(
            f"{path} has format version {found}; this release reads up to {known}",
            hint="use the newer Rewarm that wrote it, or create another volume",
        )
        self.path = path
        self.found = found
        self.known = known


class AdapterError(UnsupportedError):
    """A foreign package of a version that the adapter does not know."""


class StorageError(RewarmError):
    """The storage refused: an I/O error, a permission, a missing directory."""

    exit_code = ExitCode.IO

    def __init__(self, message: str, *, path: str = "", errno: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.errno = errno


class VolumeFull(StorageError):
    """The volume or the file system below it has no room for what was asked."""

    def __init__(self, path: str, *, need_bytes: int, free_bytes: int, hint: str = "") -> None:
        from rewarm.units import format_size  # imports this module

        need, free = format_size(need_bytes), format_size(free_bytes)
        if need == free:
            need, free = f"{need} ({need_bytes} bytes)", f"{free} ({free_bytes} bytes)"
        super().__init__(
            f"{path} has {free} free, {need} are needed",
            path=path,
            hint=hint or f"give it more room, or: rewarm volume evict {path} --until 10%",
        )
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class VolumeClosed(StorageError):
    """The volume was closed before the call."""


class DamageError(RewarmError):
    """Bytes do not match their checksum or their name; nothing was served from them."""

    exit_code = ExitCode.DAMAGE


class BusyError(RewarmError):
    """Somebody else holds what was asked for."""

    exit_code = ExitCode.BUSY
