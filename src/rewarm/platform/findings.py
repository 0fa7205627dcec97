"""The record that every check answers with: what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a check ended; the order is from good to bad."""

    OK = "OK"
    INFO = "INFO"
    """A fact, neither good nor bad."""
    UNKNOWN = "UNKNOWN"
    """It could not be looked at; the source says why."""
    WARN = "WARN"
    """It works, and less well than it could."""
    FAIL = "FAIL"
    """It does not work."""


_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer of one check."""

    verdict: Verdict
    name: str
    """Dotted, lower case, the same in every release: ``directory.o_direct``."""
    found: str
    expected: str = ""
    subject: str = ""
    """What was looked at where a check runs more than once: a directory, a card."""
    source: str = ""
    """Where ``found`` was read, so that it can be looked at again."""
    hint: str = ""
    """What to do about it, one line."""

    def as_json(self) -> dict[str, str]:
        """All fields, as text."""
        return {
            "verdict": self.verdict.value,
            "name": self.name,
            "subject": self.subject,
            "expected": self.expected,
            "found": self.found,
            "source": self.source,
            "hint": self.hint,
        }


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict among findings; OK when there are none."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default=Verdict.OK)
