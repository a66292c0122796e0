"""Each kind of drift, planted in a real environment: named, refused with exit code 3, nothing touched, and mended.

`DRIFT_TABLE=FILE` writes what was seen as a table; with `pytest -s` it is printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tinywheels import ROOT, Workshop, listing, site

from env import drift
from env.errors import Exit

DRIFT = ROOT / "env" / "drift.py"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def prefix(workshop: Workshop, tmp_path: Path) -> Path:
    return workshop.copy(tmp_path / "environment")


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    yield rows
    head = ("planted", "named", "told of the first", "exit code", "changed by the refusal", "after `--repair`")
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    if where := os.environ.get("DRIFT_TABLE"):
        Path(where).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines))


def gate(prefix: Path, lock: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The file alone, run by an interpreter that knows neither the project nor any package."""
    command = [sys.executable, "-I", "-S", str(DRIFT), "--python", str(prefix / "bin" / "python"), "--lock", str(lock)]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


def edit(path: Path, old: bytes, new: bytes) -> None:
    """As an editor does it: another size, or another time stamp."""
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@dataclass(frozen=True)
class Planted:
    what: str
    plant: Callable[[Workshop, Path], object]
    names: tuple[str, ...]
    told: str
    """Part of the first line."""


def by_uv(*arguments: str, others: str) -> Callable[[Workshop, Path], object]:
    def plant(workshop: Workshop, prefix: Path) -> None:
        folder = workshop.others / others
        workshop.install(prefix, "install", "--find-links", workshop.wheels, "--find-links", folder, *arguments)

    return plant


def by_pip(wheel: str, *, force: bool = False) -> Callable[[Workshop, Path], object]:
    def plant(workshop: Workshop, prefix: Path) -> None:
        workshop.pip(prefix, *(["--force-reinstall"] if force else []), next(workshop.others.glob(wheel)))

    return plant


def swapped_and_synced_back(workshop: Workshop, prefix: Path) -> None:
    """What one would do to mend it, and what leaves an environment of which uv says that it is the locked one."""
    by_uv("torch==2.10.0", others="cu128")(workshop, prefix)
    workshop.install(prefix, "sync", "--require-hashes", "--find-links", workshop.wheels, workshop.lock)


def in_site(act: Callable[[Path], object]) -> Callable[[Workshop, Path], object]:
    return lambda _, prefix: act(site(prefix))


PLANTED = [
    Planted(
        "torch of another variant, by `uv pip install`",
        by_uv("torch==2.10.0", others="cu128"),
        ("torch", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
        "locked 2.11.0+cu130   found 2.10.0+cu128   asked for by name, installed by uv",
    ),
    Planted(
        "the same, and synced back: both variants' cuDNN lie in one folder",
        swapped_and_synced_back,
        ("nvidia-cudnn-cu13",),
        "locked 9.19.0.56   found 9.19.0.56   nvidia/cudnn/lib/libcudnn.so.9 missing",
    ),
    Planted(
        "the same version built for another CUDA, metadata and all",
        by_pip("mirror/torch-*.whl", force=True),
        ("torch",),
        "locked 2.11.0+cu130   found 2.11.0+cu128   it is built for CUDA 12.8, asked for by name, installed by pip",
    ),
    Planted(
        "the same version for CPUs, with a local label",
        by_pip("cpu/torch-*.whl"),
        ("torch",),
        "locked 2.11.0+cu130   found 2.11.0+cpu",
    ),
    Planted(
        "the same version and CUDA, built from other source",
        by_pip("source/torch-*.whl", force=True),
        ("torch",),
        "another build: of commit deadbeef",
    ),
    Planted(
        "the same version and CUDA, built on another platform",
        by_pip("tagged/torch-*.whl", force=True),
        ("torch",),
        "another build: cp3",
    ),
    Planted(
        "the same version of a package, from a wheel with other files",
        by_pip("rebuilt/numpy-*.whl", force=True),
        ("numpy",),
        "another build: its RECORD lists other files",
    ),
    Planted(
        "an inference engine that brings its own CUDA libraries",
        by_uv("flashinfer-python", others="engine"),
        ("flashinfer-python", "nvidia-cublas-cu12"),
        "not locked   found 0.6.1      asked for by name, installed by uv",
    ),
    Planted(
        "a package downgraded by pip",
        by_pip("old/numpy-*.whl"),
        ("numpy",),
        "locked 2.4.6   found 1.26.4   asked for by name, installed by pip",
    ),
    Planted(
        "a package uninstalled",
        lambda workshop, prefix: workshop.install(prefix, "uninstall", "triton"),
        ("triton",),
        "locked 3.6.0   not found",
    ),
    Planted(
        "a file of torch deleted",
        in_site(lambda s: (s / "torch/lib/libtorch_cuda.so").unlink()),
        ("torch",),
        "torch/lib/libtorch_cuda.so missing",
    ),
    Planted(
        "a `.py` of torch edited",
        in_site(lambda s: edit(s / "torch/_dynamo/eval_frame.py", b"False", b"True")),
        ("torch",),
        "torch/_dynamo/eval_frame.py edited",
    ),
    Planted(
        "a `.so` edited, its size kept",
        in_site(lambda s: edit(s / "torch/lib/libtorch_cuda.so", b"\x10\x11", b"\x11\x10")),
        ("torch",),
        "torch/lib/libtorch_cuda.so edited",
    ),
    Planted(
        "a library of NVIDIA replaced by another release's",
        in_site(lambda s: (s / "nvidia/cudnn/lib/libcudnn.so.9").write_bytes(b"\x7fELF cudnn 9.10")),
        ("nvidia-cudnn-cu13",),
        "nvidia/cudnn/lib/libcudnn.so.9 edited",
    ),
    Planted(
        "a module dropped among torch's",
        in_site(lambda s: (s / "torch/_dynamo/patch.py").write_text("")),
        ("torch",),
        "torch/_dynamo/patch.py added",
    ),
    Planted(
        "a `.pth` file that runs code at every start",
        in_site(lambda s: (s / "hook.pth").write_text("import sys; sys.flags\n")),
        ("hook.pth",),
        "it runs at every start: import sys; sys.flags",
    ),
    Planted(
        "a `sitecustomize`",
        in_site(lambda s: (s / "sitecustomize.py").write_text("import os\n")),
        ("sitecustomize.py",),
        "it runs at every start",
    ),
    Planted(
        "torch's metadata twice",
        in_site(lambda s: shutil.copytree(s / "torch-2.11.0.dist-info", s / "torch-2.10.0.dist-info")),
        ("torch",),
        "it has 2 sets of metadata",
    ),
    Planted(
        "the system's packages let in",
        lambda _, prefix: edit(prefix / "pyvenv.cfg", b"packages = false", b"packages = true"),
        ("pyvenv.cfg",),
        "include-system-site-packages = true   the system's packages are let in",
    ),
]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.what)
def test_a_planted_drift_is_named_and_refused_and_nothing_is_touched_until_it_is_mended(
    case: Planted, workshop: Workshop, prefix: Path, table: list[tuple[str, ...]]
) -> None:
    assert gate(prefix, workshop.lock).returncode == Exit.DONE
    case.plant(workshop, prefix)
    before = listing(prefix)

    refused = gate(prefix, workshop.lock)

    assert listing(prefix) == before, "the refusal changed the environment"
    assert (refused.returncode, refused.stdout) == (Exit.DRIFT, "")
    first, *lines, hint = refused.stderr.splitlines()
    assert first == "error: this environment is not the locked one (cu130)"
    assert "Traceback" not in refused.stderr
    named = [line.split()[0] for line in lines]
    assert set(named) == set(case.names), refused.stderr
    assert case.told in refused.stderr
    assert "`--allow-drift`" in hint
    told = json.loads(gate(prefix, workshop.lock, "--json").stdout)
    assert {d["name"] for d in told["drifts"]} == set(case.names)
    imported = drift.compare(prefix / "bin" / "python", workshop.lock, environ={})
    assert json.loads(json.dumps([asdict(d) for d in imported])) == told["drifts"]

    assert "`nox -s train -- --repair` installs the locked set" in hint
    workshop.make(prefix)
    mended = gate(prefix, workshop.lock)
    assert mended.returncode == Exit.DONE, mended.stderr
    names = ", ".join(f"`{name}`" for name in case.names)
    first = _told(told["drifts"], case.names[0])
    table.append((case.what, names, first, str(refused.returncode), "nothing", f"exit code {mended.returncode}"))


def _told(drifts: list[dict[str, str]], name: str) -> str:
    one = next(d for d in drifts if d["name"] == name)
    versions = f"locked {one['locked'] or '-'}, found {one['found'] or '-'}"
    where = ", ".join(filter(None, (one["why"], one["origin"])))
    where = re.sub(r"file:///\S*/", "file:///.../", where).replace("|", "\\|")
    return f"{versions}: {where}" if where else versions


def test_what_an_engine_brought_is_told_with_who_brought_it(workshop: Workshop, prefix: Path) -> None:
    by_uv("flashinfer-python", others="engine")(workshop, prefix)
    drifts = {d.name: d for d in drift.compare(prefix / "bin/python", workshop.lock, environ={})}
    assert drifts["nvidia-cublas-cu12"].origin == "required by flashinfer-python 0.6.1, installed by uv"
    assert str(drift.failure(tuple(drifts.values()), "cu130")).splitlines() == [
        "error: this environment is not the locked one (cu130)",
        "  flashinfer-python    not locked   found 0.6.1      asked for by name, installed by uv",
        "  nvidia-cublas-cu12   not locked   found 12.8.4.1   required by flashinfer-python 0.6.1, installed by uv",
        "hint: `nox -s train -- --repair` installs the locked set; `--allow-drift` goes on as it is",
    ]
