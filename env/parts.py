"""A lock in parts, one for each layer of an image: what seldom changes lies below what often does.

A part holds its pins as the lock has them, hashes and all, without comments: a lock that says the same in other words
must not move a layer. Standard library only; the build runs it on the bare base.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PARTS: dict[str, str] = {
    # CUDA's wheels, 2.7 GB, in layers that can be pulled side by side
    "cublas": r"nvidia-cublas(-cu\d+)?",
    "cudnn": r"nvidia-cudnn(-cu\d+)?",
    "cusparse": r"nvidia-(cusparse|cusparselt|cusolver)(-cu\d+)?",
    "cuda": r"nvidia-.*|cuda-.*",
    "triton": r"triton",
    "torch": r"torch",
    "rest": r".*",
}
"""Each part and the names in it, from the lowest layer up; a name belongs to the first that fits."""

_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*==")


def split(lock: str) -> dict[str, str]:
    """The parts of a lock's text, every pin in exactly one of them; a part may be empty.

    Raises:
        ValueError: a line is neither a pin, nor belongs to one, nor is a comment.
    """
    parts = dict.fromkeys(PARTS, "")
    name = ""
    for line in lock.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _PIN.match(line)
        if found is not None:
            name = part_of(found[1])
        elif not (name and line[0].isspace()):
            raise ValueError(f"`{line}` is no pin of a lock")
        parts[name] += f"{line.partition(' #')[0].rstrip()}\n"
    return parts


def part_of(name: str) -> str:
    """The part to which a package belongs."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    return next(part for part, pattern in PARTS.items() if re.fullmatch(pattern, normal))


def main(argv: Sequence[str]) -> int:
    """`parts.py LOCK SCRIPTS FOLDER`: write each part as `FOLDER/PART/part.txt`, with a copy of the scripts beside."""
    parser = argparse.ArgumentParser(prog="parts", description="Split a lock into the parts of an image's layers.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("scripts", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(list(argv))
    for name, text in split(given.lock.read_text(encoding="utf-8")).items():
        shutil.copytree(given.scripts, given.folder / name)
        (given.folder / name / "part.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
