"""What an image says of itself: its OCI labels as a record, written by the build, believed by nobody unchecked.

Labels are part of the image's configuration and so of its digest. Whoever reads them compares them with what they
stand for: the checkout's lock, the host's driver and cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from env import identity, variants
from env.errors import Exit, Failure

REVISION = "org.opencontainers.image.revision"
BASE = "org.opencontainers.image.base.digest"
ENV_ID = "dflash.env-id"
VARIANT = "dflash.variant"
PYTHON = "dflash.python"
DRIVER = "dflash.driver-floor"
CACHES = "dflash.cache-ids"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The labels of one image."""

    env_id: str
    """`env.identity.env_id` of the lock that it was built from."""

    variant: str
    """As `env/variants.toml` calls it: `cu130`."""

    python: str
    """The minor version of its Python: `3.11`."""

    driver: str
    """Oldest NVIDIA driver that its CUDA runs on."""

    caches: Mapping[str, Sequence[str]]
    """`cache_id`s of the sealed caches in it, by the GPU's key in `env/gpus.toml`, or `cpu`."""

    revision: str
    """Of the project; with `-dirty` where the tree was not clean."""

    base: str
    """Digest of the image that it stands on: `sha256:...`."""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.env_id):
            raise _bad(ENV_ID, self.env_id, "64 hexadecimal digits")
        if not _NAME.fullmatch(self.variant):
            raise _bad(VARIANT, self.variant, "a variant's name")
        if not re.fullmatch(r"3\.[0-9]+", self.python):
            raise _bad(PYTHON, self.python, "a minor version like 3.11")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", self.driver):
            raise _bad(DRIVER, self.driver, "a version like 580 or 525.60.13")
        for gpu, number in self.pairs():
            if not _NAME.fullmatch(gpu) or not _ID.fullmatch(number):
                raise _bad(CACHES, f"{gpu}={number}", "GPU=CACHE_ID, several with commas between")
        if not re.fullmatch(r"[0-9a-f]{40}(-dirty)?", self.revision):
            raise _bad(REVISION, self.revision, "a commit's 40 hexadecimal digits")
        if not _DIGEST.fullmatch(self.base):
            raise _bad(BASE, self.base, "sha256: and 64 hexadecimal digits")

    def pairs(self) -> list[tuple[str, str]]:
        """Each sealed cache: the card that it is for and its `cache_id`, sorted."""
        return sorted((gpu, number) for gpu, numbers in self.caches.items() for number in numbers)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs whose kernels are in it, sorted."""
        return tuple(sorted(gpu for gpu in self.caches if gpu != "cpu"))

    @property
    def driver_floor(self) -> tuple[int, ...]:
        """The oldest driver as numbers."""
        return tuple(int(part) for part in self.driver.split("."))

    def as_dict(self) -> dict[str, str]:
        """The labels as they stand in an image."""
        return {
            ENV_ID: self.env_id,
            VARIANT: self.variant,
            PYTHON: self.python,
            DRIVER: self.driver,
            CACHES: ",".join(f"{gpu}={number}" for gpu, number in self.pairs()),
            REVISION: self.revision,
            BASE: self.base,
        }


def read(labels: Mapping[str, str], what: str) -> Labels:
    """The labels of an image, which errors call `what`.

    Raises:
        Failure: Exit.INPUT, when one is missing or misshapen.
    """
    lacking = [name for name in (ENV_ID, VARIANT, PYTHON, DRIVER, CACHES, REVISION, BASE) if name not in labels]
    if lacking:
        raise Failure(
            Exit.INPUT,
            f"{what} is no image of this project: it has no label {', '.join(lacking)}",
            hint="`nox -s image` builds one",
        )
    caches: dict[str, tuple[str, ...]] = {}
    for pair in filter(None, labels[CACHES].split(",")):
        gpu, _, number = pair.partition("=")
        caches[gpu] = (*caches.get(gpu, ()), number)
    return Labels(
        env_id=labels[ENV_ID],
        variant=labels[VARIANT],
        python=labels[PYTHON],
        driver=labels[DRIVER],
        caches=caches,
        revision=labels[REVISION],
        base=labels[BASE],
    )


def require_locked(labels: Labels, what: str, requirements: Path = variants.ROOT / "requirements") -> None:
    """Refuse an image that was built from another lock than this checkout's, with both identities.

    Raises:
        Failure: Exit.DRIFT for another set; Exit.INPUT for a variant that this checkout does not have.
    """
    matrix = variants.load()
    if labels.variant not in matrix.variants:
        known = ", ".join(matrix.variants)
        raise Failure(
            Exit.INPUT, f"{what} is of variant `{labels.variant}`, and this checkout has {known}", hint=_CHECK_OUT
        )
    lock = requirements / f"{labels.variant}.txt"
    ours = identity.env_id(lock, variant=labels.variant, python=labels.python)
    if ours != labels.env_id:
        raise Failure(
            Exit.DRIFT,
            f"{what} was built from another lock than this checkout's ({labels.variant}, Python {labels.python})",
            details=[f"env_id here {ours}", f"in the image {labels.env_id}", f"built from   {labels.revision}"],
            hint=f"`git checkout {labels.revision.removesuffix('-dirty')}`, or take the image of this revision",
        )
    floor = matrix.variants[labels.variant].driver
    if floor != labels.driver:
        raise Failure(
            Exit.INPUT,
            f"{what} asks for driver {labels.driver}, and env/variants.toml says {floor} for {labels.variant}",
            hint=_CHECK_OUT,
        )


_CHECK_OUT = "use the checkout that the image was built from, or an image of this one"


def _bad(name: str, value: str, wanted: str) -> Failure:
    return Failure(Exit.INPUT, f"the label {name} reads `{value}`, which is not {wanted}")
