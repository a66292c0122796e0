"""Every command that the project prints, in a hint, an example or the documentation, is one that its session takes."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from typing import Any

import pytest
import typer

from dflash import cli
from env import launch
from env.__main__ import COMMANDS
from env.errors import Failure
from env.variants import ROOT

NAMED = re.compile(r"nox(?:file\.py)? -s ([a-z]+) -- ([^`\"\n]+?)(?=`|\"|\n|  | +#|$)")
LAUNCHED = {"train", "data", "verify", "bench"}
FREE = {"tests", "lint", "typecheck"}
"""Sessions whose arguments are another program's."""
NAMES = {("data", "features"), ("cache", "explain 1 1")}
"""What is named, not to be typed as it stands; and what is put together, which a test of its own runs."""
NEEDED = {"bake": ("config", "list"), "explain": ("config", "factors"), "factors": ("config",), "push": ("key",)}
NEEDED |= {"pull": ("key", "unsigned")}
"""Of which options a command needs one, which its parser leaves to a later sentence."""
SOURCES = ("README.md", "noxfile.py", "docs/*.md", "docker/**/*", "env/**/*.py", "env/*.toml", "dflash/**/*.py")


class Accepted(Exception):
    """What a parser made of a command line that it takes."""


def printed() -> list[tuple[str, str, str]]:
    """Session, arguments, and where that stands. What an f-string puts in is `1`, what is left open too."""
    found = []
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()):
        for session, text in NAMED.findall(path.read_text(encoding="utf-8")):
            plain = re.sub(r"\{[^{}]*\}|(?<!\S)…", "1", text).replace(" ...", "").removeprefix("... ")
            if "|" not in plain:  # a menu, of which one is to be chosen
                found.append((session, re.sub(r"[\[\]]", "", plain), f"{path.relative_to(ROOT)}: {text}"))
    return found


def taken(session: str, words: list[str]) -> None:
    """Let a session's own parser read its arguments; raises when it refuses them."""
    if session in LAUNCHED:
        command: Any = typer.main.get_command(cli.app)
        for each in (command, *command.commands.values(), *command.commands["data"].commands.values()):
            each.callback = lambda **_: None
        command.main([session, *launch.take(words)[1]], prog_name="dflash", standalone_mode=False)
        return
    module, _, function = COMMANDS[session].partition(":")
    with pytest.raises((Accepted, SystemExit)) as ended:
        getattr(importlib.import_module(module), function)(words)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 0, "refused"  # `--help` ends so, too
        return
    needed = NEEDED.get(session) or NEEDED.get(words[0], ())
    given = vars(ended.value.args[0])
    assert not needed or any(given[name] for name in needed), f"needs one of {needed}"


def test_every_printed_command_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def accept(*given: Any) -> None:
        raise Accepted(parse(*given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", accept)
    wrong = []
    commands = [each for each in printed() if each[0] not in FREE and each[:2] not in NAMES]
    assert {session for session, _, _ in commands} >= {*LAUNCHED, "bake", "cache", "doctor", "lock", "pull", "push"}
    for session, text, where in commands:
        try:
            taken(session, shlex.split(text))
        except (AssertionError, pytest.fail.Exception, Failure, cli.USAGE_ERRORS) as refused:
            wrong.append(f"{where}: {refused}")
    assert wrong == []
