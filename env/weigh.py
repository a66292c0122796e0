"""What an image weighs above its base, against the wheels in it; run inside of one: `python3 -m env.weigh`.

The base, with its compilers, is counted apart: what lies below the project's and the caches' folders is all that a
build adds. Wheels count as their RECORDs list them: installed, without bytecode.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

from env.variants import ROOT

LIMIT = 1.08
"""How much heavier than its wheels the image may be: bytecode, tools, caches and the project are the rest."""


def weight(folder: Path) -> int:
    """Bytes of every file in a folder; a file with several names counts once."""
    seen: set[int] = set()
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(place, name))  # noqa: PTH118  # Path is slow
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_size
    return total


def wheels(folder: Path) -> int:
    """Bytes that the wheels installed below a folder brought, as their RECORDs say."""
    total = 0
    for record in folder.glob("**/site-packages/*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as lines:
            total += sum(int(row[2]) for row in csv.reader(lines) if len(row) == 3 and row[2])
    return total


def main() -> int:
    """Print the weights as JSON; 1 if the image is too heavy."""
    caches = Path(os.environ.get("DFLASH_SEALED", "/nonexistent").partition(":")[0]).parent
    environments, tools = ROOT / ".nox" / "environments", [*(ROOT / ".nox").glob("tools-*")]
    told = {
        "environment": weight(environments),
        "tools": sum(map(weight, tools)),
        "caches": weight(caches) if caches.is_dir() else 0,
        "bytecode": sum(path.stat().st_size for path in ROOT.glob(".nox/**/*.pyc")),
        "all": weight(ROOT) + (weight(caches) if caches.is_dir() else 0),
        "wheels": wheels(ROOT / ".nox"),
    }
    ratio = told["all"] / told["wheels"]
    print(json.dumps({**told, "ratio": round(ratio, 4)}, indent=1))
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
