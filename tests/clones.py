"""A clone of the project with little in it: our own code, locks of made-up packages, and the real tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from wheelhouse import Wheelhouse, pin

from env import bootstrap
from env.variants import ROOT


class Clone:
    """A project folder that commands run in, as a user would."""

    def __init__(self, root: Path, house: Wheelhouse) -> None:
        self.root = root
        self.house = house
        for name in ("env", "noxfile.py"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                root.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, root / name)
        (root / "requirements").mkdir()
        for name, version in (("cu130", "2.11.0"), ("cu128", "2.10.0")):
            self.write(f"requirements/{name}.txt", pin("torch", version, house.add("torch", version)))

    def with_tools(self) -> Clone:
        """Give it the tools of the project that it was cloned from."""
        shutil.copy(ROOT / "requirements" / "tools.txt", self.root / "requirements" / "tools.txt")
        place = bootstrap.tools_python().parent.parent
        (self.root / ".nox").mkdir()
        (self.root / ".nox" / place.name).symlink_to(place)
        return self

    def write(self, path: str, text: str) -> None:
        """Write a file of the clone."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def environment(self, variant: str) -> Path:
        """Where a variant's environment is."""
        return self.root / ".nox" / "environments" / f"{variant}-py{bootstrap.python_version()}"

    def site(self, variant: str) -> Path:
        """The folder with a variant's packages."""
        return next(self.environment(variant).glob("lib/python*/site-packages"))

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a user's shell: nothing of what runs these tests, but coverage's own."""
        kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
        return kept | more

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run `python3 noxfile.py ARGUMENTS`."""
        return self._run([sys.executable, "noxfile.py", *arguments], self.environ(**more))

    def env(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m env ARGUMENTS`, as a session does; with this Python, which measures coverage."""
        return self._run([sys.executable, "-m", "env", *arguments], self.environ(**more))

    def start(self, *arguments: str, group: bool = False) -> subprocess.Popen[str]:
        """Start `python3 noxfile.py ARGUMENTS`; its output comes through a pipe."""
        command = [sys.executable, "noxfile.py", *arguments]
        return subprocess.Popen(
            command, cwd=self.root, env=self.environ(), stdout=subprocess.PIPE, text=True, start_new_session=group
        )

    def _run(self, command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.root, env=environ, capture_output=True, text=True, check=False, timeout=400
        )
