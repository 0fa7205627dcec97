"""Fill the templates, and write junit.xml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import junitparser

from rewarm.trial.blocks import read_blocks
from rewarm.trial.gates import NAMES
from rewarm.trial.published import published
from rewarm.trial.report import charts
from rewarm.units import format_size

_WORDS = {"pass": "Pass", "fail": "Fail", "inconclusive": "Inconclusive"}


def write_reports(folder: Path, result: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
    """Write report.html, report.md and junit.xml into the folder."""
    blocks = read_blocks(events)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rewarm.trial.report"),
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(seconds=_seconds, size=_size, rate=_rate, number=_number, share=_share)
    context = {
        "result": result,
        "names": NAMES,
        "words": _WORDS,
        "headline": headline(result),
        "published": published(),
        "connectors": _connectors(result),
        "minutes": (result["wall_s"] or 0) / 60,
        "charts": {
            "ttft": charts.ttft_distribution(blocks),
            "gates": charts.gate_intervals(result["gates"]),
            "timeline": charts.read_timeline(blocks),
        },
    }
    for name in ("report.html", "report.md"):
        text = environment.get_template(name).render(context)
        (folder / name).write_text(text, encoding="utf-8")
    _write_junit(folder / "junit.xml", result)


def headline(result: Mapping[str, Any]) -> str:
    """One sentence under the verdict."""
    gates = {gate["name"]: gate for gate in result["gates"]}
    if result["outcome"] != "complete":
        return f"The trial was {result['outcome']}: {result['message'] or 'what is here is not all of it'}."
    recovery, tokens = gates["recovery"], gates["tokens"]
    if recovery["point"] is None:
        return f"{tokens['found'].capitalize()}."
    text = f"Rewarm gave the first token {1 / recovery['point']:.1f} times sooner than recomputing, from a cold drive"
    return f"{text}; {tokens['found'].partition(';')[0]}."


def _connectors(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each server's connector configuration: all that differs between arms."""
    found = dict.fromkeys(result["plan"]["trial"]["arms"], "not started")
    for server in result["servers"]:
        words = server["command"]
        place = words.index("--kv-transfer-config") if "--kv-transfer-config" in words else None
        found[server["server"]] = words[place + 1] if place is not None else "no connector"
    return list(found.items())


def _write_junit(path: Path, result: Mapping[str, Any]) -> None:
    xml = junitparser.JUnitXml(name="rewarm trial")
    for title, checks in (("gates", _gate_cases(result)), ("proofs", _proof_cases(result))):
        suite = junitparser.TestSuite(name=title)
        for name, outcome, message in checks:
            case = junitparser.TestCase(name=name, classname=f"rewarm.trial.{title}")
            if outcome == "fail":
                case.result = [junitparser.Failure(message)]
            elif outcome != "pass":
                case.result = [junitparser.Skipped(message)]
            suite.add_testcase(case)
        xml.add_testsuite(suite)
    xml.write(str(path))


def _gate_cases(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (gate["name"], gate["outcome"], f"{gate['title']}: {gate['found']}. {gate['reason']}")
        for gate in result["gates"]
    ]


def _proof_cases(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    words = {"OK": "pass", "FAIL": "fail"}
    return [
        (proof["name"], words.get(proof["verdict"], "unknown"), f"expected {proof['expected']}, found {proof['found']}")
        for proof in result["proofs"]
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _rate(value: float | None) -> str:
    return f"{value / 1e9:.2f} GB/s" if value else "–"


def _size(value: float | None) -> str:
    return format_size(int(value)) if value else "–"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
