"""A process that uses records until it is killed, for tests: ``promoting_process.py FLASH HOST COUNT``.

It loads each record twice, from number 0 on, as a server with a host tier, so that they are promoted; then it waits
for the end of its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from volumes import Bench, load, namespace_of

from rewarm.metrics import Counters
from rewarm.volume.tiered import TieredVolume


def main() -> None:
    """See above."""
    flash, host, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    bench = Bench()
    volume = TieredVolume(bench.open(flash), bench.open(host), Counters())
    namespace = namespace_of(volume)
    for start in range(0, count, 8):
        for _ in range(2):
            load(namespace, range(start, min(start + 8, count)))
    sys.stdin.read()


if __name__ == "__main__":
    main()
