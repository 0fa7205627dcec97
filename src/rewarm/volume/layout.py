"""What lies where in a root, and the small JSON files that name a volume and its namespaces.

The page is docs/format/volume-v1.md; a change here is a change there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.engine.checks import MAX_PAYLOAD_BYTES
from rewarm.engine.record import record_bytes
from rewarm.errors import DamageError, FormatVersionError, StorageError, UsageError

_log = logging.getLogger(__name__)

VOLUME_FILE = "rewarm.volume"
MEMBERS_FILE = "rewarm.roots"
NAMESPACE_FILE = "namespace.json"
STATE_DIR = ".rewarm"
FORMAT_VERSION = 1
RECORD_SUFFIX = ".rec"
TEMPORARY_SUFFIX = ".tmp"
DEAD_TEMPORARY_S = 60.0
"""A small file is written in milliseconds; a temporary this old has lost its process."""
_MAX_JSON_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_MAX_NUMBER = (1 << 63) - 1
_HEX_128 = re.compile(r"[0-9a-f]{32}")
_HEX_256 = re.compile(r"[0-9a-f]{64}")
DIR_MODE, FILE_MODE = 0o700, 0o600
_NOT_A_FILE = {errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO}
"""What open_regular() gives where something else has the name."""


@dataclass(frozen=True, slots=True)
class RootFile:
    """What ``rewarm.volume`` of one root says."""

    volume_id: str
    root_id: str
    capacity_bytes: int
    """What this root may hold."""
    created_ns: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "format": "rewarm.volume",
            "version": FORMAT_VERSION,
            "volume_id": self.volume_id,
            "root_id": self.root_id,
            "capacity_bytes": self.capacity_bytes,
            "created_ns": self.created_ns,
        }


@dataclass(frozen=True, slots=True)
class NamespaceFile:
    """What ``namespace.json`` says: how the records beside it are to be read."""

    id: bytes
    payload_bytes: int
    identity: Mapping[str, Any]

    @property
    def record_bytes(self) -> int:
        """Length of each record file."""
        return record_bytes(self.payload_bytes)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "format": "rewarm.namespace",
            "version": FORMAT_VERSION,
            "id": self.id.hex(),
            "payload_bytes": self.payload_bytes,
            "identity": dict(self.identity),
        }


class RootPaths:
    """The names in one root."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self.volume_file = os.path.join(self.root, VOLUME_FILE)
        self.state = os.path.join(self.root, STATE_DIR)
        self.usage = os.path.join(self.state, "usage")
        self.wear = os.path.join(self.state, "wear")
        self.quotas = os.path.join(self.state, "quotas")
        self.tenants = os.path.join(self.state, "tenants")
        self.pins = os.path.join(self.state, "pins")
        self.janitor_lock = os.path.join(self.state, "janitor.lock")
        self.recovery_lock = os.path.join(self.state, "recovery.lock")
        self.order = os.path.join(self.state, "order")
        self.sessions = os.path.join(self.state, "sessions")
        self.quarantine = os.path.join(self.state, "quarantine")
        self.policy = os.path.join(self.state, "policy")
        self.members = os.path.join(self.root, MEMBERS_FILE)
        self.members_lock = os.path.join(self.state, "roots.lock")

    def sync_mark(self, host: str) -> str:
        """The mark of what one host has surely written."""
        return os.path.join(self.state, f"sync-{host}")

    def namespace(self, namespace_id: bytes) -> str:
        """Directory of a namespace."""
        return os.path.join(self.root, namespace_id.hex())

    def record(self, namespace_id: bytes, key: bytes) -> str:
        """Path of a record."""
        return self.records(namespace_id)(key)

    def records(self, namespace_id: bytes) -> Callable[[bytes], str]:
        """What gives the paths of a namespace's records by key: half the time of record() where there are many."""
        start = f"{self.root}/{namespace_id.hex()}/"

        def path(key: bytes) -> str:
            name = key.hex()
            return f"{start}{name[:2]}/{name}{RECORD_SUFFIX}"

        return path


def key_of_name(name: str) -> bytes | None:
    """The key that a record's file name spells; None: no record's name."""
    if not name.endswith(RECORD_SUFFIX):
        return None
    stem = name.removesuffix(RECORD_SUFFIX)
    return bytes.fromhex(stem) if _HEX_256.fullmatch(stem) else None


def namespace_id_of_name(name: str) -> bytes | None:
    """The id that a namespace's directory name spells; None: no namespace."""
    return bytes.fromhex(name) if _HEX_256.fullmatch(name) else None


def namespace_ids(root: str) -> list[bytes]:
    """The namespaces that have a directory in a root."""
    ids = [namespace_id_of_name(name) for name in sorted(os.listdir(root))]
    return [namespace_id for namespace_id in ids if namespace_id is not None]


def identity_id(identity: Mapping[str, Any]) -> bytes:
    """32 bytes: sha256 of the canonical JSON (sorted keys, no spaces, ASCII) of an identity.

    Raises:
        UsageError: The identity is not plain JSON.
    """
    try:
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a namespace's identity is plain JSON: {error}") from error
    return hashlib.sha256(text.encode()).digest()


def read_root_file(root: str) -> RootFile:
    """What ``rewarm.volume`` of a root says.

    Raises:
        UsageError: The directory holds no volume.
        FormatVersionError: A volume of a newer format.
        DamageError: The file is there and says nothing sensible.
        StorageError: It cannot be read.
    """
    path = RootPaths(root).volume_file
    found = _read_json(path, "rewarm.volume", missing=f"{root} holds no volume")
    try:
        made = RootFile(found["volume_id"], found["root_id"], found["capacity_bytes"], found["created_ns"])
    except KeyError as error:
        raise DamageError(f"{path} lacks {error}", hint=_DAMAGED_VOLUME_HINT) from error
    names = [found[name] for name in ("volume_id", "root_id")]
    numbers = [found[name] for name in ("capacity_bytes", "created_ns")]
    are_names = all(isinstance(name, str) and _HEX_128.fullmatch(name) for name in names)
    if not are_names or not all(type(number) is int and 0 < number <= _MAX_NUMBER for number in numbers):
        raise DamageError(f"{path} has fields of the wrong kind", hint=_DAMAGED_VOLUME_HINT)
    return made


def read_roots(roots: Sequence[str]) -> dict[str, RootFile]:
    """What the volume files of roots of one volume say, by real path.

    Raises:
        UsageError: None was named, one was named twice, or they belong to different volumes.
        UsageError, FormatVersionError, DamageError, StorageError: As read_root_file() gives them.
    """
    files, away = find_roots(roots)
    if away:
        raise next(iter(away.values()))
    return files


def find_roots(roots: Sequence[str]) -> tuple[dict[str, RootFile], dict[str, UsageError | StorageError]]:
    """As read_roots(), where some may be away: a device that is not there, or not mounted.

    Returns:
        What the volume files say, by real path; and why the others cannot be read, by real path.
    """
    paths = [os.path.realpath(root) for root in roots]
    if not paths:
        raise UsageError("no directory of the volume was named", hint="name all its roots")
    if len(set(paths)) != len(paths):
        raise UsageError("the same directory is named twice", hint="name each root of the volume once")
    files: dict[str, RootFile] = {}
    away: dict[str, UsageError | StorageError] = {}
    for path in paths:
        try:
            files[path] = read_root_file(path)
        except (UsageError, StorageError) as error:  # noqa: PERF203 - a handful
            away[path] = error
    first = next(iter(files), "")
    for path, file in files.items():
        if file.volume_id != files[first].volume_id:
            raise UsageError(
                f"{first} and {path} belong to two different volumes",
                hint="rewarm volume info DIR shows which; name the roots of one",
            )
    return files, away


_DAMAGED_VOLUME_HINT = "nothing was changed; what it held is a cache: move the directory away and create another volume"


def read_namespace_file(root: str, namespace_id: bytes) -> NamespaceFile:
    """What ``namespace.json`` of a namespace says.

    Raises:
        UsageError: It is not there.
        FormatVersionError: Of a newer format.
        DamageError: It says nothing sensible, or another namespace's name.
        StorageError: It cannot be read.
    """
    path = os.path.join(RootPaths(root).namespace(namespace_id), NAMESPACE_FILE)
    found = _read_json(path, "rewarm.namespace", missing=f"{path} is missing")
    identity, payload_bytes = found.get("identity"), found.get("payload_bytes")
    if not isinstance(identity, dict) or type(payload_bytes) is not int or not 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
        raise DamageError(f"{path} has fields of the wrong kind")
    try:
        found_id = identity_id(identity)
    except UsageError as error:
        raise DamageError(f"{path} has fields of the wrong kind") from error
    if found_id != namespace_id:
        raise DamageError(f"{path} describes another namespace than its directory's name")
    return NamespaceFile(namespace_id, payload_bytes, identity)


def write_namespace_file(root: str, namespace: NamespaceFile) -> None:
    """Make a namespace's directory and describe it there, durably."""
    directory = RootPaths(root).namespace(namespace.id)
    with suppress(FileExistsError):
        os.mkdir(directory, DIR_MODE)
        sync_directory(root)
    replace_file(os.path.join(directory, NAMESPACE_FILE), to_text(namespace.to_json()), durable=True)


def to_text(document: Mapping[str, Any]) -> bytes:
    """A JSON file's bytes: indented, so that people can read it."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def replace_file(path: str, content: bytes, *, durable: bool = False) -> None:
    """Put a whole file under a name at once; who reads it sees the old one or the new one."""
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY_SUFFIX}"
    try:
        write_new(temporary, content, durable=durable)
        os.rename(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(str(Path(path).parent))


def remove_dead_temporaries(directory: str, now_s: float) -> None:
    """Remove what replace_file() left where a process or a machine died in it; ``now_s`` by the file system's clock."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(TEMPORARY_SUFFIX) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    if now_s - entry.stat(follow_symlinks=False).st_mtime > DEAD_TEMPORARY_S:
                        os.unlink(entry.path)


def write_new(path: str, content: bytes, *, durable: bool) -> None:
    """Write a file that must not exist yet; it does not exist after an error either."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        if durable:
            os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def sync_directory(path: str) -> None:
    """fsync a directory, so that names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file: a planted link or pipe is refused, not followed or waited for.

    Raises:
        OSError: As open gives it; EINVAL when it is no regular file.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def open_state(path: str) -> int:
    """A descriptor, to read and write, of a file of the working state, made where it is missing.

    What else has its name (a directory, a link, a pipe) is set aside beside it, since nothing can be locked or counted
    while it stands there, and said in one line.

    Raises:
        OSError: As open and rename give it.
    """
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
    aside = f"{path}.aside-{os.urandom(4).hex()}"
    os.rename(path, aside)
    _log.warning("%s was no regular file: it is %s now, and a new one is made", path, os.path.basename(aside))
    return open_regular(path, os.O_RDWR | os.O_CREAT)


def read_small_file(path: str, limit: int = _MAX_JSON_BYTES) -> bytes:
    """The whole of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: As open_regular() and read give it; EFBIG when it is longer.
    """
    content = bytearray()
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        while piece := file.read(_READ_BYTES):  # memory for what is there, not for what would be allowed
            content += piece
            if len(content) > limit:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return bytes(content)


def _read_json(path: str, kind: str, *, missing: str) -> dict[str, Any]:
    try:
        return read_document(path, kind, _DAMAGED_VOLUME_HINT)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(missing, hint="rewarm volume create DIR --size SIZE makes one") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", path=path, errno=error.errno or 0) from error


def read_document(path: str, kind: str, hint: str) -> dict[str, Any]:
    """A JSON object of one of the formats that have version 1.

    Args:
        path: Of the file.
        kind: What its "format" says.
        hint: What to do where it is damaged.
    Raises:
        OSError: As read_small_file() gives it.
        DamageError: It is no such document.
        FormatVersionError: Of a newer format.
    """
    try:
        document = json.loads(read_small_file(path))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is not JSON", hint=hint) from error
    version = document.get("version") if isinstance(document, dict) and document.get("format") == kind else None
    if type(version) is not int or version < 1:
        raise DamageError(f"{path} is no {kind} file", hint=hint)
    if version > FORMAT_VERSION:
        raise FormatVersionError(path, found=version, known=FORMAT_VERSION)
    return dict(document)
