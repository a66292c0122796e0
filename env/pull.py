"""`nox -s pull`: believe an image first, fetch it then.

A digest says which bytes; the signature says whose; the labels say for what. All three are judged from a few
kilobytes, before the first gigabyte moves, and the labels once more from what was fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from env import gpus, labels, record, remote
from env.building import say, terminable
from env.errors import Exit, Failure


def main(argv: Sequence[str], host: Path = Path("/")) -> int:
    """`nox -s pull -- REF@sha256:… --key cosign.pub`; `host` is where `/proc` and `/sys` lie, for tests."""
    parser = argparse.ArgumentParser(
        prog="nox -s pull --", description="Verify an image by signature and labels, then pull it by digest."
    )
    parser.add_argument("reference", metavar="REF@sha256:…", help="what `nox -s push` printed")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the public key whose signature must be there")
    parser.add_argument("--unsigned", action="store_true", help="take it without a signature, and say so")
    parser.add_argument("--allow-tag", action="store_true", help="take what a tag stands for right now, and say what")
    parser.add_argument("--allow-cold", action="store_true", help="also if no kernels for this host's cards are in it")
    parser.add_argument("--allow-other-lock", action="store_true", help="also if it is of another lock, and say so")
    options = parser.parse_args(argv)
    image = remote.reference(options.reference)
    if image.digest is None and not options.allow_tag:
        raise Failure(
            Exit.USAGE,
            f"{image} is a tag, which can stand for another image tomorrow",
            hint="name the digest that `nox -s push` printed (REF@sha256:…), or pass `--allow-tag`",
        )
    if (options.key is None) == (not options.unsigned):
        raise Failure(
            Exit.USAGE,
            "one of `--key FILE` and `--unsigned` must say what is believed",
            hint="`--key cosign.pub` takes only what the holder of that key has signed",
        )
    if options.key is not None:
        remote.require_key(options.key, "--key")
    with terminable():
        remote.require_engine()
        if image.digest is None:
            image = image.pinned(remote.digest_of(image))
            say(f"{options.reference} stands for {image} right now")
        size = sum(int(layer["size"]) for layer in remote.manifest(image)["layers"])
        if options.key is not None:
            verify(image, options.key)
        else:
            say(f"nobody vouches for {image}: `--unsigned` takes it as it is")
        claimed = remote.remote_labels(image)
        judge(labels.read(claimed, str(image)), str(image), options, host)
        require_room(size)
        say(f"pulling {size / 1e6:,.1f} MB")
        with removed_on_failure(image):
            remote.docker("pull", str(image), show=True)
            if remote.local_labels(str(image)) != claimed:
                raise Failure(Exit.INPUT, f"the registry told other labels of {image} than it has")
    print(image)
    return int(Exit.DONE)


def verify(image: remote.Reference, key: Path) -> None:
    """Refuse an image that the holder of a key has not signed.

    No transparency log is asked: the key alone decides, so that this works in a closed network.

    Raises:
        Failure: Exit.INPUT without a signature by that key; Exit.UNREACHABLE without a registry.
    """
    try:
        remote.cosign("verify", "--key", str(key), "--insecure-ignore-tlog=true", str(image))
    except Failure as failure:
        if failure.code is not Exit.INPUT:
            raise
        raise Failure(
            Exit.INPUT,
            f"{image} is not signed by the key {key}",
            details=failure.details,
            hint="get the signer's public key, or the image from where it was signed; do not run this one",
        ) from failure


def judge(told: labels.Labels, what: str, options: argparse.Namespace, host: Path) -> None:
    """Compare what an image says of itself with this checkout's lock and this host's driver and cards.

    Raises:
        Failure: Exit.DRIFT for another lock; Exit.HOST for a driver that is too old or a card without kernels.
    """
    try:
        labels.require_locked(told, what)
    except Failure as failure:
        if failure.code is not Exit.DRIFT or not options.allow_other_lock:
            raise
        say(f"{failure.message}; `--allow-other-lock` takes it")
    driver, cards = record.cards(host, os.environ)
    if driver is None:
        say(f"no NVIDIA driver is loaded here, so the floor of the image ({told.driver}) was not checked")
        return
    require_driver(told, driver)
    cold = without_kernels(told.gpus, cards)
    if cold and not options.allow_cold:
        has = ", ".join(told.gpus) or "no GPU"
        raise Failure(
            Exit.HOST,
            f"this host has {' and '.join(cold)}, and its kernels are for {has}: every process would compile first",
            hint=f"build one with `nox -s image -- --gpu {_key(cold[0])}`, or pass `--allow-cold`",
        )
    if cold:
        say(f"there are no kernels for {' and '.join(cold)} in it; `--allow-cold` takes it")


def require_driver(told: labels.Labels, driver: str) -> None:
    """Refuse a driver below the image's floor: need, have, what to do."""
    parts = [int(part) for part in driver.split(".") if part.isdigit()]
    if tuple(parts) < told.driver_floor:
        raise Failure(
            Exit.HOST,
            f"the image ({told.variant}) needs NVIDIA driver {told.driver} or newer, and this host has {driver}",
            hint="update the driver, or take an image of a variant with a lower floor (env/variants.toml)",
        )


def without_kernels(baked: Sequence[str], cards: Sequence[str]) -> list[str]:
    """The names of the cards here for which an image has no kernels, each once."""
    rows: Mapping[str, gpus.Gpu] = gpus.load()
    names = {rows[key].name for key in baked if key in rows}
    return sorted(set(cards) - names)


def _key(name: str) -> str:
    return next((key for key, row in gpus.load().items() if row.name == name), "NAME")


def require_room(size: int) -> None:
    """Refuse before the first byte where the engine's disk certainly cannot hold the image.

    The engine keeps layers compressed and unpacked, so twice the compressed size is what it takes at the very least.
    """
    folder = Path(json.loads(remote.docker("info", "--format", "{{json .DockerRootDir}}")))
    if not folder.is_dir():  # an engine of another machine
        return
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        raise Failure(
            Exit.STORAGE,
            f"the image takes at least {2 * size / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free there",
            hint="make room (`docker system df` shows what takes it), then run the same command again",
        )


@contextlib.contextmanager
def removed_on_failure(image: remote.Reference) -> Iterator[None]:
    """Whatever ends the block but its end, no image that it brought stays; one that was there before does."""
    there = _is_there(image)
    try:
        yield
    except BaseException:
        if not there and _is_there(image):
            with contextlib.suppress(Failure):
                remote.docker("image", "rm", str(image))
        raise


def _is_there(image: remote.Reference) -> bool:
    try:
        remote.local_labels(str(image))
    except Failure:
        return False
    return True
