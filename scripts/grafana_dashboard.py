"""Write deploy/grafana/rewarm.json from the panels below, or check that it follows from them (--check).

The dashboard is in Grafana's classic JSON model, which Grafana 10.4 writes and later ones convert. Every expression
reads metrics of rewarm.metrics, or vLLM's own; tests/unit/test_deploy.py holds that, and that no metric of ours is
without a place.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grafana_panels import SOURCE, rows

DASHBOARD = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "rewarm.json"

SCHEMA_VERSION = 39
WIDTH = 24
"""Columns of Grafana's grid."""


def main() -> int:
    """Exit code: 0 when all is as it should be, 1 when --check found another file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file differs")
    check = parser.parse_args().check
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if DASHBOARD.exists() and DASHBOARD.read_text(encoding="utf-8") == text:
        print(f"deploy/grafana/{DASHBOARD.name} follows from scripts/grafana_dashboard.py")
        return 0
    if check:
        print("deploy/grafana/rewarm.json differs from its panels; run scripts/grafana_dashboard.py")
        return 1
    DASHBOARD.write_text(text, encoding="utf-8")
    return 0


def dashboard() -> dict[str, Any]:
    """The whole document."""
    return {
        "annotations": {"list": []},
        "description": "The KV cache of vLLM servers on flash: what it saves, where its time goes, how its roots do.",
        "editable": True,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": _laid_out(rows()),
        "preload": False,
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["rewarm", "vllm"],
        "templating": {"list": _variables()},
        "time": {"from": "now-3h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "Rewarm",
        "uid": "rewarm-kv",
        "version": 1,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    return [source, _variable("model", "Model", "model_name"), _variable("instance", "Server", "instance")]


def _variable(name: str, title: str, label: str) -> dict[str, Any]:
    query = f"label_values(rewarm_kv_lookup_tokens_total, {label})"
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def _laid_out(rows: list[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """All panels with their number and their place: each row's from left to right, then below."""
    laid_out: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        row = {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        laid_out.append({"id": len(laid_out) + 1, **row})
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel["gridPos"]["w"] > WIDTH:
                x, y, height = 0, y + height, 0
            panel["gridPos"] |= {"x": x, "y": y}
            laid_out.append({"id": len(laid_out) + 1, **panel})
            x, height = x + panel["gridPos"]["w"], max(height, panel["gridPos"]["h"])
        y += height
    return laid_out


if __name__ == "__main__":
    sys.exit(main())
