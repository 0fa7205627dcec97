"""Named, checksummed records on one or more directories: placement, capacity, eviction, verify, locks.

The bytes are docs/format/volume-v1.md; the reasons docs/design.md, section 3.
"""

from __future__ import annotations

from rewarm.volume.create import VolumeIdentity, create_volume
from rewarm.volume.handles import LoadHandle, Outcome, ProbeHandle, StoreHandle
from rewarm.volume.namespace import Namespace
from rewarm.volume.volume import Volume

__all__ = [
    "LoadHandle",
    "Namespace",
    "Outcome",
    "ProbeHandle",
    "StoreHandle",
    "Volume",
    "VolumeIdentity",
    "create_volume",
]
