"""What a host tier makes of a trace, by when records are copied into it: when stored, at the first load, the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewarm.bench.reuse.replay import Asked, VolumeOrder

RULES = {"when_stored": 0, "first_load": 1, "second_load": 2}
"""Name -> the load at which a record is copied. The last one is what servers do."""


@dataclass(slots=True)
class TierTally:
    """What a replay counted."""

    from_host: int = 0
    from_flash: int = 0
    copied: int = 0
    copy_reads: int = 0
    """Of the copies, those for which flash was read once more."""

    @property
    def host_rate(self) -> float:
        """Part of all loaded blocks that came from the host tier."""
        return self.from_host / max(1, self.from_host + self.from_flash)

    @property
    def read_rate(self) -> float:
        """Blocks read from flash, for loads and copies, over what the same loads read without a host tier."""
        return (self.from_flash + self.copy_reads) / max(1, self.from_host + self.from_flash)


class _Side:
    """One tier: what is there, and in which order it is to go."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._order = VolumeOrder()
        self.present: set[int] = set()

    def add(self, blocks: Sequence[int]) -> int:
        """Keep those that are not there; returns how many. The newest are noted first, as a janitor takes a log."""
        new = [block for block in dict.fromkeys(blocks) if block not in self.present]
        for block in reversed(new):
            self._order.add(block)
        self.present.update(new)
        return len(new)

    def touch(self, blocks: Sequence[int]) -> None:
        """These were used."""
        for block in reversed(blocks):
            if block in self.present:
                self._order.touch(block)

    def make_room(self) -> None:
        """Evict what is above the capacity."""
        while len(self.present) > self._capacity_blocks:
            self.present.discard(self._order.pop())


def replay_tiers(trace: Sequence[Asked], flash_blocks: int, host_blocks: int, *, copied_at: int) -> TierTally:
    """Run a trace against a volume of so many blocks with a host tier of so many.

    Args:
        trace: From asked_of_tier().
        flash_blocks: At least 1.
        host_blocks: At least 1.
        copied_at: One of RULES.
    """
    tally, flash, host = TierTally(), _Side(flash_blocks), _Side(host_blocks)
    num_read: dict[int, int] = {}
    for asked in trace:
        wanted = asked.wanted
        is_there = [block in flash.present or block in host.present for block in wanted]
        used = wanted[: is_there.index(False) if False in is_there else len(wanted)]
        whole = (*asked.resident, *wanted, *asked.made)
        stored = [block for block in whole if block not in flash.present]
        flash.add(stored)
        flash.touch(used)
        host.touch(used)
        from_flash = [block for block in used if block not in host.present]
        for block in from_flash:
            num_read[block] = num_read.get(block, 0) + 1
        if copied_at:
            copied = host.add([block for block in from_flash if num_read[block] >= copied_at])
            tally.copy_reads += copied
        else:
            copied = host.add(stored)
        tally.copied += copied
        tally.from_host += len(used) - len(from_flash)
        tally.from_flash += len(from_flash)
        flash.make_room()
        host.make_room()
    return tally
