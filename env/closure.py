"""What of the project a bake can depend on: the modules that it imports, followed to the end, and their data.

An image's build bakes in a stage that sees these files alone, so an edit to any other does not bake again. Standard
library only; the build runs it on the bare base.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOTS = ("env.bake", "env.baking", "dflash.graphs", "dflash.replay")
"""The program that bakes, and what its processes are told to call by name."""

DATA = ("env/gpus.toml", "env/stub.cpp", "env/variants.toml", "dflash/presets/*.toml")
"""Files that those modules read."""


def closure(root: Path, modules: Iterable[str] = ROOTS) -> tuple[str, ...]:
    """Paths below the root of every module that the given ones import, wherever in them the import stands."""
    found: dict[str, str] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        path = _file(root, name)
        if path is None or name in found:
            continue
        found[name] = path.relative_to(root).as_posix()
        pending += _parents(name)
        pending += _imported(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(sorted(set(found.values())))


def _file(root: Path, name: str) -> Path | None:
    """Where a module of the project lies; None for anybody else's."""
    stem = root / name.replace(".", "/")
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main(argv: Sequence[str]) -> int:
    """`closure.py ROOT FOLDER`: copy what a bake depends on into a new folder."""
    parser = argparse.ArgumentParser(prog="closure", description="Copy what a bake can depend on.")
    parser.add_argument("root", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(list(argv))
    data = (path.relative_to(given.root).as_posix() for pattern in DATA for path in sorted(given.root.glob(pattern)))
    for name in (*closure(given.root), *data):
        (given.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(given.root / name, given.folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
