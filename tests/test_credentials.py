"""What the index needs reaches a build as secrets, whatever spelling of uv's or pip's says it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from env import credentials
from env.errors import Exit, Failure
from env.variants import ROOT


def test_what_the_index_needs_goes_in_secrets_and_nothing_of_it_on_the_command_line(tmp_path: Path) -> None:
    settings = {"index-url": "https://somebody:secret@index.example/simple", "find-links": "/some/where"}
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    (tmp_path / ".netrc").write_text("machine index.example login a password b")
    environ = {"SSL_CERT_FILE": str(bundle), "HOME": str(tmp_path), "HTTPS_PROXY": "http://proxy.example:3128"}
    options = credentials.options(environ, settings, tmp_path)
    assert "secret@" not in " ".join(options)
    assert [word.partition(",")[0] for word in options[1::2]] == ["id=index", "id=ca", "id=netrc"]
    kept = tmp_path / "index"
    assert kept.read_text().splitlines() == [
        "UV_DEFAULT_INDEX=https://somebody:secret@index.example/simple",
        "HTTPS_PROXY=http://proxy.example:3128",
    ]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_folder_of_wheels_that_a_build_cannot_see_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert credentials.options({}, {"find-links": "/some/where"}, tmp_path) == []
    said = capsys.readouterr().err
    assert said == "dflash: UV_FIND_LINKS names a place that is no http address, which a build cannot see: left out\n"


def test_a_certificate_that_the_build_has_no_secret_for_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert credentials.options({"SSL_CERT_DIR": "/some"}, {"client-cert": "/some/where.pem"}, tmp_path) == []
    assert capsys.readouterr().err.splitlines() == [
        "dflash: SSL_CERT_DIR is set, which a build has no secret for: left out",
        "dflash: SSL_CLIENT_CERT is set, which a build has no secret for: left out",
    ]


@pytest.mark.parametrize(
    ("environ", "kept"),
    [
        (
            {"UV_INDEX": "internal=https://user:hunter2@host/simple", "UV_INDEX_INTERNAL_PASSWORD": "a, b"},
            ["UV_INDEX=internal=https://user:hunter2@host/simple", "UV_INDEX_INTERNAL_PASSWORD=a, b"],
        ),
        ({"UV_INDEX_URL": "https://user:hunter2@host/simple"}, ["UV_DEFAULT_INDEX=https://user:hunter2@host/simple"]),
        (
            {"UV_INDEX_URL": "https://old/simple", "UV_DEFAULT_INDEX": "https://new/simple"},
            ["UV_DEFAULT_INDEX=https://new/simple"],
        ),
        (
            {"UV_EXTRA_INDEX_URL": "https://two/simple /srv/hunter2", "UV_INDEX": "https://one/simple"},
            ["UV_INDEX=https://one/simple https://two/simple"],
        ),
        (
            {"UV_FIND_LINKS": "https://one/a,https://two/b,file:///hunter2"},
            ["UV_FIND_LINKS=https://one/a,https://two/b"],
        ),
        ({"UV_INDEX": "internal=htps://user:hunter2@host/simple"}, []),
    ],
)
def test_every_spelling_of_an_index_reaches_the_build_and_no_password_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environ: dict[str, str], kept: list[str]
) -> None:
    pip = {"index-url": "https://pip/simple", "extra-index-url": "https://pip/more"}
    found = credentials.options(environ, {name: pip[name] for name in pip if not environ}, tmp_path)
    assert ((tmp_path / "index").read_text().splitlines() if found else []) == kept
    said = capsys.readouterr().err
    assert "hunter2" not in said
    unseen = [name for name, value in environ.items() if " /srv" in value or "file:" in value or "htps:" in value]
    assert said.count("which a build cannot see") == len(unseen)
    assert all(f"dflash: {name} names a place" in said for name in unseen)


def test_pip_s_own_index_is_not_lost_for_an_older_name_of_uv_s(tmp_path: Path) -> None:
    pip = {"index-url": "https://pip/simple", "extra-index-url": "https://pip/more"}
    credentials.options({"UV_INDEX_URL": "https://old/simple"}, pip, tmp_path)
    assert (tmp_path / "index").read_text().splitlines() == [
        "UV_DEFAULT_INDEX=https://old/simple",
        "UV_INDEX=https://pip/more",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    ]


def test_the_tools_pip_is_given_addresses_without_the_names_that_only_uv_knows() -> None:
    script = (ROOT / "docker" / "tools").read_text()
    function = script[script.index("plain() {") : script.index("\n}\n") + 3]
    words = "internal=https://user:a=b@host/simple?c=https://d https://other/simple"
    done = subprocess.run(
        ["sh", "-c", f'{function}plain "$1"', "sh", words], capture_output=True, text=True, check=True
    )
    assert done.stdout == words.removeprefix("internal=")


def test_a_secret_that_is_named_and_missing_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"secret `ca`.*SSL_CERT_FILE names /nowhere/ca.pem") as refused:
        credentials.options({"SSL_CERT_FILE": "/nowhere/ca.pem"}, {}, tmp_path)
    assert refused.value.code == Exit.USAGE
