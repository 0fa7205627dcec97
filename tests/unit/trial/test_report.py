from __future__ import annotations

import re
from html.parser import HTMLParser

import junitparser

from rewarm.trial.published import published


class Links(HTMLParser):
    """All that a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "img", "link", "iframe", "object"}:
            self.found.append(tag)
        self.found += [
            value for name, value in attrs if name in {"src", "href", "xlink:href"} and value and value[0] != "#"
        ]


def test_the_page_stands_alone_and_begins_with_the_verdict(make_trial) -> None:
    make_trial()
    page = (make_trial.folder / "report.html").read_text()
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "default-src 'none'" in page
    body = re.sub(r"<[^>]+>|\s+", " ", page[page.index("<body") :])
    assert body.split()[:6][-1] == "Pass"
    assert page.count("<svg") == 3
    for title in ("Gates", "Figures", "Proofs and controls", "What differs between the arms", "Environment"):
        assert f"<h2>{title}</h2>" in page
    assert published()["source"]["license"] in page


def test_text_from_outside_is_escaped(make_trial) -> None:
    def change(event: str, fields: dict[str, object]) -> None:
        if event == "trial_started":
            fields["environment"] = {"cpu": "<script>alert(1)</script>"}

    make_trial(change=change)
    page = (make_trial.folder / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_junit_has_a_case_for_each_gate_and_proof(make_trial) -> None:
    result = make_trial(ttft_s={"rewarm": 0.9})
    xml = junitparser.JUnitXml.fromfile(str(make_trial.folder / "junit.xml"))
    cases = {case.name: case.result for suite in xml for case in suite}
    assert set(cases) == {each["name"] for each in [*result["gates"], *result["proofs"]]}
    assert isinstance(cases["peer"][0], junitparser.Failure)
    assert not cases["tokens"]


def test_markdown_has_the_verdict_and_the_figures(make_trial) -> None:
    make_trial()
    text = (make_trial.folder / "report.md").read_text()
    assert text.startswith("# Rewarm trial: Pass\n")
    assert "| Rewarm | " in text


def test_an_interrupted_trial_has_a_report_too(make_trial) -> None:
    seen = 0

    def change(event: str, fields: dict[str, object]) -> None:
        nonlocal seen
        seen += 1
        if event == "trial_ended":
            fields.update(outcome="interrupted", message="Ctrl-C")
        elif event == "block":
            fields["phase"] = "fill"  # nothing was recovered

    result = make_trial(change=change)
    assert result["verdict"] != "pass"
    assert "was interrupted" in (make_trial.folder / "report.html").read_text()
