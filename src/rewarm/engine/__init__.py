"""Moves bytes between files and host memory: batches, pieces, deadlines, priorities; the promise is engine/base.py."""

from __future__ import annotations

from rewarm.engine.base import Engine, EngineConfig
from rewarm.engine.memory import AlignedBuffer, alloc_aligned
from rewarm.errors import UnsupportedError, UsageError

__all__ = ["AlignedBuffer", "Engine", "EngineConfig", "alloc_aligned", "open_engine", "probe_engines"]

ENGINE_KINDS = ("io_uring", "threads", "pure")
"""Best first: the order in which ``auto`` tries them."""


def probe_engines() -> dict[str, str]:
    """Kind -> "" where this machine has it, else why it is missing."""
    return {"io_uring": "not built yet", "threads": "not built yet", "pure": ""}


def open_engine(config: EngineConfig | None = None) -> Engine:
    """Make the engine that ``config.kind`` names; ``auto`` takes the best one that this machine has, and says which.

    Raises:
        UsageError: An unknown kind, or sizes that contradict each other.
        UnsupportedError: The kind was asked for by name and is missing here.
    """
    from rewarm.engine.pure import PureEngine

    config = config or EngineConfig()
    if config.kind not in {"auto", *ENGINE_KINDS}:
        raise UsageError(f"there is no engine {config.kind!r}", hint=f"one of: auto {' '.join(ENGINE_KINDS)}")
    if config.kind not in {"auto", "pure"}:
        raise UnsupportedError(f"engine {config.kind} is missing here: {probe_engines()[config.kind]}")
    return PureEngine(config)
