"""The programs that check what operators copy, from the environment that holds them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from env import environment
from env.variants import ROOT


@pytest.fixture(scope="session")
def checkers() -> Path:
    """The folder of the checkers' programs, made when they are not there."""
    return environment.ensure(None, ["images"]).parent


def check(program: Path, *arguments: str | Path) -> None:
    """Run a checker from the project's root; what it complains about fails the test."""
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program.name} {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}"
