from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from rewarm.errors import StorageError, UsageError
from rewarm.trial.plan import DEMO, Plan, from_document, load_plan, settle


def test_a_plan_survives_the_evidence() -> None:
    plan = from_document({**DEMO, "server": {"args": ["--x"], "env": {"A": "1"}}}, where="test")
    assert from_document(plan.as_json(), where="test") == plan


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    assert load_plan(str(tmp_path / "plan.toml")) == Plan()


def test_sizes_are_written_as_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[server]\ncapacity_bytes = "2GiB"\n')
    assert load_plan(str(tmp_path / "plan.toml")).server.capacity_bytes == 2 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[load]\ncontxt_tokens = 1", "[load] has no key 'contxt_tokens'; did you mean 'context_tokens'?"),
        ("[laod]\npairs = 1", "has no table 'laod'; did you mean 'load'?"),
        ("load = 3", "load is not a table"),
        ("[load]\npairs = 'x'", "load.pairs is 'x', which is not a whole number"),
        ("[load]\npairs = 1", "load.pairs is 1"),
        ("[trial]\narms = ['recompute', 'rewram']", "trial.arms has 'rewram'; did you mean 'rewarm'?"),
        ("[trial]\narms = ['fs', 'rewarm']", "trial.arms lacks recompute"),
        ("[trial]\narms = ['recompute']", "nothing to compare"),
        ("[trial]\narms = 'recompute'", "not a list of texts"),
        ("[trial]\nservers = 'both'", "trial.servers is 'both'"),
        ("[gates]\nrequired = ['recovry']", "did you mean 'recovery'?"),
        ("[gates]\nconfidence = 95", "gates.confidence is 95.0"),
        ("[gates]\ndelta = true", "gates.delta is True, which is not a number"),
        ("[baseline]\nthrottle = 2", "baseline.throttle is 2.0"),
        ("[server]\nenv = {A = 1}", "not a table of texts"),
        ("[server]\nhost_tier_bytes = '1KiB'", "server.host_tier_bytes is 1.0 KiB"),
        ("[load]\nconcurrency = 9" + "9" * 100, "load.concurrency is too large"),
        ("[load", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("x = " + "9" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_plan_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(UsageError) as raised:
        load_plan(str(tmp_path / "plan.toml"))
    assert message in raised.value.message
    assert "\n" not in raised.value.message


def test_a_missing_plan_is_an_error_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        load_plan(str(tmp_path / "none.toml"))


def test_the_plan_of_the_guide_is_all_defaults() -> None:
    """The page names every key with its default: nothing more, nothing less."""
    page = Path(__file__).parents[3] / "docs" / "guides" / "trial.md"
    text = page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    document = tomllib.loads(text)
    assert from_document(document, where="docs/guides/trial.md") == Plan()
    assert {name: set(table) for name, table in document.items()} == {
        name: set(table) for name, table in Plan().as_json().items()
    }


def test_what_a_plan_leaves_open_is_settled_by_the_machine() -> None:
    here = settle(Plan(), on_cpu=True, free_bytes=10 << 30)
    assert (here.load.concurrency, here.server.host_tier_bytes, here.server.capacity_bytes) == (2, 1 << 30, 5 << 30)
    there = settle(Plan(), on_cpu=False, free_bytes=1 << 42)
    assert (there.load.concurrency, there.server.capacity_bytes) == (8, 128 << 30)
    asked = from_document({"load": {"concurrency": 3}, "server": {"capacity_bytes": "1GiB"}}, where="test")
    assert settle(asked, on_cpu=False, free_bytes=0).load.concurrency == 3
    assert settle(asked, on_cpu=False, free_bytes=0).server.capacity_bytes == 1 << 30
