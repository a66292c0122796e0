"""Reading a manifest: every wrong thing is refused by its name, before anything is done with it."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caches import FACTORS, make_sealed, opened
from hypothesis import given
from hypothesis import strategies as st

from env.cache import manifest
from env.cache.canonical import canonical, strict
from env.errors import Exit, Failure


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """An honest manifest as a table."""
    place, _ = make_sealed(tmp_path)
    found: dict[str, Any] = json.loads((place / manifest.NAME).read_bytes())
    return found


def refused(data: bytes | dict[str, Any]) -> str:
    """The sentence with which a manifest is refused."""
    with pytest.raises(Failure) as refusal:
        manifest.parse(data if isinstance(data, bytes) else canonical(data), "m.json")
    assert refusal.value.code is Exit.CACHE
    assert refusal.value.hint
    return refusal.value.message


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    place, sealed = make_sealed(tmp_path)
    assert manifest.read(place)[0] == sealed
    assert manifest.read(place)[1] == sealed.to_bytes()


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a format of the future": (lambda t: t.update(format=2), "format is 2"),
    "a format that is true": (lambda t: t.update(format=True), "format is True"),
    "an unknown field": (lambda t: t.update(run="rm"), "'run' is unknown"),
    "a missing field": (lambda t: t.pop("keys"), "'keys' is missing"),
    "an identity that is no digest": (lambda t: t.update(cache_id="../x"), "cache_id is not 64 hexadecimal"),
    "an identity of other factors": (lambda t: t["factors"].update(x=1), "cache_id is not that of its factors"),
    "another graph": (lambda t: t.update(graph_id="other"), "cache_id is not that of its factors"),
    "factors that are a list": (lambda t: t.update(factors=[1]), "factors is list, not a table"),
    "keys of a stranger": (lambda t: t["keys"].update(other=[]), "keys are of"),
    "keys that are a text": (lambda t: t["keys"].update(fx="fabc"), "keys.fx is not a list"),
    "a key with a path in it": (lambda t: t["keys"].update(fx=["../../etc"]), "keys.fx holds what is no key"),
    "a count below zero": (lambda t: t["counts"].update(fx_hit=-1), "counts.fx_hit is not a count"),
    "a count that is true": (lambda t: t["counts"].update(fx_hit=True), "counts.fx_hit is not a count"),
    "a count that is a fraction": (lambda t: t["counts"].update(fx_hit=1.5), "counts.fx_hit is not a count"),
    "a huge count": (lambda t: t["counts"].update(fx_hit=10**30), "counts.fx_hit is not a count"),
    "a missing count": (lambda t: t["counts"].pop("fx_hit"), "counts are of"),
    "a parent that is a path": (lambda t: t.update(parent="/etc/passwd"), "parent is not 64 hexadecimal"),
    "files that are a list": (lambda t: t.update(files=[]), "files is list"),
    "a file without a size": (lambda t: t["files"].update(a={"sha256": "0" * 64}), "does not have a size and a sha256"),
    "a size that is a text": (
        lambda t: t["files"].update(a={"size": "1", "sha256": "0" * 64}),
        r"size is not a count",
    ),
    "a sha256 in capitals": (lambda t: t["files"].update(a={"size": 1, "sha256": "A" * 64}), "sha256 is not 64"),
    "details that are a text": (lambda t: t.update(details="x"), "details is str"),
    "a text that is a number": (lambda t: t.update(graph_id=7), "graph_id is not a text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_with_one_wrong_thing_is_refused_by_its_name(table: dict[str, Any], name: str) -> None:
    change, sentence = WRONG[name]
    change(table)
    assert re.search(re.escape(sentence) if "\\" not in sentence else sentence, refused(table))


PATHS = {
    "../outside": "leaves its folder",
    "a/../../outside": "leaves its folder",
    "a/./b": "leaves its folder",
    "a//b": "leaves its folder",
    "a/": "leaves its folder",
    "": "leaves its folder",
    "/etc/passwd": "is absolute",
    "\\\\server\\share": "is absolute",
    "C:\\windows": "has characters",
    "C:/windows": "has characters",
    "a\0b": "has characters",
    "a\nb": "has characters",
    "a b": "has characters",
    ".hidden/x": "has characters",
    "-rf": "has characters",
    "ünïcode": "has characters",
    "a" * 256: "is too long",
    "/".join("a" * 9): "is too long",
    "/".join(["ab" * 120] * 6): "is too long",
}


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_a_path_that_is_not_harmless_is_refused(table: dict[str, Any], path: str) -> None:
    table["files"][path] = {"size": 1, "sha256": "0" * 64}
    said = refused(table)
    assert PATHS[path] in said


def test_json_that_only_some_read_the_same_is_refused(table: dict[str, Any]) -> None:
    text = canonical(table)
    assert "the key 'graph_id' stands twice" in refused(text.replace(b'"graph_id":', b'"graph_id":"x","graph_id":', 1))
    assert "stands twice" in refused(text.replace(b'"files":{', b'"files":{"a":1,"a":2,', 1))
    assert "NaN is no JSON" in refused(text.replace(b'"format":1', b'"format":NaN'))
    assert "nested too deep" in refused(b"[" * 200_000)
    assert "is not a manifest" in refused(text[:-20])
    assert "is not a manifest" in refused(text + b"{}")
    assert "is not a manifest" in refused(b"\xff\xfe" + text)
    assert "is not a manifest" in refused(b'{"format": ' + b"9" * 10_000 + b"}")
    assert "the manifest is list" in refused(b"[]")


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / manifest.NAME).open("wb") as file:
        file.truncate(manifest.LARGEST + 1)  # sparse: it takes no room
    with pytest.raises(Failure, match="at most"):
        manifest.read(tmp_path)


def test_too_many_files_are_not_read(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST", 3)
    assert "at most 3 are read" in refused(table)


def as_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def as_hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "second name")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def as_nothing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (as_link, "is a symbolic link"),
        (as_hard_link, "is a hard link: it has 2 names"),
        (as_pipe, "is a pipe"),
        (as_folder, "is a folder"),
        (as_socket, "cannot be read"),
        (as_nothing, "is missing"),
    ],
)
def test_a_manifest_that_is_no_plain_file_is_refused(
    tmp_path: Path, how: Callable[[Path], None], sentence: str
) -> None:
    place = opened(make_sealed(tmp_path)[0])
    how(place / manifest.NAME)
    with pytest.raises(Failure, match=sentence):
        manifest.read(place)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), VALUES))
def test_canonical_json_has_one_spelling_and_reads_back(value: dict[str, Any]) -> None:
    shuffled = dict(sorted(value.items(), reverse=True))
    assert canonical(value) == canonical(shuffled)
    assert strict(canonical(value)) == value


def test_an_identity_names_everything_that_the_cache_id_is_made_of(tmp_path: Path) -> None:
    _, sealed = make_sealed(tmp_path)
    named = sealed.identity()
    assert named["graph_id"] == "graphs"
    assert named["gpu.multi_processor_count"] == 132
    assert {name: named[name] for name in FACTORS} == FACTORS
