"""`nox -s push`: an image that this checkout built goes to a registry, signed, with its papers.

In this order, so that a push that is stopped leaves nothing that looks whole: the image, its bill of materials, its
provenance, and the signature last. `nox -s pull` takes nothing without it.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from env import bom, labels, remote
from env.building import say, terminable
from env.errors import Exit, Failure

PAPERS = (("cyclonedx", "bill of materials"), ("slsaprovenance1", "provenance"))
"""What is attached: cosign's name for the kind of statement, and ours."""


def main(argv: Sequence[str]) -> int:
    """`nox -s push -- REF:TAG --key cosign.key [--image NAME | --archive FILE]`: push, attach, sign, print the pin."""
    parser = argparse.ArgumentParser(
        prog="nox -s push --", description="Push an image, sign it, and print its reference by digest."
    )
    parser.add_argument("reference", metavar="REF:TAG", help="where to: registry/repository:tag")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--image", metavar="NAME", help="the engine's image; REF:TAG itself if left out")
    source.add_argument("--archive", type=Path, metavar="FILE", help="an OCI archive that `nox -s image` wrote")
    parser.add_argument("--key", type=Path, metavar="FILE", help="cosign's private key; COSIGN_PASSWORD opens it")
    parser.add_argument("--unsigned", action="store_true", help="push without signature and papers, and say so")
    options = parser.parse_args(argv)
    target = remote.reference(options.reference)
    if target.digest is not None:
        raise Failure(Exit.USAGE, f"{target} names a digest, which the push is to find out", hint="name a tag instead")
    if (options.key is None) == (not options.unsigned):
        raise Failure(
            Exit.USAGE,
            "one of `--key FILE` and `--unsigned` must say whether it is signed",
            hint="`cosign generate-key-pair` makes a pair",
        )
    if options.image is not None:
        remote.reference(options.image)
    if options.key is not None:
        remote.require_key(options.key, "--key")
        require_opened(options.key)
    with terminable():
        remote.require_engine()
        name = str(target) if options.image is None else options.image
        if options.archive is not None:
            name = loaded(options.archive)
        told = labels.read(kept_labels(name), name)
        labels.require_locked(told, name)
        if told.revision.endswith("-dirty"):
            say(f"{name} was built from a tree that was not clean; its provenance says so")
        papers = [] if options.unsigned else [bom.make(told, dpkg_status(name)), bom.provenance(told)]
        if name != str(target):
            remote.docker("tag", name, str(target))
        pinned = target.pinned(pushed(target))
        if options.unsigned:
            say(f"{pinned} is not signed (`--unsigned`), so `nox -s pull` refuses it unless told otherwise")
        else:
            attest(pinned, options.key, papers)
            say("signing it")
            remote.cosign("sign", "--key", str(options.key), "--tlog-upload=false", "--yes", str(pinned))
    print(pinned)
    return int(Exit.DONE)


def kept_labels(name: str) -> dict[str, str]:
    """The labels of an image that is to be pushed out of the engine.

    Raises:
        Failure: Exit.INPUT, when the engine does not have it, though a registry may.
    """
    try:
        return remote.local_labels(name)
    except Failure as failure:
        if failure.code is not Exit.INPUT:
            raise
        mend = f"`nox -s image -- --output load:{name.partition('@')[0]}`"
        raise Failure(
            Exit.INPUT,
            f"the container engine here has no image {name}",
            details=failure.details,
            hint=f"{mend} puts it there; what `--output push:` sent to a registry was not kept",
        ) from failure


def require_opened(key: Path) -> None:
    """Refuse a key that its password does not open: after the push it would be too late."""
    try:
        remote.cosign("public-key", "--key", str(key))
    except Failure as failure:
        raise Failure(
            Exit.USAGE,
            f"the key {key} cannot be opened",
            details=failure.details,
            hint="COSIGN_PASSWORD holds its password; `cosign generate-key-pair` makes a pair",
        ) from failure


def loaded(archive: Path) -> str:
    """Load an OCI archive into the engine and return the image's name there.

    Raises:
        Failure: Exit.INPUT, when there is no such file or it holds no image.
    """
    if not archive.is_file():
        raise Failure(Exit.INPUT, f"there is no archive {archive}", hint="`nox -s image` writes one")
    text = remote.docker("load", "--quiet", "--input", str(archive))
    match = re.search(r"^Loaded image(?: ID)?: (\S+)$", text, re.MULTILINE)
    if match is None:
        raise Failure(Exit.INPUT, f"{archive} holds no image", details=text.splitlines()[-2:])
    return match[1]


def pushed(target: remote.Reference) -> str:
    """Push an image of the engine, and return the digest that the registry has it under."""
    say(f"pushing {target}")
    text = remote.docker("push", str(target))
    match = re.search(r"digest: (sha256:[0-9a-f]{64})", text)
    if match is None:
        raise Failure(Exit.BUG, "`docker push` told no digest", details=text.splitlines()[-4:])
    return match[1]


def attest(pinned: remote.Reference, key: Path, papers: Sequence[bytes]) -> None:
    """Attach signed statements to an image; a second push replaces those of the first."""
    with tempfile.TemporaryDirectory(prefix="dflash-push-") as scratch:
        for (kind, name), content in zip(PAPERS, papers, strict=True):
            file = Path(scratch) / f"{kind}.json"
            file.write_bytes(content)
            say(f"attaching its {name} ({len(content) / 1e3:,.0f} kB)")
            options = ["--key", str(key), "--tlog-upload=false", "--yes", "--replace=true", "--type", kind]
            remote.cosign("attest", *options, "--predicate", str(file), str(pinned))


def dpkg_status(image: str) -> str:
    """The package database of an image's operating system, taken out without running anything; "" if it has none."""
    container = remote.docker("create", "--network", "none", image, "nothing").strip()
    try:
        done = subprocess.run(
            ["docker", "cp", f"{container}:/var/lib/dpkg/status", "-"], capture_output=True, check=False
        )
    finally:
        with contextlib.suppress(Failure):
            remote.docker("rm", "--force", container)
    if done.returncode != 0:
        errors = done.stderr.decode("utf-8", "replace")
        if "Could not find the file" in errors:
            say(f"{image} has no dpkg database, so its bill of materials lists Python packages only")
            return ""
        raise remote.explain(["docker", "cp"], done.returncode, errors)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        member = archive.extractfile("status")
        return member.read().decode("utf-8") if member else ""
