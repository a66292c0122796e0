"""The operating system under an image: Debian and what training needs of it, made from Debian's packages.

For where no public registry can be reached. The same packages give the same bytes, on any day and any machine: what
names the machine, the minute or the mirror is taken out (`docker/base-clean`), and times stand still. The list of the
packages, with the hash of each, decides the base; its sha256 is a label of it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env import oci
from env.building import beside, exclusively, run, say
from env.errors import Exit, Failure
from env.variants import ROOT

SUITE = "bookworm"
EPOCH = 1735689600
"""2025-01-01: the time of every file that a build makes, in the base and in the layers above. It never moves: a layer
must not change for having been built later."""

PACKAGES = (
    "ca-certificates",  # to fetch a target's weights, where a network is allowed
    "g++",  # inductor's kernels for CPUs
    "gcc",  # Triton's launchers
    "openssh-client",  # `ssh-keygen -Y`: signatures of sealed caches
    "python3",
    "python3-dev",  # Python.h, for Triton's launchers
    "python3-venv",
    "tini",  # process 1: it passes signals on and reaps what is left over
)

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Machines as Python calls them, and as Debian and OCI do."""

LIST = "usr/share/dflash/base-packages.txt"
PACKAGES_LABEL = "dflash.base.packages"
HOME = ROOT / ".nox" / "images"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A base that is there."""

    layout: Path
    """Its OCI layout."""

    digest: str
    """Of its manifest."""

    @property
    def reference(self) -> str:
        """What a build calls it."""
        return f"oci-layout://{self.layout}@{self.digest}"


def place() -> Path:
    """Where this machine's base lies, or will lie."""
    return HOME / f"base-{architecture()}"


def architecture() -> str:
    """The machine's architecture, as OCI calls it."""
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def ensure() -> Base:
    """The base that was made here; made now if there is none.

    Raises:
        Failure: see `make`.
    """
    found = place()
    return Base(layout=found, digest=oci.Layout(found).image(architecture()).digest) if found.is_dir() else make()


def mirrored(apt: Path = Path("/etc/apt")) -> str:
    """Where this machine's apt gets Debian from, without the archive's name: the address of a mirror.

    Raises:
        Failure: Exit.HOST, when its sources name none.
    """
    sources = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    text = "\n".join(source.read_text() for source in sources if source.is_file())
    found = re.search(r"^(?:URIs:|deb(?: +\[[^]]*\])?) +(https?://\S+?)/debian/?(?:\s|$)", text, re.MULTILINE)
    if found is None:
        message = f"the sources of apt in `{apt}` name no mirror of Debian"
        raise Failure(Exit.HOST, message, hint="name one: `nox -s base -- --mirror ADDRESS`")
    return found[1]


def make(mirror: str | None = None, *, out: Path | None = None) -> Base:
    """Make the base anew from what the mirror (by default apt's) has now, and put it in the place of the old one.

    Raises:
        Failure: Exit.USAGE, when something else is in that place; Exit.HOST, without mmdebstrap, zstd or root;
            Exit.UNREACHABLE, when no mirror answers; Exit.STORAGE, when the disk is full.
    """
    out = out or place()
    _require_replaceable(out)
    _require()
    with exclusively(out), beside(out) as building:
        building.mkdir(parents=True)
        root = building / "root.tar"
        _bootstrap(root, mirror or mirrored())
        listed = _listed(root)
        layer = building / "layer.tar.zst"
        # one level, one program: another zstd may pack otherwise, and the digest is over what is packed
        run(["zstd", "--quiet", "-9", "-T0", str(root), "-o", str(layer)], os.environ)
        with root.open("rb") as file:
            content = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        root.unlink()
        made = building / "layout"
        digest = oci.write(made, [(layer, content)], config(listed), f"dflash-base:{SUITE}")
        for part in (*made.iterdir(),):
            part.rename(building / part.name)
        made.rmdir()
        (building / "packages.txt").write_bytes(listed)
    return Base(layout=out, digest=digest)


def config(listed: bytes) -> dict[str, Any]:
    """The image's configuration, without its layers; `listed` is the list of packages."""
    stamp = "2025-01-01T00:00:00Z"
    return {
        "architecture": architecture(),
        "os": "linux",
        "created": stamp,
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Labels": {PACKAGES_LABEL: f"sha256:{hashlib.sha256(listed).hexdigest()}"},
        },
        "history": [{"created": stamp, "created_by": f"Debian {SUITE}: {' '.join(PACKAGES)}"}],
    }


def _bootstrap(root: Path, mirror: str) -> None:
    """Have mmdebstrap install the packages into a new file system, and pack it as a tar."""
    sources = [
        f"deb {mirror}/debian {SUITE} main",
        f"deb {mirror}/debian {SUITE}-updates main",
        f"deb {mirror}/debian-security {SUITE}-security main",
    ]
    command = [
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=apt",
        "--format=tar",
        "--skip=output/dev",  # whoever runs an image makes its own, and only root could unpack these
        f"--include={','.join(PACKAGES)}",
        '--aptopt=Acquire::Languages "none"',
        "--dpkgopt=force-unsafe-io",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/info/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        # while apt still knows where each package came from
        f"--customize-hook={ROOT}/docker/base-clean",
        SUITE,
        str(root),
        *sources,
    ]
    run(command, _environ(os.environ))
    # left out with what is in it; were it not there, the first step of a build would make it, with its own time
    with tarfile.open(root, "a", format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("./dev")
        folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o755, EPOCH
        archive.addfile(folder)


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the build: the proxy is the user's, language, time and umask nobody's."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("LC_", "APT_", "DEB", "PYTHON"))}
    path = f"{environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return kept | {"LANG": "C.UTF-8", "TZ": "UTC", "PATH": path, "SOURCE_DATE_EPOCH": str(EPOCH), "SUITE": SUITE}


def _listed(root: Path) -> bytes:
    """The list of packages, out of the packed file system."""
    with tarfile.open(root) as archive:
        found = archive.extractfile(f"./{LIST}")
        assert found is not None
        return found.read()


def _require_replaceable(out: Path) -> None:
    """Refuse a place that holds anything but a base: what was there is removed."""
    if out.is_dir() and ((out / "oci-layout").is_file() or not any(out.iterdir())):
        return
    if out.exists():
        raise Failure(
            Exit.USAGE,
            f"{out} holds something else than a base, and it would be removed for one",
            hint="`--out` takes a folder that is not there yet, is empty, or holds an older base",
        )


def _require() -> None:
    lacking = [name for name in ("mmdebstrap", "zstd") if shutil.which(name) is None]
    if lacking:
        raise Failure(
            Exit.HOST,
            f"making a base needs {' and '.join(lacking)}",
            hint="`apt-get install mmdebstrap zstd`, or give an image of your own: `--base REF@sha256:…`",
        )
    if os.geteuid() != 0:
        raise Failure(
            Exit.HOST,
            f"making a base needs root, and this is user {os.getuid()}",
            hint="run `nox -s base` as root once, or give an image of your own: `--base REF@sha256:…`",
        )


def main(argv: Sequence[str]) -> int:
    """`python -m env base`: make the base and print its digest.

    Raises:
        Failure: see `make`.
    """
    parser = argparse.ArgumentParser(
        prog="nox -s base --", description="Make the operating system of the images from Debian's packages."
    )
    parser.add_argument("--mirror", help="where Debian's packages come from (default: where apt gets them)")
    parser.add_argument("--out", help="folder of the OCI layout (default: where `nox -s image` looks)")
    options = parser.parse_args(list(argv))
    if options.out == "":  # as of a variable that is not set; as a path, it would be the current folder
        raise Failure(Exit.USAGE, "`--out` is empty", hint="name the folder of the OCI layout, or leave `--out` out")
    made = make(options.mirror, out=Path(options.out).absolute() if options.out else None)
    size = sum(layer["size"] for layer in oci.Layout(made.layout).image(architecture()).layers)
    count = len((made.layout / "packages.txt").read_text().splitlines())
    say(f"{count} packages, {size / 1e6:.0f} MB compressed")
    print(made.reference)
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
