"""What can be configured, where a value may come from, and which source wins.

Order: an argument or flag, then the server's extra config, then ``REWARM_<SECTION>_<FIELD>`` in the environment, then
the one file that ``--config`` or ``REWARM_CONFIG`` names (TOML, a table a section), then the default below. Each class
here is one section; a check stands in the class whose field it guards. The page docs/reference/config.md is made from
this file.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from rewarm.errors import UsageError
from rewarm.inputs import read_input, shown
from rewarm.units import GIB, KIB, MAX_SIZE, MIB, format_size, parse_size

CONFIG_FILE_VARIABLE = "REWARM_CONFIG"
MAX_FILE_BYTES = MIB

POLICIES = ("always_load", "auto", "never")
STORE_RULES = ("always", "on_reuse", "prompts_over_tokens")
ENGINES = ("auto", "io_uring", "threads", "pure")


def _check(rule_holds: bool, message: str, hint: str) -> None:
    if not rule_holds:
        raise UsageError(message, hint=hint)


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    near = difflib.get_close_matches(value, known, n=1)
    _check(
        value in known,
        f"{name} is {shown(value)}" + (f"; did you mean {near[0]!r}?" if near else ""),
        f"one of: {', '.join(known)}",
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Section:
    """What every section has."""

    SECTION: ClassVar[str]
    """Its table in the file, and its part of a variable's name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class KvConfig(Section):
    """The KV cache of one model server: where its records lie, and when they are loaded and stored."""

    SECTION: ClassVar[str] = "kv"

    roots: tuple[str, ...] = ()
    """Directories that hold the volume, absolute, one a device; several in a variable are separated by colons."""
    capacity_bytes: int = 0
    """Bytes that the volume may hold over all roots, like 200GiB, when it is made; an existing one keeps its own."""
    host_bytes: int = 0
    """Bytes of host memory, like 64GiB, for copies of what is used again: the host tier, which all servers of a node
    that use this volume share. 0: none."""
    host_root: str = ""
    """Directory on a tmpfs for host tiers, absolute, the server's user's own; in it each volume has one that is named
    by its id. Empty: /dev/shm/rewarm-UID."""
    chunk_tokens: int = 0
    """Tokens in one record, a multiple of the server's block. 0: the smallest power of two of
    blocks that makes a record of 4 MiB, or of 16 MiB where the KV cache lies on a device."""
    policy: str = "always_load"
    """always_load: what is found is loaded; auto: what is sooner, loading or computing, by what this server measures;
    never: everything is computed, for a comparison."""
    store: str = "always"
    """always: chunks are stored when they are first computed; on_reuse: when a request needs them a second time;
    prompts_over_tokens: those of requests whose prompt has store_min_tokens or more."""
    store_min_tokens: int = 4096
    """For store = prompts_over_tokens."""
    store_bytes_per_day: int = 0
    """Bytes that all servers of the volume together may have written in any 24 hours, like 2TiB, before this one stores
    no more until older hours fall out of the count; kept over restarts. 0: no bound."""
    dwpd: float = 0.0
    """Drive writes a day that the flash is rated for, of its data sheet; for the wear metrics only. 0: not known."""
    read_only: bool = False
    """Load, but neither store nor evict."""
    durable: bool = False
    """fsync each record; without it a power cut may lose the newest records, and never makes a wrong one."""
    engine: str = "auto"
    """What moves the bytes: auto takes the first of io_uring, threads and pure that this machine has."""
    num_workers: int = 0
    """I/O workers of a rank. 0: chosen from the cores and what the roots lie on."""
    ring_bytes: int = 128 * MIB
    """Host memory of a rank that reads land in before they are checked; bounds the loads in flight. As much again for
    the host tier, where there is one."""
    store_buffer_bytes: int = 0
    """Host memory of a rank that chunks wait in until they are written; one that finds it full waits in its KV blocks,
    and is not stored if its request ends before. 0: what one step of the server computes, 64 MiB to 2 GiB."""
    load_deadline_s: float = 30.0
    """Seconds after which a load is given up and its tokens are computed, whatever the device does; a second more for
    each 128 MiB of it."""
    salt: str = ""
    """Keeps tenants apart: servers with different salts never share a record."""
    allow_untested: bool = False
    """Start with a server version that Rewarm was never tried with."""

    def __post_init__(self) -> None:
        for root in self.roots:
            _check(os.path.isabs(root), f"kv.roots has {shown(root)}, which is not an absolute path", "like /mnt/kv")
        _check(len(set(self.roots)) == len(self.roots), "kv.roots names a directory twice", "name each once")
        _check(
            self.capacity_bytes == 0 or self.capacity_bytes >= GIB // 16,
            f"kv.capacity_bytes is {format_size(self.capacity_bytes)}",
            "at least 64 MiB; like 200GiB",
        )
        self._check_host_tier()
        _check(self.chunk_tokens >= 0, f"kv.chunk_tokens is {self.chunk_tokens}", "0 or more")
        _check(
            self.salt == self.salt.encode(errors="ignore").decode(), "kv.salt has bytes that are no text", "as UTF-8"
        )
        _check_one_of("kv.policy", self.policy, POLICIES)
        _check_one_of("kv.store", self.store, STORE_RULES)
        _check_one_of("kv.engine", self.engine, ENGINES)
        _check(self.store_min_tokens > 0, f"kv.store_min_tokens is {self.store_min_tokens}", "1 or more")
        _check(
            self.store_bytes_per_day == 0 or self.store_bytes_per_day >= GIB // 16,
            f"kv.store_bytes_per_day is {format_size(self.store_bytes_per_day)}",
            "at least 64 MiB; like 2TiB",
        )
        _check(0 <= self.dwpd < math.inf, f"kv.dwpd is {self.dwpd}", "0 or more; most drives have 0.3 to 3")
        _check(0 <= self.num_workers <= 256, f"kv.num_workers is {self.num_workers}", "0 to 256")
        for name, num_bytes in (
            ("ring_bytes", self.ring_bytes),
            ("store_buffer_bytes", self.store_buffer_bytes or MIB),
        ):
            _check(num_bytes >= 64 * KIB, f"kv.{name} is {format_size(num_bytes)}", "at least 64 KiB; like 256MiB")
        _check(0 < self.load_deadline_s < math.inf, f"kv.load_deadline_s is {self.load_deadline_s}", "seconds, above 0")

    def _check_host_tier(self) -> None:
        _check(
            self.host_bytes == 0 or self.host_bytes >= GIB // 16,
            f"kv.host_bytes is {format_size(self.host_bytes)}",
            "at least 64 MiB; like 64GiB",
        )
        _check(
            not self.host_root or os.path.isabs(self.host_root),
            f"kv.host_root is {shown(self.host_root)}, which is not an absolute path",
            "a directory on a tmpfs, like /dev/shm/rewarm; leave it out for the usual one",
        )


SECTIONS: tuple[type[Section], ...] = (KvConfig,)

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """A configuration and where each of its values came from."""

    config: S
    origins: Mapping[str, str]
    """Field name to origin: ``argument``, ``server``, the variable's name, the file's path, or ``default``."""


def resolve(
    section: type[S],
    *,
    arguments: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str = "",
) -> Resolved[S]:
    """The configuration of one section from all its sources.

    Args:
        section: The class to fill.
        arguments: Arguments or flags; a value of None was not given.
        server: The server's extra config (vLLM: ``kv_connector_extra_config``).
        environ: The environment; default: this process's.
        config_file: The one named file; default: what ``REWARM_CONFIG`` names, or none.
    Raises:
        UsageError: An unknown key (the nearest known one is named), a value of the wrong type, a broken rule.
        StorageError: The named file cannot be read.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get(CONFIG_FILE_VARIABLE, "")
    sources: list[tuple[str, Mapping[str, Any]]] = []  # weakest first
    if config_file:
        sources.append((config_file, _read_file(config_file, section.SECTION)))
    sources += _from_environ(section, environ)
    sources.append(("server", server or {}))
    sources.append(("argument", {name: value for name, value in (arguments or {}).items() if value is not None}))
    values: dict[str, Any] = {}
    origins = {field.name: "default" for field in dataclasses.fields(section)}
    for origin, source in sources:
        for key, value in source.items():
            _check_known(key, origins, f"{section.SECTION} ({origin})")
            values[key] = _convert(section, key, value, origin)
            origins[key] = origin
    return Resolved(section(**values), origins)


def variable_name(section: type[Section], field_name: str) -> str:
    """The environment variable of a field: ``REWARM_KV_ROOTS``."""
    return f"REWARM_{section.SECTION}_{field_name}".upper()


def _from_environ(section: type[Section], environ: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    prefix = variable_name(section, "")
    names = sorted(name for name in environ if name.startswith(prefix))
    return [(name, {name.removeprefix(prefix).lower(): environ[name]}) for name in names]


def _read_file(path: str, section_name: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(read_input(path, MAX_FILE_BYTES).decode())
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers without an end
        raise UsageError(f"{path} is not TOML: {error}", hint="a table for each section, like [kv]") from error
    known = [known_section.SECTION for known_section in SECTIONS]
    for name, table in document.items():
        _check_known(name, known, path)
        _check(isinstance(table, dict), f"{path}: {name} is not a table", f"write [{name}] above its keys")
    table = document.get(section_name, {})
    assert isinstance(table, dict)
    return table


def _check_known(key: str, known: Any, where: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        raise UsageError(
            f"{where} has no key {shown(key)}" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint="rewarm config show lists them all",
        )


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _convert(section: type[Section], key: str, value: Any, origin: str) -> Any:
    """A value as its field wants it; text is read, since a variable has nothing else."""
    wanted = get_type_hints(section)[key]
    name = f"{section.SECTION}.{key} ({origin})"
    if wanted is bool and isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    if wanted is int and "bytes" in key.split("_") and isinstance(value, str):
        return parse_size(value)
    if wanted in (int, float) and isinstance(value, str):
        try:
            value = wanted(value)
        except ValueError:
            raise UsageError(f"{name} is {shown(value)}, which is not a number", hint=_LISTED) from None
    _check(type(value) is not int or abs(value) <= MAX_SIZE, f"{name} is too large a number", _LISTED)
    if wanted == tuple[str, ...]:
        parts = value.split(":") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)) and all(isinstance(part, str) and part for part in parts):
            return tuple(parts)
    elif wanted is float and type(value) is int:
        return float(value)
    elif type(value) is wanted:
        return value
    raise UsageError(
        f"{name} is {shown(value)}, which is not {_TYPE_NAMES.get(wanted, 'a list of paths')}", hint=_LISTED
    )


_LISTED = "rewarm config show lists what each setting is"
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
