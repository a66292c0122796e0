"""What is in an image, as a bill of materials (CycloneDX 1.6, JSON), and how it was made (SLSA provenance 1).

Both are made of what decides: locks, the package database of the image, its labels. The same inputs give the same
bytes: no time, no random serial number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from env import bootstrap, drift, environment, identity, variants
from env.building import say
from env.errors import Exit, Failure
from env.labels import Labels
from env.variants import ROOT

BUILD_TYPE = "urn:dflash:nox-session:image:1"
"""What a provenance's parameters mean: those of `nox -s image`."""

DISTRIBUTION = "debian-12"
"""What package URLs call the base (docker/Dockerfile)."""

Part = dict[str, Any]
"""One component: name, version, purl (the parts of its package URL), sha256 (sorted), properties, requires."""


def main(argv: Sequence[str]) -> int:
    """`python -m env bom --revision R --base sha256:... [--variant V] [--dpkg-status FILE]`: print one."""
    parser = argparse.ArgumentParser(prog="python -m env bom", description="Print an image's bill of materials.")
    parser.add_argument("--variant", help="the CUDA set in the image; the default one if left out")
    parser.add_argument("--python", default="3.11", help="its Python's minor version")
    parser.add_argument("--dpkg-status", type=Path, metavar="FILE", help="its /var/lib/dpkg/status")
    parser.add_argument("--revision", required=True, help="the project's commit")
    parser.add_argument("--base", required=True, metavar="DIGEST", help="the base image's digest")
    options = parser.parse_args(argv)
    variant = variants.load().variant(options.variant)
    labels = Labels(
        env_id=identity.env_id(variant.lock, variant=variant.name, python=options.python),
        variant=variant.name,
        python=options.python,
        driver=variant.driver,
        caches={},
        revision=options.revision,
        base=options.base,
    )
    try:
        status = options.dpkg_status.read_text(encoding="utf-8") if options.dpkg_status else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(Exit.INPUT, f"cannot read {options.dpkg_status}: {error}") from error
    if not status:
        say("no package database is given (`--dpkg-status`), so packages of the operating system are left out")
    sys.stdout.buffer.write(make(labels, status))
    return int(Exit.DONE)


def make(labels: Labels, status: str, *, machine: str | None = None, root: Path = ROOT) -> bytes:
    """The bill of materials of an image with these labels, from the locks in `root` and its dpkg status file's text.

    Raises:
        Failure: a lock or the status file cannot be read, or what was written is not valid CycloneDX.
    """
    locks = [root / "requirements" / f"{name}.txt" for name in (labels.variant, "tools")]
    parts = [*python_parts(locks, labels.python, machine), *debian_parts(status)]
    properties = {"dflash:env-id": labels.env_id, "dflash:variant": labels.variant, "dflash:base": labels.base}
    asked = {"name": "dflash", "version": labels.revision, "properties": properties, "parts": parts}
    # The library lives in an environment of its own, which nobody needs who only trains.
    python = environment.ensure(None, ["images"])
    done = subprocess.run(
        [str(python), "-m", "env.bomwriter"], input=json.dumps(asked), cwd=root, capture_output=True, text=True,
        env=bootstrap.environment(os.environ), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Failure(
            Exit.BUG, "the bill of materials is not valid CycloneDX", details=done.stderr.strip().splitlines()[-6:]
        )
    return done.stdout.encode()


def python_parts(locks: Sequence[Path], python: str, machine: str | None = None) -> list[Part]:
    """Every package that the locks give this Python, with the hash of each file that may be installed for it."""
    minor = re.sub(r"^([0-9]+\.[0-9]+).*", r"\1", python)
    markers = identity.markers(f"{minor}.0", machine or os.uname().machine)
    parts: dict[tuple[str, str], Part] = {}
    for lock in locks:
        chosen = drift.resolve(drift.read_lock(lock), markers)
        for pin in chosen.values():
            part = parts.setdefault(
                (pin.name, pin.version),
                {
                    "name": pin.name,
                    "version": pin.version,
                    "purl": {"type": "pypi", "name": pin.name, "version": pin.version},
                    "sha256": sorted({each.removeprefix("sha256:") for each in pin.hashes}),
                    "locks": [],
                    "asked_by": set(),
                },
            )
            part["locks"].append(lock.stem)
            part["asked_by"] |= {(name, chosen[name].version) for name in pin.via if name in chosen}
    for key in sorted(parts):
        for name, version in parts[key].pop("asked_by"):
            parts[name, version].setdefault("requires", []).append(list(key))
        parts[key]["properties"] = {"dflash:lock": " ".join(parts[key].pop("locks"))}
    return [{**parts[key], "requires": sorted(parts[key].get("requires", []))} for key in sorted(parts)]


def debian_parts(status: str) -> list[Part]:
    """Every installed package of a dpkg status file, with the source package that advisories speak of."""
    parts = []
    for stanza in _stanzas(status):
        if stanza.get("Status", "").split()[-1:] != ["installed"]:
            continue
        lacking = [field for field in ("Package", "Version", "Architecture") if field not in stanza]
        if lacking:
            raise Failure(Exit.INPUT, f"the dpkg status file has a package without {' and '.join(lacking)}")
        name, version = stanza["Package"], stanza["Version"]
        source, _, other = stanza.get("Source", name).partition(" ")
        of = f"{source}@{other.strip('()')}" if other else source
        qualifiers = {"arch": stanza["Architecture"], "distro": DISTRIBUTION}
        if of != name:
            qualifiers["upstream"] = of
        purl = {"type": "deb", "namespace": "debian", "name": name, "version": version, "qualifiers": qualifiers}
        parts.append({"name": name, "version": version, "purl": purl, "sha256": [], "properties": {}, "requires": []})
    return sorted(parts, key=lambda part: (part["name"], part["version"], part["purl"]["qualifiers"]["arch"]))


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    """The paragraphs of a control file; of fields that go on over several lines, the first line."""
    for paragraph in re.split(r"\n[ \t]*\n", text):
        fields = [line.partition(":") for line in paragraph.splitlines() if line[:1].strip() and ":" in line]
        if fields:
            yield {name: value.strip() for name, _, value in fields}


def provenance(labels: Labels, *, root: Path = ROOT) -> bytes:
    """A SLSA provenance predicate (version 1): what `nox -s image` was given, and everything that it built from.

    The statement around it, which names the image's digest, is made by whoever signs it.
    """
    files = [root / "requirements" / f"{labels.variant}.txt", root / "requirements" / "tools.txt"]
    materials = [{"uri": "git:dflash", "digest": {"gitCommit": labels.revision.removesuffix("-dirty")}}]
    materials.append({"uri": "oci:base", "digest": {"sha256": labels.base.removeprefix("sha256:")}})
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        materials.append({"uri": f"file:{file.relative_to(root)}", "digest": {"sha256": digest}})
    caches = {gpu: sorted(numbers) for gpu, numbers in sorted(labels.caches.items())}
    statement = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "variant": labels.variant,
                "python": labels.python,
                "gpus": list(labels.gpus),
                "clean": not labels.revision.endswith("-dirty"),
            },
            "internalParameters": {
                "env_id": labels.env_id,
                "cache_ids": caches,
            },
            "resolvedDependencies": materials,
        },
        "runDetails": {"builder": {"id": f"{BUILD_TYPE}#{labels.revision}"}, "metadata": {}},  # no times
    }
    return (json.dumps(statement, indent=1, sort_keys=True) + "\n").encode()
