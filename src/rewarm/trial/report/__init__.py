"""report.html, report.md and junit.xml, all from result.json's document and the events."""

from rewarm.trial.report.write import write_reports

__all__ = ["write_reports"]
