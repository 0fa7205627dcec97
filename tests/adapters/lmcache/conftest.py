"""The real LMCache where it is installed and can be imported, else its stand-in."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]

import standin  # noqa: E402

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what LMCache imports
        importlib.import_module("lmcache.v1.distributed.l2_adapters.base")
        importlib.import_module("lmcache.v1.storage_backend.abstract_backend")
    WHY_NOT = ""
except ImportError as error:
    WHY_NOT = f"LMCache is not installed here, or not with all it needs ({error})"
    standin.install()


@pytest.fixture
def real_lmcache() -> None:
    """Skips where only the stand-in is there."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)


@pytest.fixture
def lists_keys() -> None:
    """Skips where LMCache has no listing of an adapter's keys."""
    api = importlib.import_module("lmcache.v1.distributed.api")
    if not hasattr(api, "KeyListPage"):
        pytest.skip("this LMCache lists no keys (from 0.5.0 on)")
