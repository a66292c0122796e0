"""Containers: the marks of being in one, and whether one started here would have the GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import gpu_host, host, plan, recorded

from env.doctor.checks import toolkit
from env.doctor.facts import container
from env.doctor.facts.container import Containers
from env.doctor.facts.nvidia import Card
from env.doctor.finding import Severity
from env.doctor.host import Host

H200 = Card(name="NVIDIA H200", capability="9.0", memory_mib=143771)


def program(folder: Path, name: str, text: str = "exit 0") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("mark", "environ", "kind"),
    [
        (".dockerenv", {}, "docker"),
        ("run/.containerenv", {}, "podman"),
        (".dockerenv", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        (None, {"APPTAINER_CONTAINER": "x.sif"}, "apptainer"),
        (None, {"container": "systemd-nspawn"}, "systemd-nspawn"),
        (None, {}, None),
    ],
)
def test_each_engine_leaves_its_mark(
    tmp_path: Path, mark: str | None, environ: dict[str, str], kind: str | None
) -> None:
    if mark:
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).touch()
    assert container.look(tmp_path, {"PATH": "", **environ}).inside == kind


def test_an_lxc_containers_first_process_says_so(tmp_path: Path) -> None:
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/environ").write_bytes(b"TERM=linux\0container=lxc\0")
    assert container.look(tmp_path, {"PATH": ""}).inside == "lxc"


def test_the_engine_is_asked_for_its_runtimes(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    program(programs, "docker", """echo '{"runc":{"path":"runc"},"nvidia":{"path":"nvidia-container-runtime"}}'""")
    program(programs, "nvidia-ctk")
    seen = container.look(tmp_path, {"PATH": f"{programs}:/usr/bin:/bin"})
    assert (seen.engine, seen.runtimes) == ("docker", ("nvidia", "runc"))
    assert seen.toolkit == str(programs / "nvidia-ctk")


@pytest.mark.parametrize("answer", ["echo 'Cannot connect to the Docker daemon'; exit 1", "echo garbage", "echo '[1]'"])
def test_an_engine_that_does_not_answer_is_unknown(tmp_path: Path, answer: str) -> None:
    program(tmp_path / "bin", "docker", answer)
    assert container.look(tmp_path, {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}).runtimes is None


def test_device_descriptions_for_containers_are_found(tmp_path: Path) -> None:
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "etc/cdi/nvidia.yaml").touch()
    assert container.look(tmp_path, {"PATH": ""}).specifications == (str(tmp_path / "etc/cdi/nvidia.yaml"),)


def judged(seen: Host, *, asked: bool = False) -> tuple[Severity, str] | None:
    finding = toolkit.judge(seen, plan(containers=asked))
    return None if finding is None else (finding.severity, finding.message)


def on_gpu_host(**facts: object) -> Host:
    from dataclasses import replace

    return replace(gpu_host(H200), containers=Containers(**facts))  # type: ignore[arg-type]


def test_nothing_is_said_where_no_container_is_in_play() -> None:
    assert judged(host()) is None
    assert judged(host(containers=Containers(engine="docker", runtimes=("runc",)))) is None
    assert judged(on_gpu_host()) is None


def test_a_gpu_machine_with_docker_and_no_toolkit_is_warned_and_where_asked_it_is_an_error() -> None:
    bare = on_gpu_host(engine="docker", runtimes=("runc",))
    severity, message = judged(bare) or (None, "")
    assert severity is Severity.WARNING
    assert "toolkit is not" in message
    assert (judged(bare, asked=True) or [None])[0] is Severity.ERROR
    assert (judged(on_gpu_host(), asked=True) or [None])[0] is Severity.ERROR


def test_a_toolkit_that_the_engine_does_not_use_is_told_apart_from_an_engine_that_does_not_answer() -> None:
    unused = judged(on_gpu_host(engine="docker", toolkit="/usr/bin/nvidia-ctk", runtimes=("runc",)))
    assert unused is not None
    assert "not told to use it" in unused[1]
    silent = judged(on_gpu_host(engine="docker", toolkit="/usr/bin/nvidia-ctk"))
    assert silent is not None
    assert silent[0] is Severity.UNKNOWN


def test_an_engine_that_can_hand_in_gpus_is_fine() -> None:
    for facts in ({"runtimes": ("nvidia", "runc")}, {"specifications": ("/etc/cdi/nvidia.yaml",)}):
        assert (judged(on_gpu_host(engine="docker", **facts), asked=True) or [None])[0] is Severity.OK


def test_a_container_that_was_started_without_gpus_is_warned_with_each_engines_flag() -> None:
    finding = toolkit.judge(recorded("container-without-gpus"), plan())
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding.remedy is not None
    assert "`--gpus all`" in finding.remedy
    assert (judged(on_gpu_host(inside="docker")) or [None])[0] is Severity.OK


def test_unknown_is_said_to_be_unknown() -> None:
    assert (judged(Host(trouble={"containers": "x"})) or [None])[0] is Severity.UNKNOWN
