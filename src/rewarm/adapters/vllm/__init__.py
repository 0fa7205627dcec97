"""The seat in vLLM: a KV connector, loaded by ``kv_connector_module_path``.

Importing this package imports neither vLLM nor torch; asking it for ``RewarmConnector``, as vLLM's factory does, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewarm.adapters.vllm.connector import RewarmConnector

__all__ = ["RewarmConnector"]


def __getattr__(name: str) -> Any:
    if name == "RewarmConnector":
        from rewarm.adapters.vllm.connector import RewarmConnector

        return RewarmConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
