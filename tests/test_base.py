"""The mirror is the one that this machine already uses; what is made from it needs root, and is an image test."""

from __future__ import annotations

from pathlib import Path

import pytest

from env import base
from env.errors import Exit, Failure

SOURCES = {
    "debian.sources": "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n",
    "old.list": "# deb http://other.example/debian old main\ndeb [arch=amd64] http://mirror.example/debian/ old main\n",
    "plain.list": "deb http://mirror.example/debian bookworm main\n",
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_mirror_is_the_one_that_apt_uses(tmp_path: Path, name: str) -> None:
    (tmp_path / "sources.list").write_text("deb http://security.example/debian-security bookworm-security main\n")
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / name).write_text(SOURCES[name])
    assert base.mirrored(tmp_path) == "http://mirror.example"


def test_without_a_mirror_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="name no mirror of Debian") as refusal:
        base.mirrored(tmp_path)
    assert refusal.value.code == Exit.HOST
    assert "--mirror" in str(refusal.value.hint)


def tripwire(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a making where it would begin."""

    def reached() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(base, "_require", reached)


@pytest.mark.parametrize("what", ["folder", "file", "nothing"])
def test_a_base_takes_the_place_of_nothing_but_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tripwire(monkeypatch)
    out = tmp_path / "out"
    if what == "folder":
        (out / ".git").mkdir(parents=True)
    elif what == "file":
        out.write_text("content")
    else:
        monkeypatch.chdir(tmp_path)
    with pytest.raises(Failure, match="`--out` is empty" if what == "nothing" else "something else") as refusal:
        base.main(["--out", "" if what == "nothing" else str(out)])
    assert refusal.value.code == Exit.USAGE


@pytest.mark.parametrize("names", [None, [], ["oci-layout", "index.json"]])
def test_a_base_takes_a_new_place_an_empty_one_or_an_older_base_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    tripwire(monkeypatch)
    out = tmp_path / "out"
    if names is not None:
        out.mkdir()
    for name in names or ():
        (out / name).write_text("{}")
    with pytest.raises(ZeroDivisionError):
        base.main(["--out", str(out)])
