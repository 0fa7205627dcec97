"""What a transfer must be before any engine takes it."""

from __future__ import annotations

from array import array

from rewarm.engine.base import (
    NUM_ROOTS,
    BlockPlanes,
    EngineConfig,
    Read,
    ReadRecord,
    ToBlocks,
    ToMemory,
    Transfer,
    Unlink,
    Write,
    WriteRecord,
)
from rewarm.engine.memory import PAGE_BYTES
from rewarm.engine.record import KEY_BYTES, MAX_PIECES, NAMESPACE_BYTES, PIECE_BYTES, record_bytes
from rewarm.errors import UsageError

MAX_PAYLOAD_BYTES = MAX_PIECES * PIECE_BYTES - PAGE_BYTES
"""What one header page can hold checksums for: one page less than 768 MiB."""


def check_transfer(transfer: Transfer, slot_bytes: int) -> None:
    """Refuse a malformed transfer.

    Args:
        transfer: Any of the six kinds.
        slot_bytes: Room of one ring slot of the engine; 0 without a ring.
    Raises:
        UsageError: Says what is wrong with it.
    """
    if "\0" in transfer.path or (isinstance(transfer, WriteRecord) and "\0" in transfer.temporary_path):
        raise UsageError("a path holds a NUL character")
    if not isinstance(transfer, (Read, Write, Unlink)):
        check_root(transfer.root)
    if isinstance(transfer, (Read, Write)):
        if transfer.length_bytes < 0 or transfer.offset_bytes < 0 or transfer.address <= 0:
            raise UsageError(f"{type(transfer).__name__} of {transfer.path} has a negative field or no address")
    elif isinstance(transfer, (ReadRecord, WriteRecord)):
        if len(transfer.key) != KEY_BYTES or len(transfer.namespace_id) != NAMESPACE_BYTES:
            raise UsageError(f"key and namespace of a record are {KEY_BYTES} bytes each")
        if not 0 < transfer.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise UsageError(f"a payload of {transfer.payload_bytes} bytes does not fit a record")
        if isinstance(transfer, WriteRecord):
            _check_address(transfer.address)
        else:
            _check_target(transfer, slot_bytes)


def _check_address(address: int) -> None:
    if address <= 0 or address % PAGE_BYTES:
        raise UsageError(
            f"address {address:#x} is not aligned to {PAGE_BYTES}", hint="alloc_aligned() gives such memory"
        )


def _check_target(transfer: ReadRecord, slot_bytes: int) -> None:
    check_root(transfer.root)
    target = transfer.target
    if isinstance(target, ToMemory):
        _check_address(target.address)
        return
    if record_bytes(transfer.payload_bytes) > slot_bytes:
        raise UsageError(
            f"a record of {record_bytes(transfer.payload_bytes)} bytes does not fit a ring slot of {slot_bytes}",
            hint="give the engine ring_bytes and slot_bytes",
        )
    if isinstance(target, ToBlocks):
        check_arrays(target.planes, target.block_ids)
        num_blocks = target.skip_blocks + len(target.block_ids)
        need = len(target.planes.plane_addresses) * num_blocks * target.planes.page_bytes
        if target.skip_blocks < 0 or target.planes.page_bytes <= 0 or need != transfer.payload_bytes:
            raise UsageError(f"planes and blocks hold {need} bytes, the payload has {transfer.payload_bytes}")
        if len(target.block_ids) and min(target.block_ids) < 0:
            raise UsageError("a block id is negative")


def check_arrays(planes: BlockPlanes, block_ids: array[int]) -> None:
    """Native code reads these arrays by address.

    Raises:
        UsageError: An array of other items than promised.
    """
    if planes.plane_addresses.typecode != "Q" or block_ids.typecode != "q":
        raise UsageError("plane_addresses is an array('Q'), block_ids an array('q')")


def check_root(root: int) -> None:
    """Refuse what is no number of a root.

    Raises:
        UsageError: It is not below NUM_ROOTS.
    """
    if not 0 <= root < NUM_ROOTS:
        raise UsageError(f"{root} is no number of a root", hint=f"0 to {NUM_ROOTS - 1}")


def check_ring(config: EngineConfig) -> None:
    """Refuse ring sizes that hold no slot.

    Raises:
        UsageError: Says which field is wrong.
    """
    if config.ring_bytes < 0 or config.slot_bytes < 0 or config.num_workers < 0:
        raise UsageError("ring_bytes, slot_bytes and num_workers are not negative")
    if config.ring_bytes and (config.slot_bytes < 2 * PAGE_BYTES or config.slot_bytes % PAGE_BYTES):
        raise UsageError(f"slot_bytes is {config.slot_bytes}", hint="a multiple of 4096, at least 8192")
    if config.ring_bytes and config.ring_bytes < config.slot_bytes:
        raise UsageError(f"a ring of {config.ring_bytes} bytes holds no slot of {config.slot_bytes}")
    if config.ring_address % PAGE_BYTES:
        raise UsageError(f"ring_address {config.ring_address:#x} is not aligned to {PAGE_BYTES}")
