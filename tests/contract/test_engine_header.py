"""src/rewarm/engine/_native.py says what native/rewarm_io.h says."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from rewarm.engine import _native, record

HEADER = (Path(__file__).resolve().parents[2] / "native" / "rewarm_io.h").read_text(encoding="utf-8")
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
SCALARS = {
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
}
STRUCTS = {
    "rw_transfer": _native.Transfer,
    "rw_config": _native.Config,
    "rw_usage": _native.Usage,
    "rw_times": _native.Times,
    "rw_flow": _native.Flow,
    "rw_result": _native.Result,
    "rw_header": _native.Header,
}
AS_BYTES = {"rw_transfer"}
"""Pointers to these are declared as bytes."""


def defines() -> dict[str, int]:
    found = re.findall(r"#define RW_(\w+) (\d+)u?\n", CODE)
    enums = re.findall(r"enum \{([^}]*)\}", CODE)
    values = {name: int(value) for name, value in found}
    for body in enums:
        value = -1
        for entry in body.split(","):
            name, _, explicit = entry.strip().partition(" = ")
            value = int(explicit) if explicit else value + 1
            values[name.removeprefix("RW_")] = value
    return values


def fields(struct: str) -> list[tuple[str, Any]]:
    body = re.search(r"typedef struct " + struct + r" \{(.*?)\} " + struct + ";", CODE, re.DOTALL)
    assert body, struct
    found = []
    for kind, name, count in re.findall(r"(\w+) (\w+)(?:\[(\w+)\])?;", body[1]):
        number = int(count) if count.isdigit() else defines()[count.removeprefix("RW_")] if count else 0
        found.append((name, SCALARS[kind] * number if number else SCALARS[kind]))
    return found


def argument_type(text: str) -> Any:
    words = text.replace("const ", "").strip()
    base, stars = re.match(r"(\w+) ?(\**)", words).groups()  # type: ignore[union-attr]
    if not stars:
        return SCALARS[base]
    if base in {"uint32_t", "int32_t"}:
        return ctypes.POINTER(SCALARS[base])
    if stars == "**":
        return ctypes.POINTER(ctypes.c_void_p)
    if base in {"char", *AS_BYTES}:
        return ctypes.c_char_p
    return ctypes.POINTER(STRUCTS[base]) if base in STRUCTS else ctypes.c_void_p


def functions() -> dict[str, tuple[Any, list[Any]]]:
    found = {}
    for result, name, arguments in re.findall(r"RW_API ([\w ]+?[ *]+)(rw_\w+)\(([^)]*)\);", CODE):
        kind = None if result.strip() == "void" else argument_type(result.strip() + " ")
        words = [] if arguments == "void" else arguments.replace("\n", " ").split(",")
        found[name] = (kind, [argument_type(" ".join(word.split())) for word in words])
    return found


@pytest.mark.parametrize("name", sorted(defines()))
def test_constants(name: str) -> None:
    assert getattr(_native, name) == defines()[name]


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_structures(name: str) -> None:
    declared = STRUCTS[name]._fields_
    assert [(field[0], field[1]) for field in declared] == fields(name)


def test_the_packed_transfer_has_the_layout_of_the_structure() -> None:
    assert _native.TRANSFER.size == ctypes.sizeof(_native.Transfer)
    values = (2, 1, 1, 14, *range(3, 9), *range(9, 13), b"k" * 32, b"n" * 32)
    made = _native.Transfer.from_buffer_copy(_native.TRANSFER.pack(*values))
    names = [name for name, _ in _native.Transfer._fields_ if name != "reserved"]
    found = [getattr(made, name) for name in names]
    assert [bytes(item) if isinstance(item, ctypes.Array) else item for item in found] == list(values)


@pytest.mark.parametrize("name", sorted(functions()))
def test_functions(name: str) -> None:
    assert name in _native.FUNCTIONS
    wanted_result, wanted = functions()[name]
    result, arguments = _native.FUNCTIONS[name]
    assert result == wanted_result
    assert list(arguments) == wanted


def test_nothing_is_declared_that_is_not_there() -> None:
    assert set(_native.FUNCTIONS) == set(functions())


def test_the_record_twin_has_the_same_constants() -> None:
    found = (record.PAGE_BYTES, record.PIECE_BYTES, record.MAX_PIECES)
    assert found == (_native.PAGE_BYTES, _native.PIECE_BYTES, _native.MAX_PIECES)
