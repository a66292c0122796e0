"""`nox -s image`: build the image of a variant with kernels for chosen cards, drive nothing but `docker buildx`.

Two calls: the first bakes and tells the caches' identities, the second, which finds everything in the builder's cache,
puts them into the labels. What may differ between two builds of one revision stays out of the layers: times stand
still (`env.base.EPOCH`), the revision is in the last layer's configuration only, secrets are mounted, never copied.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import platform
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from env import (
    base,
    bootstrap,
    buildx,
    credentials,
    gpus,
    identity,
    index,
    labels,
    output,
    record,
    remote,
    stored,
    variants,
)
from env.building import terminable
from env.doctor.need import PRESETS
from env.doctor.plan import runs_on
from env.errors import Exit, Failure
from env.variants import ROOT, Matrix, Variant

PYTHON = "3.11"
"""Of the images: bookworm's own. It is in every cache key."""

CPU_CONFIGS = ("tiny",)
GPU_CONFIGS = ("qwen3-8b",)
GPUS = ("h200", "rtx-pro-6000")
"""What is baked unless told otherwise: the main job for the builder's CPU, the paper's recipe for these cards."""

BAKE_FILE = ROOT / "docker" / "bake.json"


def bake_file(matrix: Matrix, rows: Mapping[str, gpus.Gpu], lock_id: Mapping[str, str]) -> dict[str, Any]:
    """What `docker buildx bake` reads: a target for each variant, derived from the two tables.

    `lock_id` is the env_id of each variant's lock. Cards that a variant's torch has no code for are left out of it.
    """
    targets = {
        name: target(variant, chosen_gpus(variant, rows, GPUS), lock_id[name])
        for name, variant in matrix.variants.items()
    }
    return {"group": {"default": {"targets": [matrix.default]}}, "target": targets}


def chosen_gpus(variant: Variant, rows: Mapping[str, gpus.Gpu], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the cards that a variant's wheels run on."""
    return tuple(name for name in names if runs_on(f"{rows[name].major}.{rows[name].minor}", variant.capabilities))


def require_presets(names: Sequence[str]) -> None:
    """Refuse to bake for anything but a preset: the build sees the project, and would say so after minutes.

    Raises:
        Failure: Exit.USAGE, with the nearest preset.
    """
    known = sorted(path.stem for path in PRESETS.glob("*.toml"))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `--config {near[0]}`?" if near else f"presets are {', '.join(known)}"
            raise Failure(
                Exit.USAGE, f"no preset is called `{name}`, and an image holds presets' kernels only", hint=hint
            )


def target(
    variant: Variant,
    cards: Sequence[str],
    lock_id: str,
    *,
    cpu_configs: Sequence[str] = CPU_CONFIGS,
    gpu_configs: Sequence[str] = GPU_CONFIGS,
) -> dict[str, Any]:
    """One target of the bake file. What only a build can know, its caches and its revision, is not in it."""
    return {
        "context": ".",
        "dockerfile": "docker/Dockerfile",
        "target": "image",
        "tags": [f"dflash:{variant.name}"],
        "args": {
            "SOURCE_DATE_EPOCH": str(base.EPOCH),
            "VARIANT": variant.name,
            "CPU_CONFIGS": " ".join(cpu_configs),
            "GPU_CONFIGS": " ".join(gpu_configs),
            "GPUS": " ".join(cards),
        },
        "labels": {
            labels.ENV_ID: lock_id,
            labels.VARIANT: variant.name,
            labels.PYTHON: PYTHON,
            labels.DRIVER: variant.driver,
        },
    }


def derived() -> dict[str, Any]:
    """The bake file of this checkout."""
    matrix = variants.load()
    ids = {name: lock_identity(variant) for name, variant in matrix.variants.items()}
    return bake_file(matrix, gpus.load(), ids)


def lock_identity(variant: Variant) -> str:
    """The env_id of the environment in a variant's image: that of the image's platform, whichever builds it."""
    return identity.env_id(variant.lock, variant=variant.name, python=PYTHON, machine=platform.machine())


def as_text(bake: Mapping[str, Any]) -> str:
    """The bake file as it is kept."""
    return json.dumps(bake, indent=2) + "\n"


def command(wanted: Mapping[str, Any], reference: str, more: Sequence[str]) -> list[str]:
    """`docker buildx build` for a target: everything that the bake file says, on a base, and more options."""
    words = [
        "docker",
        "buildx",
        "build",
        "--progress=plain",
        "--provenance=false",
        "--sbom=false",
        "--file",
        wanted["dockerfile"],
    ]
    if reference.startswith("oci-layout://"):
        words += ["--build-context", f"base={reference}"]
    else:
        words += ["--build-arg", f"BASE={reference}", "--build-arg", "BASE_KIND=slim"]
    for name, value in wanted["args"].items():
        words += ["--build-arg", f"{name}={value}"]
    return [*words, *more, wanted["context"]]


def revision() -> str:
    """The commit, and `-dirty` if the tree is not that commit's; zeros where there is none."""
    told = record.revision(ROOT, os.environ)
    return f"{told['revision'] or '0' * 40}{'' if told['clean'] else '-dirty'}"


def build(
    wanted: Mapping[str, Any],
    reference: str,
    where: output.Output,
    *,
    network: str | None = None,
    fresh: bool = False,
) -> str:
    """Build an image and put it where it is wanted; its digest.

    Raises:
        Failure: Exit.HOST without an engine; whatever a build can fail of, see `buildx.explain`.
    """
    base_digest = reference.rpartition("@")[2]
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", base_digest):
        raise Failure(
            Exit.USAGE,
            f"the base `{reference}` is not named by its digest, so it could be another one tomorrow",
            hint="`--base REF@sha256:…`",
        )
    remote.require_engine()
    tools = bootstrap.ensure_tools()
    with tempfile.TemporaryDirectory(prefix="dflash-image-") as scratch, terminable():
        folder = Path(scratch)
        shared = credentials.options(os.environ, index.pip_settings(tools), folder)
        if network is not None:
            shared += ["--network", network, *(["--allow", "network.host"] if network == "host" else [])]
        first = ["--target", "cache-ids", "--output", f"type=local,dest={folder / 'ids'}"]
        buildx.run(command(wanted, reference, [*shared, *first, *(["--no-cache"] if fresh else [])]))
        found = json.loads((folder / "ids" / "cache-ids.json").read_text(encoding="utf-8"))
        named = {**wanted["labels"], **told_labels(found, revision(), base_digest)}
        labels.read(named, "the image")  # misshapen ones must not get into one
        second = ["--target", wanted["target"], "--build-arg", f"REVISION={named[labels.REVISION]}"]
        for name, value in sorted(named.items()):
            second += ["--label", f"{name}={value}"]
        told = folder / "metadata.json"
        second += ["--metadata-file", str(told), "--output", where.option]
        with where.arriving():
            buildx.run(command(wanted, reference, [*shared, *second]))
        digest = str(json.loads(told.read_text(encoding="utf-8"))["containerimage.digest"])
    where.require_arrived(digest)
    return digest


def told_labels(caches: Mapping[str, Sequence[str]], commit: str, base_digest: str) -> dict[str, str]:
    """The labels that only a build can know; `caches` are the `cache_id`s by card."""
    pairs = ",".join(f"{card}={number}" for card, numbers in sorted(caches.items()) for number in sorted(numbers))
    return {labels.CACHES: pairs, labels.REVISION: commit, labels.BASE: base_digest}


def inspect(name: str) -> str:
    """What an image says of itself, checked: one of the engine's or of a registry, or `oci:FILE`, an archive or folder.

    Raises:
        Failure: Exit.INPUT, when it is no image of this project or altered; Exit.DRIFT, when of another lock.
    """
    image = stored.find(name)
    layers = image.layers
    found = labels.read(image.labels, name)
    labels.require_locked(found, name)
    rows = [
        ("digest", image.digest),
        ("variant", f"{found.variant}, Python {found.python}, driver {found.driver} or newer"),
        ("env_id", found.env_id),
        ("revision", found.revision),
        ("base", found.base),
        *((f"cache {card}", number) for card, number in found.pairs()),
        ("layers", f"{len(layers)}, {sum(layer['size'] for layer in layers) / 1e6:,.0f} MB to pull"),
        *(("", f"{layer['size'] / 1e6:10,.1f} MB  {layer['digest']}") for layer in layers),
    ]
    return "\n".join(f"{key:<20}{value}".rstrip() for key, value in rows)


EXAMPLES = """
examples:
  nox -s image                                        cu130, kernels for this CPU and the default cards, into the engine
  nox -s image -- --variant cu128 --gpu h100-sxm      another CUDA, another card
  nox -s image -- --output oci:image.tar              a file
  nox -s image -- --output push:registry.example/dflash:1
  nox -s image -- --print                             the bake file, for `docker buildx bake`
  nox -s image -- --inspect dflash:cu130              what was built into the engine
  nox -s image -- --inspect registry.example/dflash@sha256:…
"""


def parser() -> argparse.ArgumentParser:
    """The command line of `image`."""
    made = argparse.ArgumentParser(
        prog="nox -s image --",
        description="Build an image whose environment is the lock and whose kernels are compiled already.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--variant", help=f"torch and CUDA ({variants.UNLESS_GIVEN})")
    made.add_argument("--gpu", action="append", help=f"a card to bake for (default {', '.join(GPUS)}); `none` for none")
    made.add_argument(
        "--config", action="append", help=f"a preset to bake for the cards (default {', '.join(GPU_CONFIGS)})"
    )
    made.add_argument("--base", metavar="REF", help="an image of Debian bookworm by digest, instead of `nox -s base`'s")
    made.add_argument("--output", default="load", metavar="WHERE", help="oci:FILE, load, load:NAME or push:REF")
    made.add_argument("--network", choices=("default", "host", "none"), help="of the steps that install")
    made.add_argument("--no-cache", action="store_true", help="take nothing from the builder's cache")
    made.add_argument("--print", action="store_true", dest="show", help="print the bake file and build nothing")
    made.add_argument("--inspect", metavar="REF", help="print and check an image's labels: REF or oci:FILE")
    made.add_argument("--sizes", type=Path, metavar="FILE.png", help="draw the layers of `--inspect`'s image")
    return made


def require_alone(options: argparse.Namespace, option: str, fitting: Collection[str]) -> None:
    """Refuse what only a build would heed beside an option that builds nothing: it would be ignored.

    Raises:
        Failure: Exit.USAGE, with the options that do not fit.
    """
    usual = parser().parse_args([])
    over = [name for name, value in vars(options).items() if name not in fitting and value != getattr(usual, name)]
    if over:
        words = ", ".join(f"`--{'print' if name == 'show' else name.replace('_', '-')}`" for name in over)
        raise Failure(Exit.USAGE, f"`{option}` builds nothing, so it takes no {words}", hint=f"leave out {words}")


def main(argv: Sequence[str]) -> int:
    """`python -m env image`: build, print or inspect.

    Raises:
        Failure: Exit.USAGE for options that do not fit; see `build` and `inspect`.
    """
    options = parser().parse_args(list(argv))
    if options.show:
        require_alone(options, "--print", {"show"})
        print(as_text(derived()), end="")
        return int(Exit.DONE)
    if options.inspect is not None:  # an empty one, as of a variable that is not set, must build nothing
        require_alone(options, "--inspect", {"inspect", "sizes"})
        if options.sizes is not None and options.sizes.suffix != ".png":  # a folder's name would get `.png` beside it
            raise Failure(Exit.USAGE, f"`--sizes {options.sizes}` is no name of a picture", hint="`--sizes FILE.png`")
        with terminable():
            print(inspect(options.inspect))
            if options.sizes is not None:
                from env import sizes

                sizes.picture(options.inspect, options.sizes)
        return int(Exit.DONE)
    if options.sizes is not None:
        raise Failure(Exit.USAGE, "`--sizes` needs the image to draw", hint="`--inspect REF --sizes FILE.png`")
    variant = variants.load().variant(options.variant)
    where = output.read(options.output, variant.name)
    configs = options.config or GPU_CONFIGS
    require_presets(configs)
    cards = [gpus.find(name).key for name in options.gpu or GPUS if name != "none"]
    unfit = set(cards) - set(chosen_gpus(variant, gpus.load(), cards))
    if unfit:
        raise Failure(
            Exit.USAGE,
            f"{variant.name}'s torch has no code for {', '.join(sorted(unfit))}",
            details=[f"built for {' '.join(variant.capabilities)}"],
        )
    wanted = target(variant, cards, lock_identity(variant), gpu_configs=configs)
    if options.base is None:
        remote.require_engine()  # before minutes are spent on a base
    reference = base.ensure().reference if options.base is None else options.base
    digest = build(wanted, reference, where, network=options.network, fresh=options.no_cache)
    print(f"{where.place.partition('@')[0]}@{digest}" if where.kind != "oci" else f"{where.place} {digest}")
    return int(Exit.DONE)
