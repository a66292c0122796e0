"""What a build needs to reach the package index, as secrets: its address, a CA bundle, credentials, proxies."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from env import index
from env.building import say
from env.errors import Exit, Failure

PLACES = {
    "UV_DEFAULT_INDEX": index.DEFAULT_INDEX,
    "UV_INDEX": index.MORE_INDEXES,
    "UV_FIND_LINKS": ("UV_FIND_LINKS",),
}
"""What the build's uv is told, and the variables, older names among them, that say it here."""

OTHERS = (
    "UV_INDEX_STRATEGY",
    "UV_INSECURE_HOST",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "https_proxy",
    "http_proxy",
    "all_proxy",
    "no_proxy",
)

UNKNOWN = ("SSL_CERT_DIR", "SSL_CLIENT_CERT")
"""What uv heeds, and the build's steps are not given."""

COMMAS = frozenset({"UV_FIND_LINKS", "NO_PROXY", "no_proxy"})
"""Their words stand between commas, the others' between spaces."""

_LOGIN = r"UV_INDEX_\w+_(USERNAME|PASSWORD)"
_ADDRESS = re.compile(r"([\w.-]+=)?https?://", re.IGNORECASE)
"""uv takes an index with a name before it, too: `internal=https://…`."""


def options(environ: Mapping[str, str], settings: Mapping[str, str], folder: Path) -> list[str]:
    """Options of buildx for the secrets. `settings` are pip's. Files go into the folder, which is the caller's.

    Raises:
        Failure: Exit.USAGE, when a file that is named is not there.
    """
    known = index.uv_environment(environ, settings)
    lines = [
        *_places(known),
        *(_line(name, words) for name in OTHERS if (words := _words(known.get(name, "")))),
        # of an index with a name
        *(f"{name}={value}\n" for name, value in known.items() if re.fullmatch(_LOGIN, name)),
    ]
    for name in (name for name in UNKNOWN if known.get(name)):
        say(f"{name} is set, which a build has no secret for: left out")
    found = []
    if lines:
        found += ["--secret", _secret("index", _kept(folder / "index", "".join(lines)))]
    for identifier, variable, default in (
        ("ca", "SSL_CERT_FILE", None),
        ("netrc", "NETRC", Path(environ.get("HOME", "/nonexistent")) / ".netrc"),
    ):
        named = known.get(variable)
        if named and not Path(named).is_file():
            raise Failure(
                Exit.USAGE,
                f"the build needs the secret `{identifier}`, and {variable} names {named}, which is no file",
                hint=f"mend {variable}, or unset it",
            )
        if named or (default is not None and default.is_file()):
            found += ["--secret", _secret(identifier, Path(named) if named else Path(str(default)))]
    return found


def _places(known: Mapping[str, str]) -> list[str]:
    """Lines for the addresses; what a build cannot see is left out aloud, by its variable: it may hold a password."""
    lines = []
    for name, variables in PLACES.items():
        told = [(variable, word) for variable in variables for word in _words(known.get(variable, ""))]
        if name == "UV_DEFAULT_INDEX":
            told = told[:1]  # as uv does, which lets the newer name win
        for variable in dict.fromkeys(variable for variable, word in told if not _ADDRESS.match(word)):
            say(f"{variable} names a place that is no http address, which a build cannot see: left out")
        if words := [word for _, word in told if _ADDRESS.match(word)]:
            lines.append(_line(name, words))
    return lines


def _line(name: str, words: Sequence[str]) -> str:
    return f"{name}={(',' if name in COMMAS else ' ').join(words)}\n"


def _words(value: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", value) if word]


def _secret(identifier: str, path: Path) -> str:
    return f"id={identifier},src={path}"


def _kept(path: Path, text: str) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path
