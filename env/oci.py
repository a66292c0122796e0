"""Images as files: the OCI layout, read and written with the standard library. No engine, no registry.

https://github.com/opencontainers/image-spec: a folder (or a tar of one) with `oci-layout`, `index.json` and
`blobs/sha256/…`; everything is named by the digest of its bytes, which is checked on the way in.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.errors import Exit, Failure

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"

NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One image, as its manifest and configuration describe it."""

    digest: str
    """`sha256:…` of the manifest: what it is pulled by."""

    manifest: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict((self.config.get("config") or {}).get("Labels") or {})

    @property
    def layers(self) -> Sequence[Mapping[str, Any]]:
        """Digest, media type and size of each layer, the lowest first."""
        found: Sequence[Mapping[str, Any]] = self.manifest["layers"]
        return found

    def steps(self) -> list[str]:
        """What made each layer, as the history tells."""
        told = [step for step in self.config.get("history", ()) if not step.get("empty_layer")]
        words = [str(step.get("comment") if not step.get("created_by") else step["created_by"]) for step in told]
        return words if len(words) == len(self.layers) else ["" for _ in self.layers]


class Layout:
    """An OCI layout on disk: a folder, or a tar archive of one; only read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes:
        """One small file of the layout.

        Raises:
            Failure: Exit.INPUT, when it is missing or this is no layout.
        """
        try:
            if self.path.is_dir():
                return (self.path / name).read_bytes()
            with tarfile.open(self.path) as archive:
                found = archive.extractfile(name)
                assert found is not None
                return found.read()
        except (OSError, KeyError, AssertionError, tarfile.TarError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it has no `{name}`"
            raise Failure(Exit.INPUT, f"{self.path} is no OCI image: {why}") from error

    def blob(self, digest: str) -> bytes:
        """A blob whose bytes are what its digest says.

        Raises:
            Failure: Exit.INPUT, when it is missing or altered.
        """
        data = self.read(f"blobs/{digest.replace(':', '/')}")
        return checked(data, digest, str(self.path))

    def image(self, architecture: str = "amd64") -> Image:
        """The image of an architecture; attestations beside it are passed over.

        Raises:
            Failure: Exit.INPUT, when there is none, or several.
        """
        place = str(self.path)
        return choose(table(self.read("index.json"), place), self.blob, architecture, place)


def checked(data: bytes, digest: str, place: str) -> bytes:
    """The data, if they are what the digest says.

    Raises:
        Failure: Exit.INPUT, when they are not.
    """
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if found != digest:
        raise Failure(Exit.INPUT, f"a blob of {place} was altered", details=[f"named {digest}", f"found {found}"])
    return data


def table(data: bytes, place: str) -> dict[str, Any]:
    """The JSON object that these bytes hold.

    Raises:
        Failure: Exit.INPUT, when they hold none.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _misshapen(place)
    return found


def choose(index: Mapping[str, Any], blob: Callable[[str], bytes], architecture: str, place: str) -> Image:
    """Follow an index, or a manifest, to one image; `blob` gives the checked bytes of a digest.

    Raises:
        Failure: Exit.INPUT, when there is no image of that architecture, or what should describe it has another shape.
    """
    try:
        for entry in index.get("manifests", ()):
            if entry["mediaType"] in (INDEX, DOCKER_INDEX):
                return choose(table(blob(entry["digest"]), place), blob, architecture, place)
            platform = entry.get("platform", {})
            if platform.get("architecture", architecture) == architecture:
                return _described(blob(entry["digest"]), entry["digest"], blob, place)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # whoever wrote it had other ideas of an image
        raise _misshapen(place) from error
    raise Failure(Exit.INPUT, f"{place} holds no image for {architecture}")


def _described(data: bytes, digest: str, blob: Callable[[str], bytes], place: str) -> Image:
    """The image of a manifest's bytes; whoever asks it for anything later finds the shape that is expected."""
    manifest = table(data, place)
    image = Image(digest=digest, manifest=manifest, config=table(blob(manifest["config"]["digest"]), place))
    sound = [str(layer["digest"]) and layer["size"] >= 0 for layer in image.layers]
    if not all([*sound, *(isinstance(value, str) for value in image.labels.values())]):
        raise _misshapen(place)
    image.steps()
    return image


def _misshapen(place: str) -> Failure:
    return Failure(Exit.INPUT, f"{place} is no OCI image: what should describe it does not")


def write(folder: Path, layers: Sequence[tuple[Path, str]], config: Mapping[str, Any], name: str) -> str:
    """Write a layout of one image; returns the manifest's digest.

    Args:
        folder: does not exist yet.
        layers: each compressed layer, which is moved into the layout, and the sha256 of the tar in it.
        config: the image's configuration without `rootfs`.
        name: what it is called in the index.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    entries = []
    for path, _ in layers:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        path.rename(blobs / digest)
        entries.append({"mediaType": LAYER, "digest": f"sha256:{digest}", "size": size})
    rootfs = {"type": "layers", "diff_ids": [diff for _, diff in layers]}
    described = _add(blobs, {**config, "rootfs": rootfs}, CONFIG)
    manifest = _add(
        blobs, {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": entries}, MANIFEST
    )
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [
            {
                **manifest,
                "platform": {"architecture": config["architecture"], "os": config["os"]},
                "annotations": {NAME: name},
            }
        ],
    }
    (folder / "index.json").write_bytes(_json(index))
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return str(manifest["digest"])


def _add(blobs: Path, content: Mapping[str, Any], kind: str) -> dict[str, Any]:
    data = _json(content)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
