"""The rig's modules lie beside its tests and import one another by their own names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
