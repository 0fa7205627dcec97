"""Which part of a volume one tenant may hold: a small file a root, written by people, heeded by the janitor.

A tenant is who sends requests with one ``cache_salt``. The file has digests of them, so that it tells nobody a salt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rewarm.errors import DamageError, FormatVersionError, StorageError
from rewarm.volume.layout import RootPaths, read_small_file, replace_file, to_text

TENANT_BYTES = 7
NO_TENANT = bytes(TENANT_BYTES)
"""Of requests without a cache_salt: no quota holds for them."""
_FORMAT, _VERSION = "rewarm.quotas", 1
_HINT = "remove this file, then set the quotas again with `rewarm volume quota`; until then no tenant has one"


def tenant_of(cache_salt: str) -> bytes:
    """What stands for a tenant in logs: the first bytes of the sha256 of its cache_salt."""
    digest = hashlib.sha256(cache_salt.encode(errors="surrogatepass")).digest()[:TENANT_BYTES]
    return digest if cache_salt and digest != NO_TENANT else NO_TENANT


@dataclass(frozen=True, slots=True)
class Quotas:
    """Parts of the capacity, 0 to 1."""

    default: float = 1.0
    """For each tenant that has none of its own."""
    tenants: Mapping[bytes, float] = field(default_factory=dict)

    def limit_bytes(self, tenant: bytes, capacity_bytes: int) -> int:
        """What a tenant may hold of a root."""
        share = 1.0 if tenant == NO_TENANT else self.tenants.get(tenant, self.default)
        return int(capacity_bytes * share)


def read_quotas(root: str) -> Quotas:
    """Of a root; without a file there are none.

    Raises:
        DamageError: The file is not what write_quotas() writes.
        FormatVersionError: A newer Rewarm wrote it.
        StorageError: It cannot be read.
    """
    path = RootPaths(root).quotas
    try:
        found = json.loads(read_small_file(path))
        if found["format"] != _FORMAT:
            raise DamageError(f"{path} is of another format", hint=_HINT)
        if found["version"] > _VERSION:
            raise FormatVersionError(path, found=found["version"], known=_VERSION)
        default = _share(found["default"])
        tenants = {bytes.fromhex(name): _share(share) for name, share in found["tenants"].items()}
    except FileNotFoundError:
        return Quotas()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path} says no quotas", hint=_HINT) from error
    return Quotas(default, tenants)


def write_quotas(root: str, quotas: Quotas) -> None:
    """Put them in place of what there is; the janitor heeds them within seconds."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "default": quotas.default,
        "tenants": {tenant.hex(): share for tenant, share in quotas.tenants.items()},
    }
    replace_file(RootPaths(root).quotas, to_text(document), durable=True)


class WatchedQuotas:
    """The quotas of a root, read again when the file is another one."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._seen: tuple[int, int] | None = None
        self._quotas = Quotas()

    def now(self) -> Quotas:
        """Raises as read_quotas(), once for each file; after that those before hold on."""
        try:
            found = os.stat(RootPaths(self._root).quotas, follow_symlinks=False)
            seen = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            seen = (0, 0)
        if seen != self._seen:
            self._seen = seen
            self._quotas = read_quotas(self._root)
        return self._quotas


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no share")
    return float(value)
