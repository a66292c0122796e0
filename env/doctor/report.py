"""The report, for people and for programs."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any

from env.doctor.finding import Finding, Severity, exit_code
from env.doctor.host import Host, encode
from env.doctor.plan import Plan

SCHEMA = 1
"""Of the JSON; raised when a field is taken away or changes its meaning, not when one is added."""

HARD = "\0"
"""Stands for a blank at which no line is broken; no text that is printed holds it."""

COLOURS = {
    Severity.OK: "32",
    Severity.NOTE: "36",
    Severity.UNKNOWN: "35",
    Severity.WARNING: "33",
    Severity.ERROR: "31;1",
}
"""SGR codes for the severity's word; the word itself says it all without them."""


def as_text(
    plan: Plan,
    findings: Sequence[tuple[str, Finding]],
    *,
    width: int | None = None,
    colour: bool = False,
    full: bool = False,
) -> str:
    """The report as lines: severity, check, sentence; evidence and the way out below it.

    Wrapped at `width`; with None each sentence stays one line, so that a log can be searched. Evidence of what is fine
    is shown only if `full`.
    """
    lines = [_heading(plan), ""]
    words = max((len(finding.severity.word) for _, finding in findings), default=0)
    names = max((len(name) for name, _ in findings), default=0)
    margin = words + names + 4
    for name, finding in findings:
        word = finding.severity.word.ljust(words)
        if colour:
            word = f"\033[{COLOURS[finding.severity]}m{word}\033[0m"
        message = _wrapped(finding.message, margin, width)
        lines.append(f"{word}  {name.ljust(names)}  {message[0]}")
        lines += [" " * margin + line for line in message[1:]]
        notes = list(finding.details) if full or finding.severity > Severity.OK else []
        if finding.remedy is not None:
            notes.append(f"hint: {finding.remedy}")
        for note in notes:
            first, *rest = _wrapped(note, margin + 4, width)
            lines += [" " * (margin + 2) + first, *(" " * (margin + 4) + line for line in rest)]
    return "\n".join([*lines, "", _summary([finding for _, finding in findings])])


def _heading(plan: Plan) -> str:
    configuration = f", configuration {plan.need.name}" if plan.need is not None else ""
    return f"dflash doctor: {plan.variant.name} (torch {plan.variant.torch}, CUDA {plan.variant.cuda}){configuration}"


def _summary(findings: Sequence[Finding]) -> str:
    counts = []
    for severity in sorted(Severity, reverse=True):
        number = sum(finding.severity is severity for finding in findings)
        if number:
            plural = "s" if number > 1 and severity in (Severity.NOTE, Severity.WARNING, Severity.ERROR) else ""
            counts.append(f"{number} {severity.word}{plural}")
    code = exit_code(findings)
    return f"{', '.join(counts)}" + (f"; exit code {int(code)}" if code else "")


def _wrapped(text: str, margin: int, width: int | None) -> list[str]:
    # Facts are other programs' words: an escape sequence in them must not reach the terminal, nor a line end the
    # layout.
    flat = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if width is None:
        return [flat]
    # A command is to be copied: it stays on one line where it fits on one.
    whole = re.sub(r"`[^`]*`", lambda command: command[0].replace(" ", HARD), flat)
    lines = textwrap.wrap(whole, max(30, width - margin), break_long_words=False, break_on_hyphens=False)
    return [line.replace(HARD, " ") for line in lines] or [""]


def as_json(plan: Plan, findings: Sequence[tuple[str, Finding]], host: Host) -> str:
    """The whole report with the facts it was judged by, keys in a fixed order."""
    judged = [finding for _, finding in findings]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "variant": plan.variant.name,
        "config": plan.need.name if plan.need is not None else None,
        "worst": max((finding.severity for finding in judged), default=Severity.OK).word,
        "exit_code": int(exit_code(judged)),
        "findings": [
            {
                "check": name,
                "severity": finding.severity.word,
                "finding": finding.message,
                "details": list(finding.details),
                "remedy": finding.remedy,
                "exit_code": int(finding.code) if finding.severity is Severity.ERROR else 0,
            }
            for name, finding in findings
        ],
        "host": encode(host),
    }
    return json.dumps(report, indent=2)


def terminal(stream: IO[str], environ: Mapping[str, str] = os.environ) -> tuple[int | None, bool]:
    """The width to wrap at (None: not at all) and whether to colour.

    Width: COLUMNS, else the terminal's own. Colour: on a terminal that is not `dumb`, unless NO_COLOR is set
    (no-color.org: to anything but nothing); FORCE_COLOR colours a pipe too.
    """
    on_terminal = stream.isatty()
    width: int | None = None
    if environ.get("COLUMNS", "").isdecimal():
        width = int(environ["COLUMNS"]) or None
    elif on_terminal:
        try:
            width = os.get_terminal_size(stream.fileno()).columns or None
        except (OSError, ValueError):
            width = 80
    wanted = (on_terminal and environ.get("TERM") != "dumb") or bool(environ.get("FORCE_COLOR"))
    return width, wanted and not environ.get("NO_COLOR")


def put(text: str, stream: IO[str] | None = None) -> None:
    """Print, whatever the terminal's encoding makes of a strange folder's name, and however soon the reader leaves."""
    stream = sys.stdout if stream is None else stream
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # `… doctor | head`: the exit code is still the doctor's; the interpreter must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
