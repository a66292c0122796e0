"""Whom a cache is believed from: real keys, real signatures, every policy."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from caches import believed, make_sealed, make_source, opened

from env.cache import examine, manifest, sign
from env.errors import Exit, Failure


def make_key(folder: Path, name: str) -> Path:
    """A real key pair."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
    subprocess.run(command, check=True)
    return folder / name


def allow(trust: Path, key: Path, who: str, *, namespace: str = sign.NAMESPACE) -> None:
    """Name a key's owner as an allowed signer."""
    trust.mkdir(mode=0o700, parents=True, exist_ok=True)
    public = key.with_name(f"{key.name}.pub").read_text()
    with (trust / "allowed_signers").open("a") as file:
        file.write(f'{who} namespaces="{namespace}" {public}')


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    """A cache that somebody else sealed and signed: nothing of it is known here."""
    return make_sealed(tmp_path / "elsewhere", key=key)[0]


def look(place: Path, trust: Path, policy: str | None = None) -> str:
    return examine.examine(place, sign.trust([trust], policy=policy))[1]


def test_sealing_the_same_again_with_a_key_signs_it(tmp_path: Path, key: Path) -> None:
    source = make_source(tmp_path / "source")
    place, made = make_sealed(tmp_path, source=source)
    assert examine.signature_of(place) is None
    assert make_sealed(tmp_path, source=source, key=key) == (place, made)
    allow(tmp_path / "elsewhere", key, "ci@example.org")
    assert "ci@example.org" in look(place, tmp_path / "elsewhere", "signed")
    assert make_sealed(tmp_path, source=source) == (place, made)
    assert examine.signature_of(place) is not None, "it stays signed when it is sealed without a key"


def test_a_signature_of_an_allowed_signer_is_enough(tmp_path: Path, key: Path, signed: Path) -> None:
    allow(tmp_path / "trust", key, "ci@example.org")
    for policy in ("signed", "known", "unsigned"):
        assert look(signed, tmp_path / "trust", policy) == "signed by ci@example.org"


@pytest.mark.parametrize("policy", sign.POLICIES)
def test_a_signature_of_another_key_is_refused_under_every_policy(tmp_path: Path, signed: Path, policy: str) -> None:
    allow(tmp_path / "trust", make_key(tmp_path, "other"), "ci@example.org")
    with pytest.raises(Failure, match="not that of a trusted signer") as refusal:
        look(signed, tmp_path / "trust", policy)
    assert refusal.value.code is Exit.CACHE


def test_a_signature_for_another_purpose_is_refused(tmp_path: Path, key: Path, signed: Path) -> None:
    allow(tmp_path / "trust", key, "ci@example.org", namespace="git")
    with pytest.raises(Failure, match="not that of a trusted signer"):
        look(signed, tmp_path / "trust")
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(key), str(opened(signed) / manifest.NAME)]
    (signed / manifest.SIGNATURE).unlink()
    subprocess.run(command, check=True)
    allow(tmp_path / "trust", key, "ci@example.org")
    with pytest.raises(Failure, match="not that of a trusted signer"):
        look(signed, tmp_path / "trust")


@pytest.mark.parametrize("policy", sign.POLICIES)
def test_a_signature_over_another_manifest_is_refused_under_every_policy(
    tmp_path: Path, key: Path, signed: Path, policy: str
) -> None:
    source = make_source(tmp_path / "other source")
    (source / "q1/cq1.py").write_text("changed = True\n")
    other = make_sealed(tmp_path / "other", source=source)[0]
    shutil.copy(signed / manifest.SIGNATURE, opened(other) / manifest.SIGNATURE)
    if policy != "unsigned":
        allow(tmp_path / "trust", key, "ci@example.org")
    with pytest.raises(Failure, match="the signature of"):
        look(other, tmp_path / "trust", policy)


def test_a_signature_that_is_none_is_refused(tmp_path: Path, key: Path, signed: Path) -> None:
    allow(tmp_path / "trust", key, "ci@example.org")
    (opened(signed) / manifest.SIGNATURE).write_text("not a signature\n")
    with pytest.raises(Failure, match="not that of a trusted signer"):
        look(signed, tmp_path / "trust")


def test_a_signature_that_is_a_link_is_refused(tmp_path: Path, signed: Path) -> None:
    place = opened(signed)
    (place / manifest.SIGNATURE).rename(tmp_path / "signature")
    (place / manifest.SIGNATURE).symlink_to(tmp_path / "signature")
    with pytest.raises(Failure, match="is a symbolic link"):
        look(place, tmp_path / "trust", "unsigned")


def test_a_signed_cache_is_not_believed_where_no_signer_is_named(tmp_path: Path, signed: Path) -> None:
    with pytest.raises(Failure, match="no list of signers") as refusal:
        look(signed, tmp_path / "trust")
    assert "allowed_signers" in str(refusal.value.hint)


def test_what_was_sealed_here_is_believed_without_a_signature(tmp_path: Path) -> None:
    place, _ = make_sealed(tmp_path)
    assert examine.examine(place, believed(tmp_path))[1] == "sealed here"


def test_what_was_sealed_here_is_not_enough_where_the_policy_wants_signatures(tmp_path: Path) -> None:
    place, _ = make_sealed(tmp_path)
    (tmp_path / "trust/policy").write_text("signed\n")
    with pytest.raises(Failure, match="only signed ones are used"):
        examine.examine(place, believed(tmp_path))


def test_an_unsigned_strangers_cache_is_accepted_only_where_the_policy_says_so(tmp_path: Path) -> None:
    place, _ = make_sealed(tmp_path / "elsewhere")
    with pytest.raises(Failure, match="not sealed here") as refusal:
        look(place, tmp_path / "trust")
    assert "--allow-unsigned" in str(refusal.value.hint)
    assert hashlib.sha256((place / manifest.NAME).read_bytes()).hexdigest() in refusal.value.details[0]
    assert look(place, tmp_path / "trust", "unsigned") == "unsigned, as the policy allows"
    (tmp_path / "trust").mkdir()
    (tmp_path / "trust/policy").write_text("unsigned\n")
    assert look(place, tmp_path / "trust") == "unsigned, as the policy allows"


def test_a_policy_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trust").mkdir()
    (tmp_path / "trust/policy").write_text("yes\n")
    with pytest.raises(Failure, match="`yes` is no policy"):
        sign.trust([tmp_path / "trust"])


@pytest.mark.parametrize("name", ["allowed_signers", "known", "policy", "."])
def test_a_list_of_trust_that_others_can_write_says_nothing(tmp_path: Path, key: Path, name: str) -> None:
    allow(tmp_path / "trust", key, "ci@example.org")
    for other in ("known", "policy"):
        (tmp_path / "trust" / other).write_text("known\n")
    (tmp_path / "trust" / name).chmod(0o777)
    with pytest.raises(Failure, match="can be changed by other users"):
        sign.trust([tmp_path / "trust"])


def test_without_ssh_keygen_a_signature_cannot_be_checked_and_it_is_said(
    tmp_path: Path, key: Path, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(tmp_path / "trust", key, "ci@example.org")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure, match="no `ssh-keygen`") as refusal:
        look(signed, tmp_path / "trust")
    assert refusal.value.code is Exit.HOST


def test_an_unusable_key_signs_nothing_and_nothing_is_sealed(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot sign with") as refusal:
        make_sealed(tmp_path, key=tmp_path / "no key")
    assert refusal.value.code is Exit.USAGE
    assert not list(tmp_path.glob("sealed/*"))


@pytest.mark.skipif(os.getuid() != 0, reason="another user id can only be taken by root")
def test_a_user_id_without_a_passwd_entry_learns_that_ssh_keygen_does_not_run_for_it(
    tmp_path: Path, key: Path, signed: Path
) -> None:
    allow(tmp_path / "trust", key, "ci@example.org")
    data, signature = (signed / manifest.NAME).read_bytes(), (signed / manifest.SIGNATURE).read_bytes()
    believed_from = sign.trust([tmp_path / "trust"])
    child = os.fork()
    if child == 0:  # pragma: no cover  # in another process
        code = 1
        try:
            os.setgid(54321)
            os.setuid(54321)
            sign.check(data, signature, believed_from, "it")
        except Failure as failure:
            code = 0 if "user id without a passwd entry (54321)" in failure.message else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
