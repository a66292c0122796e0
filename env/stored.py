"""Where an image is kept, and what it says of itself there: a file, the container engine here, or a registry.

Its layers are neither pulled nor unpacked, and nothing of it is run. The engine is asked through `docker image save`,
which hands out the very manifest that a registry would be given; it stops being read once that has come.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from env import oci, remote
from env.building import say
from env.errors import Exit, Failure

SMALL = 1 << 20
"""Bytes. Manifests and configurations are smaller, and what is larger is passed over."""


def find(name: str) -> oci.Image:
    """An image by `oci:FILE`, or by a reference, which is looked for in the engine first where it names no registry.

    Raises:
        Failure: Exit.INPUT, when there is none, or it was altered; Exit.HOST and Exit.UNREACHABLE, when nobody answers.
    """
    if name.startswith("oci:"):
        return oci.Layout(Path(name.removeprefix("oci:"))).image()
    reference = remote.reference(name)
    if reference.local:
        found = in_engine(name)
        if found is not None:
            return found
        say(f"the container engine here has no image {name}: asking the registry that docker means without a name")
    manifest = remote.manifest(reference)
    digest = reference.digest or remote.digest_of(reference)
    return oci.Image(digest=digest, manifest=manifest, config=remote.config(reference))


def in_engine(name: str) -> oci.Image | None:
    """The image of that name in the container engine; None if it has none.

    Raises:
        Failure: Exit.HOST, when the engine does not answer, or keeps images in another form than they are pulled in.
    """
    try:
        told = json.loads(remote.docker("image", "inspect", name))[0]
    except Failure as failure:
        if failure.code is not Exit.INPUT:
            raise
        return None
    say(f"reading {name} in the container engine here")
    command = ["docker", "image", "save", name]
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words) as saved,
    ):
        assert saved.stdout is not None
        try:
            found = _first(saved.stdout, str(told["Id"]), str(told["Architecture"]), name)
            while found is None and saved.stdout.read(SMALL):  # what it says at its end is wanted
                pass
            code = saved.wait() if found is None else 0
        finally:
            saved.kill()
        if code:
            words.seek(0)
            raise remote.explain(command, code, words.read().decode("utf-8", "replace"))
    if found is None:
        raise Failure(
            Exit.HOST,
            f"the container engine does not hand out the manifest of {name} that its id names",
            details=[f"id {told['Id']}"],
            hint='its image store must be containerd\'s (`{"features": {"containerd-snapshotter": true}}`); '
            "or build to a file, `--output oci:FILE`, and inspect that, `--inspect oci:FILE`",
        )
    return found


class _NotYet(Exception):
    """A blob has not come by that was named before."""


def _first(stream: IO[bytes], digest: str, architecture: str, name: str) -> oci.Image | None:
    """The image of a manifest or index in an archive as it comes; None if it ends without."""
    blobs: dict[str, bytes] = {}

    def blob(wanted: str) -> bytes:
        if wanted not in blobs:
            raise _NotYet(wanted)
        return oci.checked(blobs[wanted], wanted, name)

    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=SMALL) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() and member.size <= SMALL else None
                if content is None or not member.name.startswith("blobs/sha256/"):
                    continue
                blobs[f"sha256:{Path(member.name).name}"] = content.read()
                if digest not in blobs:
                    continue
                kind = oci.table(blob(digest), name).get("mediaType", oci.MANIFEST)
                try:
                    return oci.choose({"manifests": [{"digest": digest, "mediaType": kind}]}, blob, architecture, name)
                except _NotYet:
                    continue
    except tarfile.TarError:  # whoever wrote it has stopped
        return None
    return None
