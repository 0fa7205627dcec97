"""The reference pages say what the code says."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rewarm.config import SECTIONS, Section

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_docs", ROOT / "scripts" / "reference_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_docs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "metrics.md", "exit-codes.md"])
def test_page_follows_from_the_code(reference_docs: ModuleType, name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == reference_docs.pages()[name], "run: python scripts/reference_docs.py"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_has_a_sentence_under_it(reference_docs: ModuleType, section: type[Section]) -> None:
    sentences = reference_docs.field_sentences(section)
    assert set(sentences) == {field.name for field in dataclasses.fields(section)}
    for sentence in sentences.values():
        assert sentence.endswith(".")
