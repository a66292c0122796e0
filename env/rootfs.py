"""`nox -s rootfs -- IMAGE OUT.tar.zst`: the root file system archive of an LXC container, made from an image.

What an image has beside its files (variables, user, working folder, entrypoint, command) becomes /sbin/init, which is
what LXC starts. Nothing of the image is run to make it, and the same image gives the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from env import remote
from env.building import say, terminable
from env.errors import Exit, Failure

EPOCH = 1735689600
"""Time stamp of the files that are made here: 2025-01-01."""

ENGINES_OWN = frozenset(
    (
        *(".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "proc", "sys"),
        *("etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"),
    )
)
"""What the engine puts into every container: with the time of day, and for itself."""

HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
SETTINGS = (
    "# Read by /sbin/init, as shell: `export NAME=VALUE`, and `set -- COMMAND` for another command than the image's.\n"
)


def main(argv: Sequence[str]) -> int:
    """`nox -s rootfs -- IMAGE OUT.tar.zst`: write the archive and print its digest."""
    parser = argparse.ArgumentParser(
        prog="nox -s rootfs --", description="Make an LXC container's root file system archive from an image."
    )
    parser.add_argument("image", metavar="IMAGE", help="an image of the engine: what `nox -s pull` fetched")
    parser.add_argument("out", metavar="OUT.tar.zst", type=Path, help="the archive")
    options = parser.parse_args(argv)
    if options.out.is_dir():
        raise Failure(Exit.USAGE, f"{options.out} is a folder", hint="name the archive in it: `OUT.tar.zst`")
    if shutil.which("zstd") is None:
        raise Failure(Exit.HOST, "there is no `zstd` on the PATH", hint="`apt install zstd` brings it")
    with terminable():
        remote.require_engine()
        config, number = inspected(options.image)
        say(f"writing {options.out}")
        with (
            created(options.image) as container,
            written(options.out) as compressed,
            exported(container) as root,
        ):
            copy(root, compressed, config, number)
    with options.out.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, sha256 {digest}")
    return int(Exit.DONE)


def inspected(image: str) -> tuple[Mapping[str, Any], str]:
    """An image's configuration and its id.

    Raises:
        Failure: Exit.INPUT, when the engine does not have it.
    """
    try:
        found = json.loads(remote.docker("image", "inspect", image))[0]
    except Failure as failure:
        if failure.code is not Exit.INPUT:
            raise
        raise Failure(
            Exit.INPUT,
            f"the container engine has no image {image}",
            hint="`nox -s pull -- REF@sha256:… --key cosign.pub` verifies and fetches it",
        ) from failure
    return found["Config"], found["Id"]


def init(config: Mapping[str, Any], number: str) -> str:
    """The text of /sbin/init: the image's variables and user, then its entrypoint as process 1."""
    variables = (each.partition("=") for each in config.get("Env") or [])
    user, _, group = (config.get("User") or "0:0").partition(":")
    entrypoint, arguments = config.get("Entrypoint") or [], config.get("Cmd") or []
    become = f"exec setpriv --reuid {user} --regid {group or user} --clear-groups --no-new-privs --inh-caps=-all --"
    lines = [
        "#!/bin/sh",
        f"# From the image {number}.",
        *(f"export {name}={shlex.quote(value)}" for name, _, value in variables),
        "[ ! -r /etc/dflash.env ] || . /etc/dflash.env",
        f"cd {shlex.quote(config.get('WorkingDir') or '/')}",
        f"[ $# -gt 0 ] || set -- {shlex.join(arguments)}",
        f'{become} {shlex.join(entrypoint)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def copy(source: IO[bytes], target: IO[bytes], config: Mapping[str, Any], number: str) -> None:
    """Copy an exported root as it comes, leave out the engine's own files, and add what LXC needs.

    Member by member, since `tar --delete` has been seen to damage the files behind the one that it removes.

    Raises:
        Failure: Exit.INPUT, when the export ends early.
    """
    sbin, plain = "sbin", cast("IO[bytes]", _Plain(target))
    try:
        with tarfile.open(fileobj=source, mode="r|") as exported, tarfile.open(fileobj=plain, mode="w") as made:
            for member in exported:
                name = member.name.rstrip("/")
                if name == "sbin" and member.issym():  # as on Debian; a folder of that name would replace the link
                    sbin = "usr/sbin"
                if name in ENGINES_OWN or name in ("sbin/init", "usr/sbin/init"):
                    continue
                if name in ("", ".", "etc"):  # the engine has put its files there just now
                    member.mtime = EPOCH
                made.addfile(member, exported.extractfile(member) if member.isreg() else None)
            for name in ("dev", "proc", "sys"):
                made.addfile(_folder(name))
            for name, text, mode in (
                (f"{sbin}/init", init(config, number), 0o755),
                ("etc/dflash.env", SETTINGS, 0o644),
                ("etc/hosts", HOSTS, 0o644),
            ):
                made.addfile(*_file(name, text, mode))
    except (tarfile.TarError, EOFError) as error:
        raise Failure(Exit.INPUT, f"the engine's export of the image ends early: {error}") from error


class _Plain:
    """A pipe that knows how much has gone into it. tarfile's own stream would write on when it is being stopped."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._at = pipe, 0

    def write(self, data: bytes) -> int:
        """Write all of it."""
        self._at += len(data)
        return self._pipe.write(data)

    def tell(self) -> int:
        """Bytes so far."""
        return self._at


def _folder(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, EPOCH
    return member


def _file(name: str, text: str, mode: int) -> tuple[tarfile.TarInfo, io.BytesIO]:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), mode, EPOCH
    return member, io.BytesIO(content)


@contextlib.contextmanager
def created(image: str) -> Iterator[str]:
    """A container of an image, never started, gone when the block ends."""
    container = remote.docker("create", "--network", "none", image).strip()
    try:
        yield container
    finally:
        with contextlib.suppress(Failure):
            remote.docker("rm", "--force", container)


@contextlib.contextmanager
def exported(container: str) -> Iterator[IO[bytes]]:
    """What the engine exports of a container, as it comes; whole, when the block ends well.

    Raises:
        Failure: Exit.INPUT, when the engine has not said that it was all.
    """
    process = subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout
        while process.stdout.read(1 << 16):  # what pads the archive; the engine would fail of nobody's reading it
            pass
        if process.wait() != 0:  # an archive that was cut between two members, or in a header, reads as a shorter one
            raise Failure(
                Exit.INPUT,
                f"the engine's export of the image ends early: `docker export` ended with exit code "
                f"{process.returncode}; its words are above",
            )
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


@contextlib.contextmanager
def written(out: Path) -> Iterator[IO[bytes]]:
    """A pipe whose content, compressed, becomes a file when the block ends well; otherwise nothing is left.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses.
    """
    part = out.with_name(f".{out.name}.part")
    process = None
    try:
        # one thread decides nothing here: zstd's output is the same with any number of them
        process = subprocess.Popen(
            ["zstd", "--quiet", "--force", "--threads=0", "-3", "-o", str(part)],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # zstd has gone, and says why
            yield process.stdin
            process.stdin.close()
        said = process.stderr.read().decode("utf-8", "replace").strip()
        if process.wait() != 0:
            raise Failure(Exit.STORAGE, f"cannot write {out}", details=said.splitlines()[-2:])
        part.replace(out)
    finally:
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        part.unlink(missing_ok=True)
