"""Hosts for the doctor's tests: recorded ones, and healthy ones with one thing changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from env.doctor.facts.compilers import Compiler, Compilers
from env.doctor.facts.container import Containers
from env.doctor.facts.environment import Environment
from env.doctor.facts.folders import Folder, Mount
from env.doctor.facts.machine import Clock, Limits, Memory, Processors, System, User
from env.doctor.facts.nvidia import Card, Nvidia
from env.doctor.host import Host, decode
from env.doctor.need import Need, read
from env.doctor.plan import Plan
from env.variants import Matrix, Variant, load

RESOURCES = Path(__file__).parent / "resources" / "hosts"
GB = 10**9
DISK = Mount(point="/", root="/", kind="ext4", source="/dev/vda1", options=("rw",))


def recorded(name: str) -> Host:
    """A host from tests/resources/hosts; its `origin` says what was read off a machine."""
    return decode(json.loads((RESOURCES / f"{name}.json").read_text(encoding="utf-8")))


def everywhere() -> list[str]:
    """The names of all recorded hosts."""
    return sorted(path.stem for path in RESOURCES.glob("*.json"))


def plan(
    variant: str | None = None, config: str | None = None, *, need: Need | None = None, containers: bool = False
) -> Plan:
    """What the doctor would be asked by `--variant` and `--config`."""
    matrix = load()
    found = need or (read(config) if config else None)
    return Plan(variant=matrix.variant(variant), matrix=matrix, need=found, containers=containers)


def other_matrix(**built_for: tuple[str, ...]) -> Matrix:
    """The project's matrix with other lists of capabilities: cards come that today's wheels all have."""
    matrix = load()
    variants = {
        name: Variant(
            name=name,
            torch=one.torch,
            cuda=one.cuda,
            capabilities=built_for.get(name, one.capabilities),
            driver=one.driver,
            installed_gb=one.installed_gb,
        )
        for name, one in matrix.variants.items()
    }
    return Matrix(default=matrix.default, python=matrix.python, platforms=matrix.platforms, variants=variants)


def folder(role: str, path: str, **facts: Any) -> Folder:
    """A healthy folder, but for what is given."""
    healthy: dict[str, Any] = {
        "exists": True,
        "tested": path,
        "mount": DISK,
        "free": 200 * GB,
        "size": 500 * GB,
        "inodes": 10**7,
        "writable": True,
        "executable": True,
    }
    return Folder(role=role, path=path, **{**healthy, **facts})


def folders(**changed: Folder) -> tuple[Folder, ...]:
    """A healthy host's folders, some replaced."""
    shm = Mount(point="/dev/shm", root="/", kind="tmpfs", source="tmpfs", options=("rw", "nosuid"))
    usual = {
        "home": folder("home", "/home/ada"),
        "kernels": folder("kernels", "/home/ada/.cache/dflash"),
        "temporary": folder("temporary", "/tmp"),
        "project": folder("project", "/home/ada/dflash"),
        "runs": folder("runs", "/home/ada/dflash/runs"),
        "models": folder("models", "/home/ada/.cache/huggingface/hub"),
        "shm": folder("shm", "/dev/shm", mount=shm, free=64 * GB, size=64 * GB),
    }
    return tuple({**usual, **changed}.values())


def compiler(command: str, **facts: Any) -> Compiler:
    """A compiler that can do all, but for what is given."""
    able: dict[str, Any] = {
        "path": f"/usr/bin/{command}",
        "version": f"{command} 12.2.0",
        "plain": True,
        "header": True,
    }
    if command == "g++":
        able["parallel"] = True
    return Compiler(command=command, **{**able, **facts})


def host(**changed: Any) -> Host:
    """A healthy host without a GPU, but for what is given."""
    usual: dict[str, Any] = {
        "system": System(
            kernel="Linux", machine="x86_64", release="6.1.0", libc="glibc 2.36", python="3.11.2", flags=("avx2",)
        ),
        "nvidia": Nvidia(bus=0, nodes=0),
        "containers": Containers(),
        "compilers": Compilers(cxx=compiler("g++"), cc=compiler("gcc"), include="/usr/include/python3.11"),
        "environment": Environment(
            python="/home/ada/dflash/.nox/environments/cu130-py3.11/bin/python",
            version="3.11.2",
            include="/usr/include/python3.11",
            compared=True,
        ),
        "user": User(uid=1000, name="ada", home="/home/ada", home_from="HOME", name_from="USER"),
        "folders": folders(),
        "memory": Memory(total=256 * GB, available=200 * GB),
        "processors": Processors(present=16, allowed=16),
        "limits": Limits(files=65536, files_hard=65536, processes=100000, locked=8 * 2**20),
        "clock": Clock(now=1.8e9, newest=1.7e9, newest_file="requirements/cu130.txt", commit=1.7e9, synchronised=True),
    }
    return Host(**{**usual, **changed})


def gpu_host(*cards: Card, driver: str | None = "580.159.04", **facts: Any) -> Host:
    """A healthy host with these cards."""
    usual: dict[str, Any] = {"bus": len(cards), "nodes": len(cards), "cuda_init": 0, "cuda_version": "13.0"}
    return host(
        nvidia=Nvidia(driver=driver, driver_from="/sys/module/nvidia/version", cards=cards, **{**usual, **facts})
    )


def card(host: Path, driver: str, *names: str) -> Path:
    """Let a host's root, a folder, have a driver and cards."""
    version = host / "sys/module/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(f"{driver}\n")
    for number, name in enumerate(names):
        place = host / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text(f"Model: \t\t {name}\nDevice Minor: \t {number}\n")
    return host
