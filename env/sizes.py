"""A picture of an image's layers: how large each is to pull, from the lowest up."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from env import environment, stored, variants
from env.errors import Exit, Failure
from env.parts import PARTS

DRAW = """
import json, sys
import matplotlib
matplotlib.use("Agg")
from matplotlib import pyplot
told = json.load(sys.stdin)
names, sizes = [row[0] for row in told["rows"]], [row[1] / 1e6 for row in told["rows"]]
figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(names) + 1.2), layout="constrained")
bars = axes.barh(range(len(names)), sizes, color="#4878a8")
axes.set_yticks(range(len(names)), names)
axes.bar_label(bars, [f"{size:,.1f}" for size in sizes], padding=3)
axes.set_xlabel("MB to pull (zstd)")
axes.set_title(told["title"], loc="left")
axes.margins(x=0.12)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(told["file"], dpi=110, metadata={"Software": None})
"""


def picture(name: str, file: Path) -> None:
    """Draw the layers of an image, a reference or `oci:FILE`, with the training environment's matplotlib.

    Raises:
        Failure: Exit.INPUT, when there is no such image; Exit.STORAGE, when the file cannot be written.
    """
    rows = read(name)
    total = sum(size for _, size in rows)
    told = {"title": f"{len(rows)} layers, {total / 1e9:.2f} GB", "rows": rows, "file": str(file.absolute())}
    python = environment.ensure(variants.load().variant().name)
    done = subprocess.run(
        [python, "-I", "-c", DRAW], input=json.dumps(told), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise Failure(Exit.STORAGE, f"cannot draw {file}", details=done.stderr.splitlines()[-1:])


def read(name: str) -> list[tuple[str, int]]:
    """A name and the compressed size of each layer, the lowest first."""
    image = stored.find(name)
    steps = [step for step in image.config.get("history", ()) if not step.get("empty_layer")]
    names = [title(step.get("created_by", "")) for step in steps]
    sizes = [layer["size"] for layer in image.layers]
    if len(names) != len(sizes):
        names = [f"layer {number}" for number in range(len(sizes))]
    return list(zip(names, sizes, strict=True))


def title(step: str) -> str:
    """What a layer is, from the step that made it."""
    for sign, name in SIGNS:
        if sign in step:
            return name
    return step[:40]


SIGNS: Sequence[tuple[str, str]] = (
    ("Debian", "operating system, compilers, Python"),
    *((f"PART={name} ", f"wheels: {name}") for name in PARTS),
    ("/media/install", "empty environment"),
    ("/media/stamp", "stamp for the gate"),
    ("WORKDIR", "nothing"),
    ("COPY /layer/", "tools: nox, uv"),
    ("COPY /caches/", "compile caches"),
    ("COPY /project/", "project"),
)
"""What a step's text holds, and what its layer is called."""
