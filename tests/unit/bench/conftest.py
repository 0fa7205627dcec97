from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"no O_DIRECT below {tmp_path}")
    (tmp_path / "probe").unlink()
    return tmp_path
