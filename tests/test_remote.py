from __future__ import annotations

from pathlib import Path

import pytest

from env import remote
from env.errors import Exit, Failure

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "name", "read"),
    [
        ("dflash", "dflash", "dflash:latest"),
        ("dflash:cu130", "dflash", "dflash:cu130"),
        ("registry.example/team/dflash:1", "registry.example/team/dflash", "registry.example/team/dflash:1"),
        ("127.0.0.1:5000/x_y/z", "127.0.0.1:5000/x_y/z", "127.0.0.1:5000/x_y/z:latest"),
        (f"registry.example/dflash@{DIGEST}", "registry.example/dflash", f"registry.example/dflash@{DIGEST}"),
        (f"registry.example/dflash:1@{DIGEST}", "registry.example/dflash", f"registry.example/dflash@{DIGEST}"),
    ],
)
def test_a_reference_is_read_and_a_digest_counts_more_than_a_tag(text: str, name: str, read: str) -> None:
    assert remote.reference(text).name == name
    assert str(remote.reference(text)) == read


@pytest.mark.parametrize("text", ["", "-x", "--help", "A/b", "x:", "x@sha256:12", "x y", "x;y", "$(x)", "x/"])
def test_what_is_no_reference_is_refused_before_any_program_sees_it(text: str) -> None:
    with pytest.raises(Failure, match="is no reference of an image") as caught:
        remote.reference(text)
    assert caught.value.code == Exit.USAGE


# What Docker 26, buildx 0.13 and cosign 2.5 print, seen in the image tests; of certificates, which these cannot have,
# what the Go that they are made of prints.
SAID = [
    ("Cannot connect to the Docker daemon at unix:///run/x. Is the docker daemon running?", Exit.HOST),
    ("permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock", Exit.HOST),
    ('failed to extract layer sha256:7d: write /x/fs/z: no space left on device: unknown', Exit.STORAGE),
    ('failed commit on ref "layer-sha256:c0": commit failed: unexpected commit digest sha256:2, expected sha256:c0',
     Exit.INPUT),
    ("error pulling image configuration: failed to verify: size validation failed", Exit.INPUT),
    ('Error: Get "https://x/v2/": tls: failed to verify certificate: x509: certificate signed by unknown authority',
     Exit.HOST),
    ('ERROR: failed to do request: Head "https://x/v2/": http: server gave HTTP response to HTTPS client', Exit.HOST),
    ("Error: remote error: tls: bad certificate", Exit.HOST),
    ('ERROR: failed commit on ref "": unexpected digest: sha256:d3 != sha256:00', Exit.INPUT),
    ("Error: no signatures found", Exit.INPUT),
    ("Error: no matching signatures: invalid signature when validating ASN.1 encoded signature", Exit.INPUT),
    ('ERROR: failed to do request: Head "http://127.0.0.1:9/v2/x": dial tcp 127.0.0.1:9: connect: connection refused',
     Exit.UNREACHABLE),
    ('Error: Get "https://registry.example/v2/": dial tcp: lookup registry.example: no such host', Exit.UNREACHABLE),
    ("unexpected status from HEAD request to https://x/v2/y: 503 Service Unavailable", Exit.UNREACHABLE),
    ("pull access denied for x, repository does not exist or may require 'docker login': denied", Exit.INPUT),
    ("ERROR: 127.0.0.1:5000/x@sha256:1d: not found", Exit.INPUT),
    ("Error response from daemon: No such image: nothing:1", Exit.INPUT),
    ("Error: loading public key: open nothere.pub: no such file or directory", Exit.USAGE),
    ("getting signer: reading key: decrypt: encrypted: decryption failed", Exit.USAGE),
    ("after 1.502 s: 1.403 MB of layer 1503 pushed", Exit.BUG),
    ("panic: what nobody has seen before", Exit.BUG),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code"), SAID, ids=[line[:40] for line, _ in SAID])
def test_the_programs_last_words_become_a_sentence_with_its_exit_code(line: str, code: Exit) -> None:
    errors = f"WARNING: Skipping tlog verification\nsomething before\n{line}\n"
    failure = remote.explain(["docker", "pull", "x", "y"], 1, errors)
    assert failure.code == code
    assert any(line[:60] in detail for detail in failure.details)
    assert "WARNING" not in str(failure)


def test_a_full_disk_counts_more_than_the_connection_that_it_broke() -> None:
    failure = remote.explain(["docker"], 1, "connection reset by peer\nno space left on device\n")
    assert failure.code == Exit.STORAGE


def test_a_line_without_end_is_cut_in_the_middle() -> None:
    (line,) = remote.explain(["docker"], 1, "not found " + "x" * 5000 + " the end").details
    assert len(line) < 250
    assert line.startswith("not found x")
    assert line.endswith(" the end")


def test_a_program_that_is_not_there_and_a_key_that_is_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure, match="there is no `docker` on the PATH") as caught:
        remote.require_engine()
    assert caught.value.code == Exit.HOST
    with pytest.raises(Failure, match="there is no `cosign` on the PATH"):
        remote.cosign("version")
    with pytest.raises(Failure, match=r"`--key .*/cosign\.pub`: there is no such file") as caught:
        remote.require_key(tmp_path / "cosign.pub", "--key")
    assert caught.value.code == Exit.USAGE
