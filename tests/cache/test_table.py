"""One factor of each kind changed at a time: verify names exactly that one, and docs/compile.md shows the table.

    python tests/cache/test_table.py    prints the table

The identities are those of real bakes for an H200 and for a CPU, without the hundreds of settings that nothing here
changes. That such changes really miss, in real processes, is seen in test_real.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env import gpus
from env.cache import store, verify
from env.cache.canonical import Json
from env.cache.manifest import Manifest

DOCS = Path(__file__).parents[2] / "docs/compile.md"
CARD = gpus.find("h200")
ON_CARD = store.Identity(
    factors={
        "device.index": 0,
        "device.type": "cuda",
        "dynamo.capture_scalar_outputs": False,
        "functorch.cse": True,
        "inductor.cpp.cxx": [None, "g++"],
        "inductor.max_autotune": False,
        "python.abi": "cpython-311-x86_64-linux-gnu",
        "python.minor": "3.11",
        "system.cuda": "13.0",
        "system.gpu": "NVIDIA H200",
        "torch.cache_key_tag": "",
        "torch.cuda": "13.0",
        "torch.default_dtype": "torch.float32",
        "torch.deterministic": False,
        "torch.key": "5615ced183fc107f",
        "torch.matmul.fp32_precision": "none",
        "torch.version": "2.11.0+cu130",
        "triton.arch": "sm_90a",
        "triton.key": "deafe87b60a26224",
        "triton.ptxas": "Cuda compilation tools, release 13.0, V13.0.88",
        "triton.version": "3.6.0",
    },
    graph_id="6e1ac0",
    gpu_id=gpus.gpu_id(CARD),
    gpu={name: getattr(CARD, name) for name in gpus.DECIDES},
)
ON_CPU = store.Identity(
    factors={
        "cpu.capability": "AVX512",
        "cpu.compiler": "g++ (Debian 12.2.0-14+deb12u1) 12.2.0",
        "cpu.instruction_sets": ["amx_tile", "avx512", "avx2"],
        "cpu.threads": 2,
        "device.type": "cpu",
        "torch.version": "2.11.0+cu130",
    },
    graph_id="6e1ac0",
    gpu_id="cpu",
    gpu={"name": "cpu"},
)

KINDS: dict[str, tuple[store.Identity, str, Json]] = {
    "torch's files": (ON_CARD, "torch.key", "9b31c0ffee52aa07"),
    "torch's release": (ON_CARD, "torch.version", "2.10.0+cu128"),
    "Triton's files": (ON_CARD, "triton.key", "c4d2017e93b5f680"),
    "Python": (ON_CARD, "python.minor", "3.12"),
    "Python's ABI": (ON_CARD, "python.abi", "cpython-311d-x86_64-linux-gnu"),
    "CUDA": (ON_CARD, "torch.cuda", "12.8"),
    "ptxas": (ON_CARD, "triton.ptxas", "Cuda compilation tools, release 12.8, V12.8.93"),
    "a setting of Inductor": (ON_CARD, "inductor.max_autotune", True),
    "a setting of Dynamo": (ON_CARD, "dynamo.capture_scalar_outputs", True),
    "a setting of functorch": (ON_CARD, "functorch.cse", False),
    "a variable that feeds a setting": (ON_CARD, "inductor.cpp.cxx", [None, "/usr/bin/g++"]),
    "a variable of Triton": (ON_CARD, "triton.env.TRITON_DISABLE_LINE_INFO", "1"),
    "the tag of keys": (ON_CARD, "torch.cache_key_tag", "mine"),
    "the precision of products": (ON_CARD, "torch.matmul.fp32_precision", "tf32"),
    "deterministic algorithms": (ON_CARD, "torch.deterministic", True),
    "the default dtype": (ON_CARD, "torch.default_dtype", "torch.bfloat16"),
    "the device's index": (ON_CARD, "device.index", 6),
    "the graphs": (ON_CARD, "graph_id", "b07f3d"),
    "the card": (ON_CARD, "gpu.multi_processor_count", 114),
    "the CPU's instruction set": (ON_CPU, "cpu.instruction_sets", ["avx2"]),
    "the CPU's compiler": (ON_CPU, "cpu.compiler", "g++ (GCC) 14.2.0"),
    "threads": (ON_CPU, "cpu.threads", 64),
}
"""Each kind of factor, the one that is changed, and its value here."""

FEEDING = {"inductor.cpp.cxx": ("CXX",), "inductor.max_autotune": ("TORCHINDUCTOR_MAX_AUTOTUNE",)}
ENVIRON = {"CXX": "/usr/bin/g++", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}


def manifest(identity: store.Identity) -> Manifest:
    return Manifest(
        cache_id=identity.cache_id,
        graph_id=identity.graph_id,
        gpu_id=identity.gpu_id,
        gpu=dict(identity.gpu),
        factors=dict(identity.factors),
        keys={"aot_autograd": ("a1",), "fx": ("f1",), "triton": ()},
        counts={"autograd_hit": 1, "fx_hit": 1, "triton_hit": 0},
        files={},
        digest="0" * 64,
    )


def changed(identity: store.Identity, name: str, value: Json) -> store.Identity:
    """An identity with one factor of another value; its card is another one when a property of it differs."""
    if name == "graph_id":
        return replace(identity, graph_id=str(value))
    if name.startswith("gpu."):
        card = replace(CARD, **{name.removeprefix("gpu."): value})  # type: ignore[arg-type]
        properties = {key: getattr(card, key) for key in gpus.DECIDES}
        return replace(identity, gpu_id=gpus.gpu_id(card), gpu=properties)
    return replace(identity, factors={**identity.factors, name: value})


def reasons(kind: str) -> tuple[str, ...]:
    """What verify says when everything missed in a process that differs in this one thing."""
    identity, name, value = KINDS[kind]
    replay: dict[str, Any] = {
        "counts": {"autograd_hit": 0, "autograd_miss": 1, "fx_hit": 0, "fx_miss": 1, "triton_hit": 0},
        "keys": {"autograd_miss": ["a2"], "fx_miss": ["f2"]},
        "identity": changed(identity, name, value).flat(),
    }
    return verify.judge(manifest(identity), replay, variables=FEEDING, environ=ENVIRON).reasons


def table() -> list[str]:
    """The table of the documentation."""
    lines = ["| changed | what verify says |", "| --- | --- |"]
    return [*lines, *(f"| {kind} | {' '.join(reasons(kind))} |" for kind in KINDS)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_one_factor_that_differs_is_named_with_both_values_and_the_way_out(kind: str) -> None:
    identity, name, value = KINDS[kind]
    (reason,) = reasons(kind)
    assert reason.startswith(f"{name}: sealed `")
    assert "`, here `" in reason
    assert reason.partition(" — ")[2]
    assert changed(identity, name, value).cache_id != identity.cache_id, "a launch would choose another directory"


def test_every_kind_of_factor_that_there_is_has_a_row() -> None:
    names = {name for _, name, _ in KINDS.values()}
    families: tuple[str, ...] = ("torch.key", "triton.key", "python.abi", "torch.cuda", "triton.ptxas", "inductor.")
    families += ("dynamo.", "functorch.", "triton.env.", "device.index", "graph_id", "gpu.", "cpu.instruction_sets")
    for family in families:
        assert any(name.startswith(family) for name in names), family


def test_the_documentation_shows_this_table() -> None:
    assert "\n".join(table()) in DOCS.read_text(encoding="utf-8"), "`python tests/cache/test_table.py` prints it anew"


if __name__ == "__main__":
    print("\n".join(table()))
