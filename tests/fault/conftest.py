"""The campaign's parts are plain modules beside the tests, so that they run as programs too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
