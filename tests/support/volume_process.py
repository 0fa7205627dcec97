"""A process that uses a volume, for tests: ``volume_process.py ROOT[:ROOT...] FIRST COUNT [--janitor]``.

Stores COUNT records from number FIRST on, eight a request, and prints a line after each: how many are stored. Then it
waits for the end of its standard input, and closes the volume.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from volumes import Bench, namespace_of, store


def main() -> None:
    """See above."""
    roots, first, count = sys.argv[1].split(":"), int(sys.argv[2]), int(sys.argv[3])
    bench = Bench()
    namespace = namespace_of(bench.open(*roots, janitor="--janitor" in sys.argv))
    stored = 0
    print(0, flush=True)
    for start in range(first, first + count, 8):
        stored += sum(store(namespace, range(start, min(start + 8, first + count))))
        print(stored, flush=True)
    sys.stdin.read()
    bench.close()


if __name__ == "__main__":
    main()
