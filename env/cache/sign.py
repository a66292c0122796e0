"""Whom a sealed cache is believed from: keys that people have (`ssh-keygen -Y`), or a list of what was sealed here.

A folder of trust holds `allowed_signers` (as ssh-keygen(1) describes it, for the namespace `dflash-cache`), `known`
(the sha256 of manifests that this user sealed or took over, one a line) and `policy`, one word:

    signed     only what an allowed signer has signed
    known      that, and what was sealed here (the default)
    unsigned   anything that is whole: for a machine where nobody else can put caches

A signature that is there and wrong is refused under every policy.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from env.errors import Exit, Failure

NAMESPACE = "dflash-cache"
"""What a signature is for: one made with the same key for anything else does not count."""

POLICIES = ("signed", "known", "unsigned")
SECONDS = 60.0
"""An agent may ask its user to touch a key, and gets this long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What is believed."""

    policy: str = "known"
    """One of `POLICIES`."""

    signers: tuple[Path, ...] = ()
    """Files of allowed signers."""

    known: frozenset[str] = frozenset()
    """The sha256 of manifests that were sealed here or taken over."""


def trust(folders: Sequence[Path], *, policy: str | None = None) -> Trust:
    """What the folders of trust say; `policy` is what a flag says, and counts more.

    Raises:
        Failure: Exit.CACHE, when one can be written by others, or a policy is none.
    """
    found, signers, known = None, [], set()
    for folder in folders:
        for name in ("policy", "allowed_signers", "known"):
            _require_safe(folder / name)
        if found is None:
            found = _text(folder / "policy").strip() or None
        if (folder / "allowed_signers").is_file():
            signers.append(folder / "allowed_signers")
        known |= {line.split()[0] for line in _text(folder / "known").splitlines() if line.strip()}
    chosen = policy or found or "known"
    if chosen not in POLICIES:
        raise Failure(Exit.CACHE, f"`{chosen}` is no policy for caches; there are {', '.join(POLICIES)}")
    return Trust(policy=chosen, signers=tuple(signers), known=frozenset(known))


def _require_safe(path: Path) -> None:
    """What says whom to believe must be writable by nobody else than us and root, or it says nothing."""
    for place in (path, path.parent):
        try:
            status = place.lstat()
        except OSError:
            continue
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise Failure(
                Exit.CACHE,
                f"{place} can be changed by other users, so it cannot say whom to trust",
                hint=f"`chmod go-w {place}`, and make it yours",
            )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(Exit.CACHE, f"cannot read {path}: {error}") from error


def sign(manifest: bytes, key: Path) -> bytes:
    """The signature of a manifest with a private key, or with a public one whose private half an agent holds.

    Raises:
        Failure: Exit.USAGE, with what ssh-keygen said.
    """
    return _keygen(
        ["-Y", "sign", "-n", NAMESPACE, "-f", str(key)],
        manifest,
        Failure(
            Exit.USAGE,
            f"cannot sign with {key}",
            hint="`--key` takes a private key, or a public one that an agent holds",
        ),
    )


def check(manifest: bytes, signature: bytes | None, believed: Trust, place: str) -> str:
    """Who vouches for a manifest, in words.

    Raises:
        Failure: Exit.CACHE, when nobody does as the policy wants it, or the signature is wrong.
    """
    if signature is not None:
        who = _signer(manifest, signature, believed, place)
        if who is not None:
            return f"signed by {who}"
    name = hashlib.sha256(manifest).hexdigest()
    if believed.policy == "known" and name in believed.known:
        return "sealed here"
    if believed.policy == "unsigned":
        return "unsigned, as the policy allows"
    wanted = "only signed ones are used" if believed.policy == "signed" else "and it was not sealed here"
    raise Failure(
        Exit.CACHE,
        f"{place} is not signed by anyone who is trusted; {wanted}",
        details=[f"a cache is code that runs as you; the manifest's sha256 is {name}"],
        hint="name its signer in trust/allowed_signers, take it over with `nox -s cache -- trust FOLDER`, "
        "or pass `--allow-unsigned`",
    )


def _signer(manifest: bytes, signature: bytes, believed: Trust, place: str) -> str | None:
    """Who signed; None if no signer is trusted at all, but the manifest itself is known."""
    if not believed.signers:
        if believed.policy == "unsigned":
            _require_consistent(manifest, signature, place)
            return None
        if hashlib.sha256(manifest).hexdigest() in believed.known:
            return None
        raise Failure(
            Exit.CACHE,
            f"{place} is signed, but there is no list of signers who are trusted",
            hint="put its signer's line into trust/allowed_signers (see ssh-keygen(1))",
        )
    refused = Failure(
        Exit.CACHE,
        f"the signature of {place} is not that of a trusted signer over this manifest",
        hint="get the cache again from where it was sealed; do not use this one",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "signature"
        file.write_bytes(signature)
        for signers in believed.signers:
            common = ["-n", NAMESPACE, "-s", str(file), "-f", str(signers)]
            try:
                # verified over the bytes that were parsed, never over the file, which may have changed since
                found = _keygen(["-Y", "find-principals", *common], manifest, refused).decode("utf-8", "replace")
                for who in found.splitlines():
                    _keygen(["-Y", "verify", "-I", who, *common], manifest, refused)
                    return who
            except Failure as failure:
                if failure.code is not Exit.CACHE:
                    raise
                refused = failure
    raise refused


def _require_consistent(manifest: bytes, signature: bytes, place: str) -> None:
    """A signature by whomever must at least be one over this manifest; it is skipped where ssh-keygen cannot run."""
    refused = Failure(
        Exit.CACHE,
        f"the signature of {place} is not one over this manifest",
        hint="get the cache again from where it was sealed; do not use this one",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "signature"
        file.write_bytes(signature)
        try:
            _keygen(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(file)], manifest, refused)
        except Failure as failure:
            if failure.code is Exit.CACHE:
                raise


def _keygen(arguments: Sequence[str], data: bytes, refusal: Failure) -> bytes:
    try:
        done = subprocess.run(
            ["ssh-keygen", *arguments], input=data, capture_output=True, timeout=SECONDS, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Failure(
            Exit.HOST,
            "there is no `ssh-keygen`, which checks signatures",
            hint="install it (`apt-get install openssh-client`)",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Failure(Exit.HOST, f"ssh-keygen did not answer within {SECONDS:g} s") from error
    if done.returncode == 0:
        return done.stdout
    said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    if any("No user exists for uid" in line for line in said):
        raise Failure(
            Exit.HOST,
            f"ssh-keygen, which checks signatures, does not run for a user id without a passwd entry ({os.getuid()})",
            hint="run as a user with one, or take the cache over beforehand (`nox -s cache -- trust FOLDER`)",
        )
    raise Failure(refusal.code, refusal.message, details=said[-3:], hint=refusal.hint)


def remember(manifest: bytes, folder: Path, note: str) -> None:
    """Write down that a manifest is known, in a folder of trust that is made if need be.

    Raises:
        Failure: Exit.STORAGE, when it cannot be written.
    """
    line = f"{hashlib.sha256(manifest).hexdigest()} {re.sub(r'[^ -~]+', ' ', note)}\n"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "known", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())  # one write, so that two sealers cannot mix their lines
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Failure(Exit.STORAGE, f"cannot write {folder / 'known'}: {error.strerror}") from error
