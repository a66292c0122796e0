"""Say pip's settings in uv's words, so that whoever has set up one of the two need not set up the other."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from env.bootstrap import pip_environment

BENDING = frozenset(
    {
        "UV_BUILD_CONSTRAINT",
        "UV_CONSTRAINT",
        "UV_EXCLUDE",
        "UV_EXCLUDE_NEWER",
        "UV_NO_BINARY",
        "UV_NO_VERIFY_HASHES",
        "UV_OVERRIDE",
        "UV_PRERELEASE",
        "UV_RESOLUTION",
        "UV_TORCH_BACKEND",
    }
)
"""uv's variables that change what is installed rather than where it comes from: a lock leaves them nothing to say."""

DEFAULT_INDEX = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
MORE_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL")
MORE_WHEELS = ("UV_FIND_LINKS",)


def uv_environment(
    environ: Mapping[str, str], pip: Mapping[str, str], *, only_main_index: bool = False
) -> dict[str, str]:
    """The environment for uv: the user's own uv settings first, then pip's (`pip_settings`) where uv has none.

    `only_main_index` is for making locks: what a further index or a folder of wheels on this machine offers must not
    decide what stands in a file that everybody shares.
    """
    left_out = {*BENDING, *(MORE_INDEXES + MORE_WHEELS if only_main_index else ())}
    result = {key: value for key, value in environ.items() if key not in left_out}

    def fill(names: tuple[str, ...], value: str | None) -> None:
        if value and not any(name in environ for name in names):
            result[names[0]] = value

    fill(DEFAULT_INDEX, pip.get("index-url"))
    if not only_main_index:
        if not any(name in environ for name in MORE_INDEXES) and pip.get("extra-index-url"):
            result["UV_INDEX"] = " ".join(pip["extra-index-url"].split())
            # pip knows no order among indexes. Safe with hashes: whichever serves the file, it is the locked one.
            result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
        fill(MORE_WHEELS, ",".join(pip.get("find-links", "").split()))
    fill(("SSL_CERT_FILE",), pip.get("cert") or environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE"))
    fill(("SSL_CLIENT_CERT",), pip.get("client-cert"))
    fill(("UV_INSECURE_HOST",), ",".join(pip.get("trusted-host", "").split()))
    fill(("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"), pip.get("proxy"))
    fill(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), pip.get("proxy"))
    return result


def pip_settings(python: Path) -> dict[str, str]:
    """What that Python's pip goes by here: its variables, then its `install` and `global` configuration."""
    asked = subprocess.run(
        [python, "-m", "pip", "config", "list"],
        env=pip_environment(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    return read_settings(asked.stdout)


def read_settings(listing: str) -> dict[str, str]:
    """Read what `pip config list` prints: lines such as `global.index-url='https://…'`."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, _, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in rank and rank[section] >= found.get(key, (-1, ""))[0]:
            found[key] = (rank[section], str(ast.literal_eval(quoted)))
    return {key: value for key, (_, value) in found.items()}
