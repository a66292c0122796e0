"""A made-up world for tests: an index of small packages, a small clone of the project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clones import Clone
from wheelhouse import Wheelhouse, only

from env import bootstrap


@pytest.fixture(scope="session")
def tools() -> Path:
    """The Python of the project's own tools, made when they are not there."""
    return bootstrap.ensure_tools()


@pytest.fixture
def package_index(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wheelhouse]:
    """An empty package index: the only one that pip is set up for, and uv through pip; with caches of its own."""
    house = Wheelhouse(tmp_path / "index")
    with house.served() as address:
        only(address, tmp_path, monkeypatch)
        yield house


@pytest.fixture
def clone(tmp_path: Path, package_index: Wheelhouse) -> Clone:
    """A small clone of the project, with the real tools."""
    return Clone(tmp_path / "clone", package_index).with_tools()
