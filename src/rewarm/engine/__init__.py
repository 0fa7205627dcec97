"""Moves bytes between files and host memory: batches, pieces, deadlines, priorities; the promise is engine/base.py."""

from __future__ import annotations

import dataclasses
import functools
import logging

from rewarm.engine import native
from rewarm.engine.base import Engine, EngineConfig
from rewarm.engine.memory import AlignedBuffer, alloc_aligned
from rewarm.engine.pure import PureEngine
from rewarm.errors import UsageError

__all__ = ["AlignedBuffer", "Engine", "EngineConfig", "alloc_aligned", "open_engine", "probe_engines"]

_log = logging.getLogger(__name__)

ENGINE_KINDS = ("io_uring", "threads", "pure")
"""Best first: the order in which ``auto`` tries them."""


def probe_engines() -> dict[str, str]:
    """Kind -> "" where this machine has it, else why it is missing."""
    return {**{kind: native.missing(kind) for kind in ENGINE_KINDS[:-1]}, "pure": ""}


def open_engine(config: EngineConfig | None = None) -> Engine:
    """Make the engine that ``config.kind`` names; ``auto`` takes the best one that this machine has, and says which.

    Raises:
        UsageError: An unknown kind, or sizes that contradict each other.
        UnsupportedError: The kind was asked for by name and is missing here.
    """
    config = config or EngineConfig()
    if config.kind not in {"auto", *ENGINE_KINDS}:
        raise UsageError(f"there is no engine {config.kind!r}", hint=f"one of: auto {' '.join(ENGINE_KINDS)}")
    if config.kind == "auto":
        config = dataclasses.replace(config, kind=_best_kind())
    return PureEngine(config) if config.kind == "pure" else native.NativeEngine(config)


@functools.cache
def _best_kind() -> str:
    """Says once what ``auto`` means here."""
    reasons = probe_engines()
    best = next(kind for kind in ENGINE_KINDS if not reasons[kind])
    missing = "; ".join(f"no {kind}: {reasons[kind]}" for kind in ENGINE_KINDS if reasons[kind])
    _log.info("I/O engine: %s%s", best, f" ({missing})" if missing else "")
    return best
