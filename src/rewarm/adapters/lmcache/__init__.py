"""The seats in LMCache: an L2 adapter of its multi-process server, and a storage plug-in of its in-process engine.

Importing this package imports neither LMCache nor torch; asking it for a seat's class, as LMCache's loaders do, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewarm.adapters.lmcache.backend import RewarmBackend
    from rewarm.adapters.lmcache.l2 import RewarmL2

__all__ = ["RewarmBackend", "RewarmL2"]


def __getattr__(name: str) -> Any:
    if name == "RewarmL2":
        from rewarm.adapters.lmcache.l2 import RewarmL2

        return RewarmL2
    if name == "RewarmBackend":
        from rewarm.adapters.lmcache.backend import RewarmBackend

        return RewarmBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
