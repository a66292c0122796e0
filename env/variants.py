"""The matrix of torch, CUDA and Python as records; `variants.toml` beside this file is where it stands."""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from env.errors import Exit, Failure

ROOT = Path(__file__).resolve().parent.parent
MATRIX = Path(__file__).with_name("variants.toml")

NAMED = "DFLASH_VARIANT"
"""The environment variable that names the variant of a command without `--variant`; an image sets it to its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One matched set: a torch and the CUDA that it was built for."""

    name: str
    """As users type it, and as files and environments are called: `cu130`."""

    torch: str
    """Public version, as the package index and the wheel's metadata have it: no `+cu130`."""

    cuda: str
    """`torch.version.cuda` of those wheels."""

    capabilities: tuple[str, ...]
    """What the wheels carry machine code for, as torch spells it: `sm_90`."""

    driver: str
    """Oldest NVIDIA driver on Linux that runs this CUDA."""

    installed_gb: float
    """Size of the environment on disk, in 10^9 bytes."""

    @property
    def driver_floor(self) -> tuple[int, ...]:
        """The oldest driver as numbers, to be compared with another driver's numbers."""
        return tuple(int(part) for part in self.driver.split("."))

    @property
    def lock(self) -> Path:
        """The file that says, with hashes, what this variant's environment holds."""
        return ROOT / "requirements" / f"{self.name}.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Every variant, and what all of them share."""

    default: str
    """The variant of a command without `--variant`, where `DFLASH_VARIANT` names none."""

    python: tuple[str, ...]
    """Pythons that the locks serve, oldest first: `3.11`."""

    platforms: tuple[str, ...]
    """Linux machines that the locks serve, as `platform.machine()` spells them."""

    variants: dict[str, Variant]

    def __post_init__(self) -> None:
        if self.default not in self.variants:
            raise ValueError(f"{MATRIX.name}: default = {self.default!r} is none of {', '.join(self.variants)}")

    def variant(self, name: str | None = None, environ: Mapping[str, str] | None = None) -> Variant:
        """The variant of that name; without one, the one that `DFLASH_VARIANT` names, or else the default one.

        Raises:
            Failure: Exit.USAGE, when there is none of that name, with the nearest one.
        """
        named = (os.environ if environ is None else environ).get(NAMED, "") if name is None else ""
        wanted = name if name is not None else named or self.default
        if wanted in self.variants:
            return self.variants[wanted]
        near = difflib.get_close_matches(wanted, self.variants, n=1, cutoff=0.3)
        source, option = (f", which {NAMED} names", f"{NAMED}=") if named else ("", "--variant ")
        raise Failure(
            Exit.USAGE,
            f"there is no variant `{repr(wanted)[1:-1]}`{source}; there are {', '.join(self.variants)}",
            hint=f"did you mean `{option}{near[0]}`?" if near else None,
        )


def parse(text: str) -> Matrix:
    """Read a matrix from TOML; a missing, unknown or misshapen value is our own mistake and raises at once."""
    table = tomllib.loads(text)
    shared = {key: table.pop(key) for key in ("default", "python", "platforms")}
    variants = {
        name: Variant(name=name, **{**row, "capabilities": tuple(row["capabilities"])}) for name, row in table.items()
    }
    return Matrix(
        default=shared["default"],
        python=tuple(shared["python"]),
        platforms=tuple(shared["platforms"]),
        variants=variants,
    )


@functools.cache
def load() -> Matrix:
    """The project's matrix."""
    return parse(MATRIX.read_text(encoding="utf-8"))


DEFAULT = load().default
UNLESS_GIVEN = f"default {DEFAULT}, or what {NAMED} names"
"""For the help of `--variant`."""
