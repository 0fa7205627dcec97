"""Telling models apart by their contents, offline and in well under a second a few gigabytes.

Nothing here reads a whole weight file: a manifest or the blob names of the Hugging Face hub say what a file holds, and
where there is neither, config.json, the headers of the safetensors files and one page of every tensor do.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rewarm.units import MIB

PAGE_BYTES = 4096
SAMPLES_A_FILE = 64
"""Pages read of a weight file whose format has no tensor index."""
MAX_HEADER_BYTES = 256 * MIB
"""A safetensors header beyond this is not believed; the format's own reader stops at 100 MB."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
MANIFEST = "SHA256SUMS"
CONFIGS = ("config.json", "adapter_config.json")
"""What says how the weights are to be used: of a model, of a LoRA adapter."""
_HEX_DIGITS = frozenset("0123456789abcdef")
_READERS = 8


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What stands for a model's weights in an identity."""

    kind: str
    """manifest | hub | contents | run: where the digest comes from; ``run``: unknown contents, never the same twice."""
    digest: str
    """Hexadecimal."""
    reason: str = ""
    """Why the contents are unknown, where they are."""

    def to_json(self) -> dict[str, str]:
        """The two fields that go into an identity."""
        return {"kind": self.kind, "digest": self.digest}


def run_nonce() -> str:
    """Text that no other run of any server has."""
    return secrets.token_hex(16)


def unknown_contents(reason: str) -> Fingerprint:
    """A fingerprint for contents that cannot be told: good for this run only, since the next one draws another."""
    return Fingerprint("run", run_nonce(), reason)


def weights_fingerprint(model_path: str, revision: str | None = None) -> Fingerprint:
    """Tell the weights in a directory, a file or the hub's cache by their contents.

    Args:
        model_path: A model directory, one weight file, or the hub's name of a model that lies in its cache.
        revision: The hub's branch, tag or commit; None: its default branch. A directory has none.
    Returns:
        The first that can be had: ``manifest`` (a SHA256SUMS file that names every weight file and is not older than
        any), ``hub`` (blob names in the hub's cache), ``contents``. Else ``run``, with the reason.
    """
    try:
        path = _local_path(model_path, revision)
        if path is None:
            return unknown_contents(f"{model_path} is neither a path nor in the cache of the Hugging Face hub")
        return _of_path(path)
    except OSError as error:
        return unknown_contents(f"{model_path}: {error.strerror or error}")


def _of_path(path: Path) -> Fingerprint:
    files = _weight_files(path)
    if not files:
        return unknown_contents(f"no weight file ({', '.join(WEIGHT_SUFFIXES)}) in {path}")
    folder = path if path.is_dir() else path.parent
    config = next((folder / name for name in CONFIGS if (folder / name).is_file()), folder / CONFIGS[0])
    return _from_manifest(path, files, config) or _from_hub(path, files, config) or _from_contents(files, config)


def _local_path(model_path: str, revision: str | None) -> Path | None:
    path = Path(model_path).expanduser()
    if path.exists():
        return path
    if model_path.count("/") != 1 or "://" in model_path:
        return None
    repo = _hub_cache() / ("models--" + model_path.replace("/", "--"))
    name = revision or "main"
    ref = repo / "refs" / name
    commit = ref.read_text().strip() if ref.is_file() else name
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _hub_cache() -> Path:
    environ = os.environ
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache).expanduser()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES and file.is_file())
    return [file for file in found if file.suffix == ".safetensors"] or found


def _from_manifest(path: Path, files: Sequence[Path], config: Path) -> Fingerprint | None:
    manifest = path / MANIFEST
    if not path.is_dir() or not manifest.is_file():
        return None
    sums = dict(_manifest_lines(manifest))
    wanted = [*files, config] if config.is_file() else list(files)
    written = manifest.stat().st_mtime_ns
    if any(file.name not in sums or file.stat().st_mtime_ns > written for file in wanted):
        return None
    return Fingerprint("manifest", _digest_of_names((file.name, sums[file.name]) for file in wanted))


def _manifest_lines(manifest: Path) -> Iterator[tuple[str, str]]:
    for line in manifest.read_text(errors="replace").splitlines():
        digest, _, name = line.partition(" ")
        if len(digest) == 64 and set(digest) <= _HEX_DIGITS:
            yield name.lstrip(" *").removeprefix("./"), digest


def _from_hub(path: Path, files: Sequence[Path], config: Path) -> Fingerprint | None:
    if not path.is_dir() or path.parent.name != "snapshots":
        return None
    wanted = [*files, config] if config.exists() else list(files)
    blobs = []
    for file in wanted:
        target = file.resolve()
        # A blob is named by its git hash (40 digits) or its sha256 (64), and the hub never writes to it again.
        if target.parent.name != "blobs" or len(target.name) not in (40, 64) or not set(target.name) <= _HEX_DIGITS:
            return None
        blobs.append((file.name, target.name))
    return Fingerprint("hub", _digest_of_names(iter(blobs)))


def _digest_of_names(pairs: Iterator[tuple[str, str]]) -> str:
    return sha256(json.dumps(sorted(pairs)).encode()).hexdigest()


def _from_contents(files: Sequence[Path], config: Path) -> Fingerprint:
    digest = sha256()
    if config.is_file():
        digest.update(sha256(config.read_bytes()).digest())
    with ThreadPoolExecutor(_READERS) as readers:
        for file, part in zip(files, readers.map(_file_digest, files), strict=True):
            digest.update(json.dumps(file.name).encode() + part)
    return Fingerprint("contents", digest.hexdigest())


def _file_digest(file: Path) -> bytes:
    digest = sha256()
    fd = os.open(file, os.O_RDONLY)
    try:
        num_bytes = os.fstat(fd).st_size
        digest.update(num_bytes.to_bytes(8, "big"))
        offsets = _tensor_offsets(fd, num_bytes, digest.update) if file.suffix == ".safetensors" else None
        for offset in offsets if offsets is not None else _even_offsets(num_bytes):
            digest.update(os.pread(fd, PAGE_BYTES, offset))
    finally:
        os.close(fd)
    return digest.digest()


def _tensor_offsets(fd: int, num_bytes: int, seen: object) -> list[int] | None:
    """File offsets of a page in the middle of every tensor; the header itself goes to ``seen``. None: no such file."""
    head = os.pread(fd, 8, 0)
    header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, num_bytes - 8):
        return None
    text = os.pread(fd, header_bytes, 8)
    assert callable(seen)
    seen(text)
    try:
        spans = [entry["data_offsets"] for name, entry in json.loads(text).items() if name != "__metadata__"]
        return sorted(8 + header_bytes + _middle(int(lo), int(hi)) for lo, hi in spans)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _middle(lo: int, hi: int) -> int:
    # The middle, not the start: the first rows of an embedding are often the same in every fine-tune.
    return max(lo, (lo + hi - PAGE_BYTES) // 2)


def _even_offsets(num_bytes: int) -> list[int]:
    step = max(PAGE_BYTES, num_bytes // SAMPLES_A_FILE)
    return [*range(0, num_bytes, step), max(0, num_bytes - PAGE_BYTES)]
