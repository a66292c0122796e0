"""A base from a registry: Debian and nothing else, which a build completes with compilers and Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from building import ROOT, layers
from engine import Engine

from env import base, building

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]


@pytest.fixture
def slim(docker_engine: Engine, loopback_registry: str, tmp_path: Path) -> str:
    """What a public registry calls `debian:bookworm-slim`, or close to it, in this one."""
    packed, name = tmp_path / "slim.tar", f"{loopback_registry}/slim:1"
    bootstrap = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--include=ca-certificates", base.SUITE]
    building.run([*bootstrap, str(packed), f"deb {base.mirrored()}/debian {base.SUITE} main"], os.environ)
    docker_engine.docker("import", packed, name)
    docker_engine.docker("push", name)
    docker_engine.docker("image", "rm", name)
    return name


def test_a_base_from_a_registry_is_completed_to_the_same_bytes_each_time(
    docker_engine: Engine, loopback_registry: str, slim: str
) -> None:
    found = []
    for tag in ("one", "other"):
        name = f"{loopback_registry}/completed:{tag}"
        chosen = [f"--build-arg={word}" for word in (f"BASE={slim}", "BASE_KIND=slim", "VARIANT=cu130")]
        docker_engine.docker(
            "buildx", "build", "--provenance=false", "--no-cache", "--network=host", "--target=os", *chosen,
            f"--build-arg=SOURCE_DATE_EPOCH={base.EPOCH}", f"--output=type=image,name={name},push=,store=false",
            "--file", ROOT / "docker" / "Dockerfile", ROOT,
        )  # fmt: skip
        found.append([layer["digest"] for layer in layers(docker_engine, name)])
    assert len(found[0]) == 2
    assert found[0] == found[1]
