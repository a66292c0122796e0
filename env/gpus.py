"""GPUs as records: what kernels for a card depend on. `gpus.toml` beside this file is the only place for them."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from env.errors import Exit, Failure, report

TABLE = Path(__file__).with_name("gpus.toml")

MEASURED = ("key", "verified", "source")
"""Fields of a row that are ours; all others are properties of the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card, as torch's device properties describe it."""

    key: str
    """As users type it: `h200`."""
    verified: bool
    """Whether the properties were read off a real card (`nox -s doctor -- --gpu-row`)."""
    source: str
    """Where the properties come from."""
    name: str
    """Exact device name: part of every cache key. H100 PCIe, H100 SXM and H200 are different names."""
    major: int
    """Compute capability, major."""
    minor: int
    """Compute capability, minor."""
    multi_processor_count: int
    """Streaming multiprocessors: stands in the kernels' source and decides their shapes."""
    total_memory: int
    """Bytes of device memory; decides nothing that we compile, and varies with ECC."""
    regs_per_multiprocessor: int
    """32-bit registers of a multiprocessor."""
    max_threads_per_multi_processor: int
    """Resident threads of a multiprocessor."""
    max_threads_per_block: int
    """Threads of a block, at most."""
    warp_size: int
    """Threads of a warp."""
    shared_memory_per_block: int
    """Bytes of shared memory that a block has without asking."""
    shared_memory_per_block_optin: int
    """Bytes of shared memory that a block may ask for: which configurations of a kernel fit."""
    shared_memory_per_multiprocessor: int
    """Bytes of shared memory of a multiprocessor."""
    L2_cache_size: int
    """Bytes of the level 2 cache; read when kernels are timed."""

    def properties(self) -> dict[str, Any]:
        """The card as an object of torch's device properties has it."""
        values = {name: value for name, value in asdict(self).items() if name not in MEASURED}
        return {**values, "is_integrated": 0, "is_multi_gpu_board": 0, "gcnArchName": self.name}


DECIDES = tuple(field.name for field in fields(Gpu) if field.name not in (*MEASURED, "total_memory", "L2_cache_size"))
"""Properties that enter a cache key or the code of a kernel."""


def gpu_id(gpu: Gpu) -> str:
    """Hexadecimal sha256 over the properties that enter keys or code: two cards with one id share their kernels."""
    decides = {name: getattr(gpu, name) for name in DECIDES}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def parse(text: str) -> dict[str, Gpu]:
    """Read rows from TOML; a missing, unknown or misshapen value is our own mistake and raises at once."""
    return {key: Gpu(key=key, **row) for key, row in tomllib.loads(text).items()}


@functools.cache
def load() -> Mapping[str, Gpu]:
    """The project's rows, by the key that users type."""
    return parse(TABLE.read_text(encoding="utf-8"))


def find(key: str) -> Gpu:
    """The row of that key, or of that exact device name.

    Raises:
        Failure: Exit.USAGE, with the nearest key.
    """
    rows = load()
    for row in rows.values():
        if key in (row.key, row.name):
            return row
    near = difflib.get_close_matches(key.lower().replace(" ", "-"), rows, n=1, cutoff=0.3)
    raise Failure(
        Exit.USAGE,
        f"there is no GPU `{key}`; there are {', '.join(rows)}",
        hint=f"did you mean `--gpu {near[0]}`?" if near else "`nox -s doctor -- --gpu-row` prints a card's row",
    )


def read(index: int = 0) -> Gpu:
    """The card at hand, as torch sees it; needs torch and the card.

    Raises:
        Failure: Exit.HOST, when torch sees no such card, or its version does not tell a property.
    """
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise Failure(Exit.HOST, f"torch sees no GPU {index} here")
    seen = torch.cuda.get_device_properties(index)
    names = [field.name for field in fields(Gpu) if field.name not in MEASURED]
    missing = [name for name in names if not hasattr(seen, name)]
    if missing:
        raise Failure(Exit.HOST, f"torch {torch.__version__} does not tell a card's {', '.join(missing)}")
    known = [row.key for row in load().values() if row.name == seen.name]
    return Gpu(
        key=known[0] if known else seen.name.lower().replace("nvidia ", "").replace(" ", "-"),
        verified=True,
        source=f"read off a card by torch {torch.__version__}",
        **{name: getattr(seen, name) for name in names},
    )


def as_row(gpu: Gpu) -> str:
    """A card as lines for `gpus.toml`."""
    values = {name: value for name, value in asdict(gpu).items() if name != "key"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join([f"[{gpu.key}]", *lines])


def differences(row: Gpu, card: Gpu) -> list[str]:
    """Properties in which a row and a real card differ, both values in each line; empty when the row is right."""
    names = [field.name for field in fields(Gpu) if field.name not in MEASURED]
    pairs = [(name, getattr(row, name), getattr(card, name)) for name in names]
    return [f"{name}: the row says {ours!r}, the card {theirs!r}" for name, ours, theirs in pairs if ours != theirs]


def main(argv: Sequence[str]) -> int:
    """`python -m env.gpus [INDEX] [--json]`, in an environment with torch: print the row of the card at hand.

    Raises:
        Failure: see `read`; Exit.USAGE, for an index that is no number.
    """
    words = [word for word in argv if word != "--json"]
    if len(words) > 1 or not all(word.isdecimal() for word in words):
        raise Failure(Exit.USAGE, f"`{' '.join(words)}` is no device index", hint="a number, or nothing for the first")
    card = read(int(words[0]) if words else 0)
    known = load().get(card.key)
    found = differences(known, card) if known is not None else []
    if "--json" in argv:
        print(json.dumps({"row": asdict(card), "known": known is not None, "differences": found}, indent=1))
        return int(Exit.DONE)
    print(as_row(card))
    if known is not None:
        print("\n".join(f"# {line}" for line in found or [f"the row `{known.key}` is right in every value"]))
    return int(Exit.DONE)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        sys.exit(report(failure))
