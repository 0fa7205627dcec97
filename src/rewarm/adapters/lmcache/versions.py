"""Which LMCache versions these seats know, and all that differs between them.

The interface of L2 adapters grew from 0.4.6 to 0.5.6 by arguments that tell more of a lookup (the seats take any), by
events that the base class sends, and by a module that changed its name. The storage plug-in's did not change at all.
"""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from typing import Any

from rewarm.errors import AdapterError

KNOWN = ((0, 4, 6), (0, 5, 6))
"""Oldest and newest version tried."""
_BITMAP_MODULES = ("lmcache.lmcache_native", "lmcache.native_storage_ops")
"""Since 0.5.4, and before."""
_RELEASE = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(.*)")


def check_version(text: str, *, allow_untested: bool, line: str) -> None:
    """Refuse an LMCache that the seats were never tried with.

    Args:
        text: What it calls its version.
        allow_untested: The user asked for it all the same.
        line: The line of this seat's configuration that asks for it.
    Raises:
        AdapterError: It is older or newer than KNOWN, or has no version, and was not allowed.
    """
    if allow_untested:
        return
    match = _RELEASE.fullmatch(text)
    oldest, newest = (".".join(map(str, version)) for version in KNOWN)
    hint = f"install lmcache=={newest}, or start it all the same with {line}"
    if match is None:
        raise AdapterError(f"LMCache calls its version {text!r}, which Rewarm was not tried with", hint=hint)
    version = tuple(map(int, match.groups()[:3]))
    if not KNOWN[0] <= version <= KNOWN[1]:
        age = "older" if version < KNOWN[0] else "newer"
        raise AdapterError(f"LMCache {text} is {age} than what Rewarm was tried with ({oldest} to {newest})", hint=hint)


def installed_version() -> str:
    """What the installed LMCache calls its version."""
    import lmcache

    return str(lmcache.__version__)


def bitmap_class() -> Any:
    """LMCache's Bitmap, wherever this version has it.

    Raises:
        AdapterError: It is nowhere.
    """
    for name in _BITMAP_MODULES:
        with suppress(ImportError, AttributeError):
            return importlib.import_module(name).Bitmap
    raise AdapterError(
        "this LMCache was installed without its native code (no Bitmap)",
        hint="reinstall lmcache from a wheel, or build it with its native code",
    )
