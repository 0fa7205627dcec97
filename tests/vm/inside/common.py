"""Shared by the guest's two jobs: what a key's payload is, where a phase's volume lies, how an answer goes out."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOUNT = Path("/mnt")
OUT = Path("/out")
PAGE_BYTES = 4096
STARTED = time.monotonic()


def read_spec() -> dict[str, Any]:
    """What the host asks for: the file that the first argument names."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return spec


def key_of(kind: str, number: int) -> bytes:
    """The 32 bytes that name record ``number`` of a kind of stores."""
    return hashlib.sha256(f"{kind}:{number}".encode()).digest()


def payload_of(key: bytes, payload_bytes: int) -> bytes:
    """What stands under a key: no two pages are equal, in one payload or in two."""
    pages = -(-payload_bytes // PAGE_BYTES)
    return b"".join((key + struct.pack("<Q", page)) * 103 for page in range(pages))[:payload_bytes]


def root_of(phase: str) -> str:
    """Directory of a phase's volume."""
    return str(MOUNT / phase)


def identity_of(phase: str) -> dict[str, str]:
    """Of the namespace that a phase stores in."""
    return {"phase": phase}


def sh(*command: str) -> str:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}")
    return done.stdout


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s {text}", flush=True)


def answer(name: str, **fields: object) -> None:
    """One line of JSON for the host."""
    with (OUT / f"{name}.jsonl").open("a") as out:
        out.write(json.dumps(fields) + "\n")
