"""Every refusal between the registry and the node in one table, for docs/operators.md: REFUSALS_TABLE=FILE."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine import Engine, registry
from hosts import card
from test_pull import blob, clear, flip, images, shipped, small
from toys import Keys, build, make_keys, use

from env import pull, push, remote
from env.errors import Exit, Failure

__all__ = ["small"]

pytestmark = pytest.mark.image

Row = tuple[str, Failure]


@contextmanager
def shell(engine: Engine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use(engine, patch)
        yield


def said(node: Engine, host: Path, *argv: str) -> Failure:
    """What `nox -s pull` says with that engine, which has nothing afterwards."""
    with shell(node), pytest.raises(Failure) as caught:
        pull.main(argv, host)
    assert images(node) == []
    return caught.value


def test_each_refusal_is_one_sentence_with_its_exit_code_and_leaves_nothing(
    docker_engine: Engine, empty_engine: Engine, small: Engine, loopback_registry: str, signed: remote.Reference,
    keys: Keys, tmp_path: Path,
) -> None:  # fmt: skip
    clear(empty_engine)
    rows = [*_planted(docker_engine, empty_engine, small, loopback_registry, signed, keys, tmp_path)]
    for name, failure in rows:
        assert failure.code is not Exit.BUG, (name, str(failure))
        assert "\n" not in failure.message
        assert failure.hint
    lines = ["| planted | said | exit code |", "| --- | --- | --- |"]
    for name, failure in rows:
        sentence = failure.message.replace(str(signed), "REF@sha256:…").replace(signed.name, "REF")
        sentence = re.sub(rf"{tempfile.gettempdir()}/\S+/", "", sentence)  # folders of the test
        lines.append(f"| {name} | {sentence} | {int(failure.code)} |")
    print("\n".join(lines))
    if "REFUSALS_TABLE" in os.environ:
        Path(os.environ["REFUSALS_TABLE"]).write_text("\n".join(lines) + "\n")


def _planted(
    builder: Engine, node: Engine, small: Engine, place: str, signed: remote.Reference, keys: Keys, folder: Path
) -> Iterator[Row]:
    bare, key = folder / "host", ["--key", str(keys.public)]
    yield "a bare tag", said(node, bare, f"{signed.name}:1", *key)
    stranger = make_keys(folder, "stranger")
    yield "signed by another key", said(node, bare, str(signed), "--key", str(stranger.public))
    unsigned = shipped(builder, f"{place}/unsigned", folder / "a", None)
    yield "not signed", _short(said(node, bare, unsigned, *key), unsigned)
    foreign = shipped(builder, f"{place}/foreign", folder / "b", keys.private, env_id="0" * 64)
    yield "labels of another lock, signed", _short(said(node, bare, foreign, *key), foreign)
    old = card(folder / "old", "570.86.15", "NVIDIA H200")
    yield "a driver below the floor (simulated)", said(node, old, str(signed), *key)
    unknown = card(folder / "unknown", "580.95.05", "NVIDIA T4")
    yield "a card without kernels in the image (simulated)", said(node, unknown, str(signed), *key)
    store = folder / "store"
    store.mkdir()
    with registry(store) as address:
        pin = shipped(builder, f"{address}/tampered", folder / "c", keys.private, noise=160_001)
        with shell(node):
            layers = remote.manifest(remote.reference(pin))["layers"]
        flip(blob(store, layers[1]["digest"]))
        yield "one bit of a layer flipped in the registry", said(node, bare, pin, *key)
    yield "a registry that is down", said(node, bare, pin, *key)
    yield "a digest that is not there", said(node, bare, f"{signed.name}@sha256:{'0' * 64}", *key)
    wide = f"{place}/wide:1"
    build(builder, folder / "d", wide, zeros=80_000_000)
    builder.docker("push", wide)
    yield "a disk that fills while pulling", said(small, bare, wide, "--allow-tag", "--unsigned")
    with shell(node), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", f"unix://{folder}/sock")
        yield "an engine that is not running", _failure(pull.main, [str(signed), *key])
    with shell(builder):
        yield "a signing key that is not there", _failure(push.main, [f"{place}/x:1", "--key", "cosign.key"])
        (folder / "bad.key").write_text("no key")
        failure = _failure(push.main, [f"{place}/x:1", "--key", str(folder / "bad.key")])
        yield "a signing key that its password does not open", _short(failure, str(folder / "bad.key"), "cosign.key")


def _failure(command: object, argv: list[str]) -> Failure:
    assert callable(command)
    with pytest.raises(Failure) as caught:
        command(argv)
    return caught.value


def _short(failure: Failure, old: str, new: str = "REF@sha256:…") -> Failure:
    return Failure(failure.code, failure.message.replace(old, new), details=failure.details, hint=failure.hint)
