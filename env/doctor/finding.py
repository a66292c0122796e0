"""What a check says: how bad it is, in one sentence, with the evidence and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from env.errors import Exit


class Severity(IntEnum):
    """How bad a finding is; the order is the order of badness, and only an error changes the exit code."""

    OK = 0
    """Looked at, and fine."""
    NOTE = 1
    """Worth knowing, nothing to mend: a host without a GPU."""
    UNKNOWN = 2
    """The fact could not be had, so nothing is claimed either way."""
    WARNING = 3
    """Works, until something that this host makes likely happens."""
    ERROR = 4
    """What was asked for cannot work here."""

    @property
    def word(self) -> str:
        """The word that stands at the beginning of the finding's line, and in JSON."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement. A check returns at most one, so that each line of the report has one reason to be there."""

    severity: Severity
    """How bad."""
    message: str
    """One sentence without a full stop: what is, and what is needed."""
    details: tuple[str, ...] = ()
    """Evidence, a line each."""
    remedy: str | None = None
    """The way out; commands in backticks."""
    code: Exit = Exit.HOST
    """The exit code if this is an error."""


def exit_code(findings: Iterable[Finding]) -> Exit:
    """The exit code for a set of findings: 0 unless one is an error.

    A drifted environment (3) goes before anything that the host lacks (5): a launch stops there first, and what the
    wrong packages would need of this host is nobody's question.
    """
    codes = {finding.code for finding in findings if finding.severity is Severity.ERROR}
    if not codes:
        return Exit.DONE
    return Exit.DRIFT if Exit.DRIFT in codes else min(codes)
