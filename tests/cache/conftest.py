"""Fixtures of the cache's tests: a small disk, and real compilations, each made once."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy one would fail for its slowness alone
settings.load_profile("any machine")


def mounted(where: Path, *options: str) -> Iterator[Path]:
    """A small file system in memory, mounted for as long as a test runs."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(where)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"file systems cannot be mounted here, so a full disk cannot be had: {error}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike the ones that tests get otherwise."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of one megabyte."""
    yield from mounted(tmp_path / "disk", "size=1m")
