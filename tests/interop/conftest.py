"""Peers to test against, and the marker that asks for such tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interop: fetches a program that others wrote and tests against it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests out unless a marker expression speaks of them."""
    if "interop" in config.option.markexpr:
        return
    left = [item for item in items if item.get_closest_marker("interop")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def peers(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put first on a Python's path, with the packages of `peers.txt`."""
    folder = tmp_path_factory.mktemp("peers")
    options = ["--no-deps", "--require-hashes", "--target", str(folder), "-r", str(HERE / "peers.txt")]
    subprocess.run([str(tools.with_name("uv")), "pip", "install", "--python", str(tools), *options], check=True)
    return folder
