"""The dashboard and the alert rules read metrics and labels that there are, and say what they are for."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rewarm.metrics import BY_NAME, COUNTER, GAUGE, HISTOGRAM, METRICS

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rewarm.rules.yml"
RULES_TEST = RULES.with_name("rewarm.rules.test.yml")
DASHBOARD = ROOT / "deploy" / "grafana" / "rewarm.json"
OF_THE_SERVER = {"job", "instance", "model_name", "engine"}
"""Labels that Prometheus and vLLM give each metric."""
PROMTOOL = shutil.which("promtool", path=str(Path(sys.executable).parent)) or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None,
    reason="promtool is not here: Debian's package prometheus has it, scripts/get_promtool.sh fetches it",
)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def rules() -> dict[str, str]:
    """Alert -> its expression; the file's form is plain enough for this, and promtool reads it as YAML."""
    text = re.sub(r"^ +#.*\n", "", RULES.read_text(), flags=re.MULTILINE)
    found = re.findall(r"- alert: (\w+)\n +expr: (?:>-\n)?((?:.|\n)+?)\n +(?:for|labels):", text)
    return {name: " ".join(expression.split()) for name, expression in found}


def series_of(expression: str) -> Iterator[tuple[str, str]]:
    """(name, what stands in braces behind it) of each series that is read."""
    yield from re.findall(r"\b((?:rewarm_|vllm:)\w+)(?:\{([^}]*)\})?", expression)


def metric_name(series: str) -> str:
    """Of a histogram's bucket, sum or count, that of the histogram."""
    whole = re.sub(r"_(bucket|sum|count)$", "", series)
    return whole if series not in BY_NAME and whole in BY_NAME and BY_NAME[whole].kind is HISTOGRAM else series


def labels_of(series: str) -> set[str]:
    name = metric_name(series)
    own = set(BY_NAME[name].labels) if name in BY_NAME else set()
    return OF_THE_SERVER | own | ({"le"} if series.endswith("_bucket") else set())


EXPRESSIONS = [*queries(), *rules().values()]


def test_the_files_have_what_they_should() -> None:
    assert len(queries()) > 40
    assert len(rules()) == RULES.read_text().count("- alert:") >= 10


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_reads_what_there_is(expression: str) -> None:
    read = list(series_of(expression))
    assert read
    for series, matchers in read:
        if series.startswith("vllm:"):
            continue
        assert metric_name(series) in BY_NAME, f"no such metric: {series}"
        metric = BY_NAME[metric_name(series)]
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in labels_of(series), f"{series} has no label {label}"
            if label in metric.labels and metric.values:
                assert set(values.split("|")) <= set(metric.values), f"{series} has no {label} {values}"
    for names in re.findall(r"\bby \(([^)]*)\)", expression):
        for series, _ in read:
            assert {name.strip() for name in names.split(",")} <= labels_of(series)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_rates_are_of_counters_and_levels_of_gauges(expression: str) -> None:
    grows = set(re.findall(r"\b(?:rate|increase)\(((?:rewarm_|vllm:)\w+)", expression))
    for series, _ in series_of(expression):
        if series.startswith("vllm:"):
            assert series in grows
        else:
            assert (series in grows) == (BY_NAME[metric_name(series)].kind is not GAUGE), series


def test_every_metric_has_a_place_on_the_dashboard() -> None:
    shown = {metric_name(series) for expression in queries() for series, _ in series_of(expression)}
    assert [metric.name for metric in METRICS if metric.name not in shown] == []


def test_metrics_of_the_server_are_those_that_vllm_has() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed in this environment")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    read = {series for expression in EXPRESSIONS for series, _ in series_of(expression) if series.startswith("vllm:")}
    assert read
    for series in read:
        assert f'"{series.removesuffix("_bucket")}"' in source


def test_the_dashboard_follows_from_its_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = _script()
    monkeypatch.setattr(sys, "argv", ["grafana_dashboard.py", "--check"])
    assert module.main() == 0, "run: python scripts/grafana_dashboard.py"
    changed = tmp_path / "rewarm.json"
    changed.write_text(DASHBOARD.read_text().replace("Tokens found", "Tokens"))
    monkeypatch.setattr(module, "DASHBOARD", changed)
    assert module.main() == 1
    monkeypatch.setattr(sys, "argv", ["grafana_dashboard.py"])
    assert module.main() == 0
    assert changed.read_text() == DASHBOARD.read_text()


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_dashboard", ROOT / "scripts" / "grafana_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """Grafana's classic model: numbers and places of its own for each panel, one data source that is chosen."""
    document = json.loads(DASHBOARD.read_text())
    assert document["id"] is None
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", document["uid"])
    assert document["schemaVersion"] >= 39
    assert [variable["name"] for variable in document["templating"]["list"]] == ["datasource", "model", "instance"]
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for label in {
            name for target in panel["targets"] for name in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        }:
            assert any(label in target["expr"] for target in panel["targets"])


def test_the_guide_says_what_to_do_about_every_alert() -> None:
    guide = (ROOT / "docs" / "guides" / "observability.md").read_text()
    assert set(re.findall(r"^\| `(Rewarm\w+)` \|", guide, re.MULTILINE)) == set(rules())


def test_every_alert_is_tested_both_ways() -> None:
    text = RULES_TEST.read_text()
    for alert in rules():
        cases = re.findall(rf"alertname: {alert}\n +exp_alerts:(.*)", text)
        assert " []" in cases, f"{alert} is never tested not to fire"
        assert "" in cases, f"{alert} is never tested to fire"


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], check=False, capture_output=True, text=True, timeout=120, cwd=RULES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_the_rules_and_they_fire_when_they_should() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("test", "rules", RULES_TEST)


@needs_promtool
def test_prometheus_takes_the_dashboards_queries(tmp_path: Path) -> None:
    recorded = [
        {"record": f"q:{number}", "expr": re.sub(r"\$__(rate_interval|range)", "5m", expression)}
        for number, expression in enumerate(queries())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", file)


def test_what_these_tests_look_at_is_found() -> None:
    assert list(series_of('sum by (le) (rate(rewarm_x_bucket{root="a"}[5m]))')) == [("rewarm_x_bucket", 'root="a"')]
    assert metric_name("rewarm_kv_load_seconds_bucket") == "rewarm_kv_load_seconds"
    assert metric_name("rewarm_kv_loads_total_count") == "rewarm_kv_loads_total_count"
    assert BY_NAME["rewarm_kv_loads_total"].kind is COUNTER
