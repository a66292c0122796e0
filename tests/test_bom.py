from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_labels import GOOD

from env import bom, drift, identity
from env.errors import Exit, Failure
from env.variants import ROOT

STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Source: glibc
Version: 2.36-9+deb12u13
Description: GNU C Library
 a second line: with a colon
 .

Package: libc6
Status: install ok installed
Architecture: i386
Source: glibc
Version: 2.36-9+deb12u13

Package: gcc-12-base
Status: install ok installed
Architecture: amd64
Source: gcc-12 (12.2.0-14)
Version: 12.2.0-14+deb12u1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tar
Status: install ok installed
Architecture: amd64
Version: 1.34
"""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(json.loads(bom.make(GOOD, STATUS, machine="x86_64")))


def test_every_package_that_the_image_s_python_gets_is_in_it_with_the_lock_s_hashes(document: dict[str, Any]) -> None:
    found = {part["purl"]: part for part in document["components"]}
    for name in ("cu130", "tools"):
        lock = ROOT / "requirements" / f"{name}.txt"
        pins = drift.resolve(drift.read_lock(lock), identity.markers("3.11.0", "x86_64"))
        for pin in pins.values():
            part = found[f"pkg:pypi/{pin.name}@{pin.version}"]
            assert (part["name"], part["version"]) == (pin.name, pin.version)
            assert {f"sha256:{each['content']}" for each in part["hashes"]} == set(pin.hashes)
    assert found["pkg:pypi/torch@2.11.0"]["properties"] == [{"name": "dflash:lock", "value": "cu130"}]
    assert found["pkg:pypi/rich@15.0.0"]["properties"] == [{"name": "dflash:lock", "value": "cu130 tools"}]


def test_it_says_what_requires_what(document: dict[str, Any]) -> None:
    edges = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    assert "pkg:pypi/triton@3.6.0" in edges["pkg:pypi/torch@2.11.0"]
    assert "pkg:pypi/torch@2.11.0" in edges["image"]
    assert "pkg:pypi/triton@3.6.0" not in edges["image"]


def test_installed_debian_packages_are_in_it_with_the_source_that_advisories_name(document: dict[str, Any]) -> None:
    found = [part["purl"] for part in document["components"] if part["purl"].startswith("pkg:deb/")]
    assert found == [
        "pkg:deb/debian/gcc-12-base@12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12&upstream=gcc-12%4012.2.0-14",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12&upstream=glibc",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=i386&distro=debian-12&upstream=glibc",
        "pkg:deb/debian/tar@1.34?arch=amd64&distro=debian-12",
    ]


def test_it_names_the_image_and_holds_no_time(document: dict[str, Any]) -> None:
    assert document["metadata"]["component"]["version"] == GOOD.revision
    assert {each["name"]: each["value"] for each in document["metadata"]["component"]["properties"]} == {
        "dflash:env-id": GOOD.env_id,
        "dflash:variant": "cu130",
        "dflash:base": GOOD.base,
    }
    assert "timestamp" not in document["metadata"]
    assert document["specVersion"] == "1.6"


def test_the_same_inputs_give_the_same_bytes_and_others_another_serial_number(document: dict[str, Any]) -> None:
    again = bom.make(GOOD, STATUS, machine="x86_64")
    assert json.loads(again) == document
    assert again == (json.dumps(document, indent=1) + "\n").encode()
    other = json.loads(bom.make(dataclasses.replace(GOOD, revision="e" * 40), STATUS, machine="x86_64"))
    assert other["serialNumber"] != document["serialNumber"]


def test_what_the_schema_does_not_allow_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bom.debian_parts

    def broken(status: str) -> list[bom.Part]:
        return [{**part, "sha256": ["no hash"]} for part in real(status)]

    monkeypatch.setattr(bom, "debian_parts", broken)
    with pytest.raises(Failure, match="the bill of materials is not valid CycloneDX") as caught:
        bom.make(GOOD, STATUS)
    assert caught.value.code == Exit.BUG


def test_a_package_without_a_version_is_refused() -> None:
    with pytest.raises(Failure, match="has a package without Version and Architecture"):
        bom.debian_parts("Package: x\nStatus: install ok installed\n")


def test_the_command_prints_one_and_says_what_it_was_not_given(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bom, "make", lambda labels, status: f"{labels.env_id} {status}".encode())
    (tmp_path / "status").write_text(STATUS)
    given = ["--revision", GOOD.revision, "--base", GOOD.base]
    assert bom.main([*given, "--dpkg-status", str(tmp_path / "status")]) == 0
    assert capfdbinary.readouterr().out == f"{GOOD.env_id} {STATUS}".encode()
    assert bom.main(given) == 0
    assert b"packages of the operating system are left out" in capfdbinary.readouterr().err
    with pytest.raises(Failure, match="cannot read"):
        bom.main([*given, "--dpkg-status", str(tmp_path / "nothing")])


def test_a_machine_s_own_package_database_can_be_read() -> None:
    status = Path("/var/lib/dpkg/status")
    if not status.exists():
        pytest.skip("there is no dpkg here")
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package} ${Version} ${Architecture}\n"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    installed = sorted(tuple(row.split()[1:]) for row in rows if row.startswith("installed "))
    parts = bom.debian_parts(status.read_text())
    assert sorted((part["name"], part["version"], part["purl"]["qualifiers"]["arch"]) for part in parts) == installed


def test_provenance_names_everything_that_was_built_from_and_no_time() -> None:
    made = json.loads(bom.provenance(GOOD))
    assert bom.provenance(GOOD) == bom.provenance(GOOD)
    definition = made["buildDefinition"]
    assert definition["externalParameters"] == {
        "variant": "cu130", "python": "3.11", "gpus": ["h200"], "clean": True,
    }  # fmt: skip
    assert definition["internalParameters"]["cache_ids"] == {gpu: list(ids) for gpu, ids in GOOD.caches.items()}
    assert [each["uri"] for each in definition["resolvedDependencies"]] == [
        "git:dflash", "oci:base", "file:requirements/cu130.txt", "file:requirements/tools.txt",
    ]  # fmt: skip
    assert made["runDetails"]["metadata"] == {}
