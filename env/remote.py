"""Images as the programs that people have see them: `docker` with buildx, and cosign; their words become sentences.

Nothing here talks to an engine or a registry by itself. What the programs print on failure decides the exit code, so
each pattern below was read off the program that prints it (Docker 26, buildx 0.13, cosign 2.5).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.errors import Exit, Failure

_REFERENCE = re.compile(
    r"(?P<name>"
    # a first part with a dot or a port is a registry's, and may have capitals
    r"(?:(?:[A-Za-z0-9][A-Za-z0-9-]*(?:\.[A-Za-z0-9][A-Za-z0-9-]*)+(?::[0-9]+)?|[A-Za-z0-9][A-Za-z0-9-]*:[0-9]+)/)?"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)

_REASONS: tuple[tuple[re.Pattern[str], Exit, str, str | None], ...] = (
    # order matters: a full disk also ends transfers, and an engine that is gone also refuses connections
    (
        re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE),
        Exit.STORAGE,
        "the container engine's disk is full",
        "make room (`docker system df` shows what takes it), then run the same command again",
    ),
    (
        re.compile(
            r"Cannot connect to the Docker daemon|docker daemon is not running|docker\.sock|error during connect"
        ),
        Exit.HOST,
        "the container engine does not answer",
        "start it (`systemctl start docker`), become a member of its group, or set DOCKER_HOST",
    ),
    (
        re.compile(r"x509:|tls: [^:]*certificate|HTTP response to HTTPS client"),
        Exit.HOST,
        "the registry's certificate is not believed here, or it has none",
        "give the engine its CA (`/etc/docker/certs.d/REGISTRY/ca.crt`), or name it in `insecure-registries`",
    ),
    (
        re.compile(
            # a certificate that is not believed says `failed to verify`, too
            r"unexpected (commit )?digest|failed to verify(?! certificate)|digest mismatch|size validation failed"
            r"|wrong diff id"
        ),
        Exit.INPUT,
        "the registry serves other bytes than the digest names: they were changed or damaged there",
        "push the image again from where it was built, and find out who can write to that registry",
    ),
    (
        re.compile(r"no matching signatures|invalid signature|no signatures found|no matching attestations"),
        Exit.INPUT,
        "no signature by that key is there",
        None,
    ),
    (
        re.compile(
            r"connection refused|connection reset|no such host|i/o timeout|TLS handshake|network is unreachable"
            r"|server misbehaving|context deadline exceeded|(?<![\d.])50[0234] |name resolution"
            r"|no route to host|unexpected EOF",
            re.IGNORECASE,
        ),
        Exit.UNREACHABLE,
        "the registry does not answer",
        "check its address and the network; the same command goes on where it was stopped",
    ),
    (
        re.compile(r"unauthorized|denied|authentication required|(?<![\d.])40[13] |no basic auth", re.IGNORECASE),
        Exit.INPUT,
        "the registry does not let us in",
        "`docker login REGISTRY`; cosign reads the same file",
    ),
    (
        re.compile(
            r"not found|manifest unknown|MANIFEST_UNKNOWN|NAME_UNKNOWN|No such image|does not exist", re.IGNORECASE
        ),
        Exit.INPUT,
        "there is no such image",
        "check its name and digest",
    ),
    (
        re.compile(r"decryption failed|reading key|loading public key|loading private key|no such file|invalid PEM"),
        Exit.USAGE,
        "that key cannot be read",
        "`cosign generate-key-pair` makes a pair; COSIGN_PASSWORD holds its password",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The name of an image in a registry."""

    name: str
    """Registry and repository: `registry.example/team/dflash`."""
    tag: str | None
    digest: str | None

    @property
    def local(self) -> bool:
        """Whether it names no registry: `dflash:cu130`, as `nox -s image` calls what it builds into the engine."""
        first, slash, _ = self.name.partition("/")
        return not (slash and (first == "localhost" or "." in first or ":" in first))

    def __str__(self) -> str:
        if self.digest is not None:  # a digest decides, so a tag beside it would only look as if it counted
            return f"{self.name}@{self.digest}"
        return f"{self.name}:{self.tag or 'latest'}"

    def pinned(self, digest: str) -> Reference:
        """The same repository, by digest."""
        return Reference(name=self.name, tag=None, digest=digest)


def reference(text: str) -> Reference:
    """Read a reference.

    Raises:
        Failure: Exit.USAGE, when it is none.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise Failure(
            Exit.USAGE, f"`{text}` is no reference of an image", hint="as in `registry.example/team/dflash@sha256:…`"
        )
    return Reference(name=match["name"], tag=match["tag"], digest=match["digest"])


def docker(*arguments: str, show: bool = False) -> str:
    """Run the docker command and return what it prints; with `show`, that goes to the user's standard error instead.

    Raises:
        Failure: it is not installed, or failed; the exit code says of what kind.
    """
    return _run(["docker", *arguments], {}, show=show)


def cosign(*arguments: str) -> str:
    """Run cosign, which keeps nothing in HOME here, and return what it prints.

    Raises:
        Failure: it is not installed, or failed.
    """
    # Without a password variable it would wait for one to be typed.
    return _run(["cosign", *arguments], {"COSIGN_PASSWORD": os.environ.get("COSIGN_PASSWORD", "")})


def _run(command: Sequence[str], more: Mapping[str, str], *, show: bool = False) -> str:
    hints = {
        "docker": "install Docker 26 or newer with buildx",
        "cosign": "install cosign 2 (Debian has it from trixie on)",
    }
    if shutil.which(command[0]) is None:
        raise Failure(Exit.HOST, f"there is no `{command[0]}` on the PATH", hint=hints[command[0]])
    environ = {**os.environ, **more, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stderr if show else subprocess.PIPE, stderr=said
        )
        try:
            out, _ = process.communicate()
        finally:
            if process.poll() is None:  # we are being stopped: nothing may go on behind our back
                process.terminate()
                process.wait()
        said.seek(0)
        errors = said.read().decode("utf-8", "replace")
    if process.returncode != 0:
        raise explain(command, process.returncode, errors)
    return (out or b"").decode("utf-8", "replace")


def explain(command: Sequence[str], code: int, errors: str) -> Failure:
    """The `Failure` for a program's last words: what kind it is, and the line that says so."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith("WARNING")]
    for pattern, exit_code, sentence, hint in _REASONS:
        evidence = [line for line in lines if pattern.search(line)]
        if evidence:
            return Failure(exit_code, sentence, details=[_short(evidence[0])], hint=hint)
    words = " ".join(command[:3])
    return Failure(Exit.BUG, f"`{words} …` failed with exit code {code}", details=[_short(line) for line in lines[-4:]])


def _short(line: str) -> str:
    return line if len(line) <= 240 else f"{line[:100]} … {line[-139:]}"


def require_engine() -> None:
    """Refuse before anything else where no engine answers.

    Raises:
        Failure: Exit.HOST.
    """
    docker("version", "--format", "{{.Server.Version}}")


def manifest(image: Reference) -> dict[str, Any]:
    """An image's manifest in its registry, which is what its digest names.

    Raises:
        Failure: it cannot be had; Exit.INPUT when it is not what the digest names, or lists several images.
    """
    text = docker("buildx", "imagetools", "inspect", "--raw", str(image))
    have = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    if image.digest is not None and have != image.digest:
        raise Failure(
            Exit.INPUT, f"the registry serves another manifest for {image.name} than was asked for",
            details=[f"asked for {image.digest}", f"was given {have}"],
        )  # fmt: skip
    found: dict[str, Any] = json.loads(text)
    if "layers" not in found:
        raise Failure(
            Exit.INPUT,
            f"{image} is a list of images, not one image",
            hint="name the digest of the one for this platform (`docker buildx imagetools inspect` lists them)",
        )
    return found


def config(image: Reference) -> dict[str, Any]:
    """The configuration of an image in its registry, without pulling a layer.

    buildx holds what it is served against its digest; compare with the pulled image's all the same.
    """
    return dict(json.loads(docker("buildx", "imagetools", "inspect", "--format", "{{json .Image}}", str(image))))


def remote_labels(image: Reference) -> dict[str, str]:
    """The labels of an image in its registry, without pulling a layer."""
    return dict(config(image).get("config", {}).get("Labels") or {})


def local_labels(image: str) -> dict[str, str]:
    """The labels of an image that the engine has."""
    return dict(json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", image)) or {})


def digest_of(image: Reference) -> str:
    """The digest that a tag stands for right now."""
    text = docker("buildx", "imagetools", "inspect", "--raw", str(image))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def require_key(key: Path, option: str) -> None:
    """Refuse a key that is not there by its name, before anything is asked of anyone."""
    if not key.is_file():
        raise Failure(
            Exit.USAGE,
            f"`{option} {key}`: there is no such file",
            hint="`cosign generate-key-pair` makes cosign.key and cosign.pub",
        )
