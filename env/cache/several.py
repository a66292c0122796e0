"""One cache directory for a process that trains on several devices: torch has one for a process, and a bake one each.

The device's index is part of every key, so the caches of several indices lie side by side without touching each other,
and the kernels, which have no index in them, stand there once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from env.cache import places, sign, store
from env.cache.manifest import FAMILIES, Manifest
from env.cache.seed import seed_together


def choose(
    wanted: Sequence[store.Identity], *, environ: Mapping[str, str] | None = None, policy: str | None = None
) -> tuple[store.Choice, ...]:
    """A choice for each of several identities, all of one directory: what is sealed for any of them is copied there.

    A device whose cache is not sealed compiles into the same directory, and its choice says why. One identity, however
    often it is wanted, is chosen for as `store.choose` does.

    Raises:
        Failure: as `store.choose` does.
    """
    environ = os.environ if environ is None else environ
    distinct = {one.cache_id: one for one in wanted}
    if len(distinct) == 1 or environ.get("TORCHINDUCTOR_CACHE_DIR"):
        made = {name: store.choose(one, environ=environ, policy=policy) for name, one in distinct.items()}
        return tuple(made[one.cache_id] for one in wanted)
    home = places.cache_home(environ)
    folders = places.sealed_folders(environ, home.path)
    found = {name: store.fitting(folders, name) for name in distinct}
    sealed = {name: place for name, place in found.items() if place is not None}
    manifests: dict[str, Manifest] = {}
    vouching: dict[str, str] = {}
    if sealed:
        believed = sign.trust(places.trust_folders(environ, home.path), policy=policy)
        path, read, who = seed_together(list(sealed.values()), home.path, believed)
        lock = store.use(path)
        if not path.is_dir():  # freed by a prune just before it was in use
            path, read, who = seed_together(list(sealed.values()), home.path, believed)
        manifests, vouching = dict(zip(sealed, read, strict=True)), dict(zip(sealed, who, strict=True))
    else:
        path = store.cold(home.path, next(iter(distinct.values())))
        lock = store.use(path)
    there = [cache for cache in store.stored(home.path, environ) if cache.kind == "sealed"]
    choices = {}
    for number, (name, one) in enumerate(distinct.items()):
        notices = [home.notice] if home.notice and number == 0 else []
        if name in sealed:
            notices.append(f"compile cache {name[:16]} for {device(one)}, {vouching[name]}")
        else:
            notices += [f"{device(one)}: {line}" for line in store.why_cold(one, there, environ=environ)]
        choices[name] = store.Choice(
            cache_id=name,
            path=path,
            kind="seeded" if name in sealed else "cold",
            manifest=manifests.get(name),
            sealed=sealed.get(name),
            wanted=one,
            notices=tuple(notices),
            lock=lock,
        )
    return tuple(choices[one.cache_id] for one in wanted)


def device(wanted: store.Identity) -> str:
    """The device of an identity, as torch spells it."""
    kind, index = wanted.factors.get("device.type", "cpu"), wanted.factors.get("device.index")
    return f"{kind}" if index is None else f"{kind}:{index}"


def together(manifests: Sequence[Manifest]) -> Manifest:
    """What several caches promise to one process whose devices all take their first step: hits added up, all keys."""
    distinct = list({one.cache_id: one for one in manifests}.values())
    counts = {name: sum(one.counts[name] for one in distinct) for name in distinct[0].counts}
    keys = {family: tuple(sorted({key for one in distinct for key in one.keys[family]})) for family in FAMILIES}
    return dataclasses.replace(distinct[0], counts=counts, keys=keys)
