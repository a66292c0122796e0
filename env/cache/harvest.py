"""Bring back what only the real device could decide: the kernels' winners, sealed as a new cache that names its parent.

A baked kernel comes with several configurations, and the first step on a card benchmarks them. What won stands in the
working copy, as small `.best_config` files; sealed together with what the working copy was made from, it spares every
other machine that benchmark.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from env.cache import examine, normal, places, sign
from env.cache.manifest import FILES, Manifest
from env.cache.plain import read_plain
from env.cache.seal import CODE, seal, unwritable
from env.cache.store import Choice
from env.errors import Exit, Failure

WINNER = ".best_config"
LARGEST = 1 << 16
"""Bytes of a winner at most; it is a line of JSON."""


def news(choice: Choice) -> dict[str, bytes]:
    """The winners in a seeded directory that its sealed cache lacks or has otherwise, by their names, without times."""
    assert choice.manifest is not None
    found = {}
    for path in _winners(choice.path):
        name = path.relative_to(choice.path).as_posix()
        data = normal.best_config(read_plain(path, LARGEST))
        known = choice.manifest.files.get(name)
        if known is None or hashlib.sha256(data).hexdigest() != known.sha256:
            found[name] = data
    return found


def harvest(choice: Choice, home: Path, *, key: Path | None = None) -> tuple[Path, Manifest] | None:
    """Seal a choice's cache anew with the winners that its directory has found; None when it has found none.

    To be called after a real step that hit everything that was promised. The new cache has the same identity and keys,
    its own digest, and its parent's; a launch prefers it. It is trusted as a bake's is: noted as sealed here, and
    signed with `key`.

    Raises:
        Failure: Exit.CACHE, when the choice is no seeded one, or its sealed cache is not whole any more; Exit.USAGE,
            when the policy asks for a signature and no trusted key is given; Exit.STORAGE, when it cannot be written.
    """
    sealed, manifest = choice.sealed, choice.manifest
    if sealed is None or manifest is None:
        raise Failure(Exit.CACHE, f"{choice.path} was not made from a sealed cache, so nothing can be brought back")
    found = news(choice)
    if not found:
        return None
    believed = sign.trust(places.trust_folders(home=home))
    _require_believable(believed, key)
    examine.examine(sealed, believed)  # its bytes go into another cache that is trusted
    try:
        with tempfile.TemporaryDirectory(prefix=".harvest.", dir=home) as folder:
            source = Path(folder) / FILES
            for name in manifest.files:
                _put(source / name, (sealed / FILES / name).read_bytes())
            for name, data in found.items():
                _put(source / name, data)
            return seal(
                source,
                home / "sealed",
                graph_id=manifest.graph_id,
                gpu_id=manifest.gpu_id,
                gpu=manifest.gpu,
                factors=manifest.factors,
                counts=manifest.counts,
                keys=manifest.keys,
                details=examine.read_details(sealed, manifest),
                parent=manifest.digest,
                key=key,
                trust=home / "trust",
            )
    except OSError as error:
        raise unwritable(home, error) from error


def _winners(folder: Path) -> Iterator[Path]:
    for place in sorted(folder.iterdir()):
        if CODE.fullmatch(place.name) and place.is_dir():
            yield from sorted(path for path in place.iterdir() if path.name.endswith(WINNER))


def _require_believable(believed: sign.Trust, key: Path | None) -> None:
    """A launch prefers what is sealed here to its parent: if it were then refused, nothing would start any more."""
    if believed.policy != "signed":
        return
    if key is None:
        raise Failure(
            Exit.USAGE,
            "only signed caches are used here, so one without a signature would not be",
            hint="add `--key FILE`, the private key of a signer in trust/allowed_signers",
        )
    probe = b"a probe: whether this key's owner is trusted here"
    sign.check(probe, sign.sign(probe, key), believed, f"what {key} signs")


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
