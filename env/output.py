"""Where a built image goes: a file, the engine or a registry; what cannot be a place is refused before the build."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from env import remote
from env.errors import Exit, Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where an image goes."""

    kind: str
    """`oci`: a file; `load`: the engine; `push`: a registry."""

    place: str
    """The file, the name in the engine, or the reference."""

    @property
    def option(self) -> str:
        """As buildx's `--output` has it. zstd: a node unpacks it several times faster than gzip."""
        packing = "compression=zstd,oci-mediatypes=true"
        if self.kind == "oci":
            return f"type=oci,dest={self._beside},{packing}"
        # What only passes through on its way to a registry need not be kept in this engine, nor unpacked in it, which
        # takes 5 GB: the builder pushes. `push=` is BuildKit's own short form; `push=true` makes buildx have the engine
        # push an image that is not there, and `unpack=false` is overruled by the engine (buildx 0.13, Docker 26).
        return f"type=image,name={self.place},{packing}" + (",push=,store=false" if self.kind == "push" else "")

    @property
    def _beside(self) -> Path:
        return Path(f"{self.place}.building-{os.getpid()}")

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Let the file that the block builds take its place if the block ends well: buildx empties one at its start.

        Raises:
            Failure: Exit.STORAGE, when the disk refuses; what was in the place is then still there.
        """
        try:
            yield
            if self.kind == "oci":
                self._take_place()
        finally:
            if self.kind == "oci":
                self._beside.unlink(missing_ok=True)

    def _take_place(self) -> None:
        try:
            with self._beside.open("rb") as file:
                os.fsync(file.fileno())
            self._beside.replace(self.place)
        except OSError as error:
            raise Failure(Exit.STORAGE, f"cannot write {self.place}: {error.strerror}") from error

    def require_arrived(self, digest: str) -> None:
        """Ask whoever keeps the image whether it has what was built: another builder may read the options otherwise.

        Raises:
            Failure: Exit.HOST, when the name stands for something else; whatever asking can fail of, see
                `remote.explain`.
        """
        if self.kind == "load":
            found, keeper = _in_engine(self.place), "engine"
            hint = (
                "another builder keeps what it builds to itself: unset BUILDX_BUILDER, or `docker buildx use default`"
            )
        elif self.kind == "push":
            found, keeper = remote.digest_of(remote.reference(self.place)), "registry"
            hint = "was it pushed by another at the same time? Otherwise `--output load`, then `nox -s push`"
        else:
            return
        if found != digest:
            raise Failure(
                Exit.HOST,
                f"{self.place} in the {keeper} is not what was built",
                details=[f"{'built':<8} {digest}", f"{keeper:<8} {found or 'has none of that name'}"],
                hint=hint,
            )


def _in_engine(name: str) -> str | None:
    """The digest of an image in the engine; None if it has none of that name."""
    try:
        return remote.docker("image", "inspect", "--format", "{{.Id}}", name).strip()
    except Failure as failure:
        if failure.code is not Exit.INPUT:
            raise
        return None


def read(text: str, variant: str) -> Output:
    """Read `--output`: `oci:FILE`, `load`, `load:NAME` or `push:REF`.

    Raises:
        Failure: Exit.USAGE, when it is none of them, a folder, or names a digest; Exit.STORAGE, when the file's folder
            cannot be written.
    """
    kind, colon, where = text.partition(":")
    if kind == "oci" and where:
        path = Path(where).absolute()
        if path.is_dir():
            raise Failure(Exit.USAGE, f"`--output {text}` is a folder", hint="`oci:FILE` names the archive to write")
        if not os.access(path.parent, os.W_OK):
            raise Failure(
                Exit.STORAGE, f"`--output {text}`: the folder {path.parent} is not there or cannot be written"
            )
        return Output(kind=kind, place=str(path))
    if (kind == "load" and bool(where) == bool(colon)) or (kind == "push" and where):
        name = remote.reference(where or f"dflash:{variant}")
        if name.digest is not None:
            raise Failure(
                Exit.USAGE,
                f"`--output {text}` names a digest, which the build is to find out",
                hint="name a tag instead",
            )
        return Output(kind=kind, place=str(name))
    raise Failure(Exit.USAGE, f"`--output {text}` is no place for an image", hint="`oci:FILE`, `load` or `push:REF`")
