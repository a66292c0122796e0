"""Caches made of nothing, for the tests of sealing and seeding: they look like torch's, and take no time to make."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from env.cache import seal, sign
from env.cache.factors import cache_id
from env.cache.manifest import Manifest

FACTORS: dict[str, Any] = {
    "device.type": "cuda",
    "device.index": 0,
    "python.abi": "cpython-311-x86_64-linux-gnu",
    "python.minor": "3.11",
    "torch.version": "2.11.0+cu130",
    "torch.key": "aa" * 32,
    "system.gpu": "NVIDIA H200",
    "inductor.cpp.cxx": [None, "g++"],
    "inductor.max_autotune": False,
}
GPU: dict[str, Any] = {"name": "NVIDIA H200", "multi_processor_count": 132, "source": "read off a card"}
COUNTS = {"autograd_hit": 1, "fx_hit": 2, "triton_hit": 3}


class Tripwire:
    """Unpickling one makes a file: whoever finds it knows that something was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def entry(elapsed: int, **more: Any) -> bytes:
    """An entry as torch writes it, with a time in it."""
    return pickle.dumps({"_time_taken_ns": elapsed, "code": "def f(): pass", **more})


def make_source(folder: Path, *, elapsed: int = 12345678901, trap: Path | None = None, big: int = 0) -> Path:
    """A directory as torch leaves it: entries, code, Triton's folder, locks and leftovers."""
    files = {
        "fxgraph/ab/fabc/" + "x" * 51: entry(elapsed, trap=Tripwire(trap) if trap else None),
        "fxgraph/cd/fcde/" + "y" * 51: entry(elapsed + 7, other=1),
        "aotautograd/aaaa/" + "z" * 51: pickle.dumps({"forward_time_taken_ns": elapsed, "backward_time_taken_ns": 5}),
        "xy/cxyz.py": f"# kernel path: {folder}/q1/cq1.py\nx = 1\n".encode(),
        "q1/cq1.py": b"def kernel(): pass\n",
        "q1/abc.best_config": b'{"XBLOCK": 64, "time_taken_ms": %d, "num_warps": 4}' % (elapsed % 1000),
        "triton/0/KERNELHASH/kernel.cubin": b"\x7fELFnot really",
        "triton/0/KERNELHASH/__grp__kernel.json": str(folder).encode(),
        "locks/a.lock": b"",
        "q1/.123.tmp": b"left over",
    }
    if big:
        files["q1/big.so"] = os.urandom(1) * big
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def make_sealed(folder: Path, *, source: Path | None = None, **more: Any) -> tuple[Path, Manifest]:
    """Seal a source (a new one if none is given) below a folder, believed from its own `trust`."""
    source = source or make_source(folder / "source")
    options: dict[str, Any] = {
        "graph_id": "graphs",
        "gpu_id": "card",
        "gpu": GPU,
        "factors": FACTORS,
        "counts": COUNTS,
        "trust": folder / "trust",
        **more,
    }
    return seal.seal(source, folder / "sealed", **options)


def believed(folder: Path, policy: str | None = None) -> sign.Trust:
    """What `make_sealed` below this folder is believed from."""
    return sign.trust([folder / "trust"], policy=policy)


def identity() -> str:
    """The identity of what `make_sealed` makes."""
    return cache_id(FACTORS, "graphs", "card")


def opened(sealed: Path) -> Path:
    """A sealed cache, made writable again so that a test can harm it."""
    for place, _, names in os.walk(sealed):
        Path(place).chmod(0o755)
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(0o644)
    return sealed
