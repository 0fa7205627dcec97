"""Case generators are plain modules beside the tests; header pages are made in tests/fault."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))
sys.path.insert(0, str(Path(__file__).parent))
