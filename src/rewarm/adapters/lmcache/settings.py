"""What a user says in LMCache's configuration, read and checked before the first request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from rewarm.config import KvConfig, resolve
from rewarm.errors import UsageError
from rewarm.inputs import shown
from rewarm.kv.fingerprint import Fingerprint, weights_fingerprint

LABEL = "label:"
"""Of a weights entry that names the contents instead of a place where they lie."""
_NOT_OURS = {
    "policy": ("always_load", "never"),
    "store": ("always",),
    "store_min_tokens": (KvConfig().store_min_tokens,),
    "store_buffer_bytes": (0,),
    "host_bytes": (0,),
}
"""What LMCache decides itself: only these values are true here."""


class Weights(dict[str, Fingerprint]):
    """The fingerprint of each model, taken when it is first asked for; some 0.1 s a model."""

    def __init__(self, told: Mapping[str, str]) -> None:
        """
        Args:
            told: Model -> directory or hub name of its weights, or ``label:TEXT``.
        """
        super().__init__()
        self._told = dict(told)

    def __missing__(self, model: str) -> Fingerprint:
        source = self._told.get(model, model)
        if source.startswith(LABEL):
            found = Fingerprint("label", sha256(source.encode(errors="surrogatepass")).hexdigest())
        else:
            found = weights_fingerprint(source)
        return self.setdefault(model, found)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one seat."""

    kv: KvConfig
    weights: Weights
    chunk_tokens: int
    """LMCache's chunk size, where it was told; 0: not."""


def read_settings(given: Mapping[str, Any], *, where: str) -> Settings:
    """The settings that a seat was given.

    Args:
        given: Keys of KvConfig, and ``weights``.
        where: What to call the place they stand in, for errors.
    Raises:
        UsageError: An unknown key, a wrong value, one that LMCache decides itself, or no roots.
    """
    rest = dict(given)
    told = rest.pop("weights", {})
    if not isinstance(told, Mapping) or not all(isinstance(t, str) and t for pair in told.items() for t in pair):
        raise UsageError(
            f"weights in {where} is {shown(told)}, which is no table of texts",
            hint='like "weights": {"MODEL": "/models/MODEL"} or {"MODEL": "label:my-finetune-3"}',
        )
    kv = resolve(KvConfig, server=rest).config
    for name, allowed in _NOT_OURS.items():
        if getattr(kv, name) not in allowed:
            raise UsageError(
                f"{name} is {getattr(kv, name)!r} in {where} or in the environment: under LMCache that is LMCache's",
                hint=f"leave {name} out",
            )
    if not kv.roots:
        raise UsageError(
            f"{where} names no roots", hint="rewarm lmcache config --root DIR --size 200GiB writes what to use"
        )
    return Settings(kv, Weights(told), kv.chunk_tokens)
