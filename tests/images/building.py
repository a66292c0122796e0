"""Builds in the tests: a checkout of one's own, `nox -s image` in it, and what came out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import Engine

from env import variants

ROOT = variants.ROOT


def checkout(folder: Path) -> Path:
    """The project's files as they stand here, in another folder; environments and the base are shared."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".nox").symlink_to(ROOT / ".nox")
    return folder


def image(
    engine: Engine, source: Path, *arguments: str, check: bool = True, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`nox -s image` in a checkout, without nox."""
    command = [sys.executable, "-m", "env", "image", *arguments]
    settings = {**engine.environ, **(environ or {}), "PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr[-6000:]
    return done


def layers(engine: Engine, reference: str) -> list[dict[str, Any]]:
    """Digest, type and size of each layer of an image in a registry, the lowest first."""
    told = engine.docker("buildx", "imagetools", "inspect", "--raw", reference).stdout
    found: list[dict[str, Any]] = json.loads(told)["layers"]
    return found
