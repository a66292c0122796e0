"""Environments as small as they can be and still real: wheels of a few bytes, a hashed lock, uv, a virtual environment.

The wheels bear the names and versions of the real ones, so that what is said about them reads as it would.
"""

from __future__ import annotations

import base64
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = f"cp3{sys.version_info.minor}"


def uv() -> str:
    """The uv that tests install with: beside this Python, on the path, or of the project's own tools."""
    beside = [Path(sys.executable).with_name("uv"), *ROOT.glob(".nox/*/bin/uv"), *ROOT.glob(".nox/*/*/bin/uv")]
    found = next((str(path) for path in beside if path.exists()), None) or shutil.which("uv")
    if found is None:
        pytest.skip("uv is neither beside this Python nor on the path")
    return found


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str | bytes],
    *,
    requires: Iterable[str] = (),
    tag: str = "py3-none-any",
) -> Path:
    """A wheel with these files, the same bytes from the same arguments."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    metadata = "".join(
        [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            *(f"Requires-Dist: {r}\n" for r in requires),
            "\n",
        ]
    )
    contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    contents[f"{info}/METADATA"] = metadata.encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tiny\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    record = [f"{path},sha256={_digest(content)},{len(content)}" for path, content in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in contents.items():
            archive.writestr(zipfile.ZipInfo(inside), content)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def torch(
    folder: Path, version: str, label: str, *, requires: Sequence[str], git: str = "70d99e99", **how: str
) -> Path:
    """A torch of few bytes that says of itself what a real one says: CUDA from the label, `cu130` or `cpu`."""
    cuda = f"'{label[2:4]}.{label[4:]}'" if label.startswith("cu1") else "None"
    told = f"__version__ = '{version.partition('+')[0]}+{label}'\ncuda: str | None = {cuda}\ngit_version = '{git}'\n"
    files: dict[str, str | bytes] = {
        "torch/__init__.py": "from torch.version import __version__\n",
        "torch/version.py": told,
        "torch/_dynamo/eval_frame.py": "COMPILING = False\n" * 8,
        "torch/lib/libtorch_cuda.so": bytes(range(256)) * 16,
        "torch/_C.cpython.so": b"\x7fELF" + label.encode(),
    }
    return wheel(folder, "torch", version, files, requires=requires, **how)


def locked_wheels(folder: Path) -> None:
    """What the lock asks for."""
    torch(folder, "2.11.0", "cu130", requires=["numpy", "triton==3.6.0", "nvidia-cuda-runtime==13.0.96"])
    wheel(folder, "triton", "3.6.0", {"triton/__init__.py": "", "triton/backends/nvidia/bin/ptxas": b"\x7fELF ptxas"})
    wheel(folder, "nvidia-cuda-runtime", "13.0.96", {"nvidia/cu13/lib/libcudart.so.13": b"\x7fELF cudart 13.0.96"})
    wheel(folder, "nvidia-cudnn-cu13", "9.19.0.56", {"nvidia/cudnn/lib/libcudnn.so.9": b"\x7fELF cudnn 9.19"})
    wheel(folder, "numpy", "2.4.6", {"numpy/__init__.py": "__version__ = '2.4.6'\n"})
    wheel(
        folder,
        "transformers",
        "5.24.0",
        {"transformers/__init__.py": "", "transformers-5.24.0.dist-info/entry_points.txt": _SCRIPT},
        requires=["numpy"],
    )


_SCRIPT = "[console_scripts]\ntransformers = transformers:main\n"


def other_wheels(folder: Path) -> None:
    """What somebody else might install over it."""
    cuda = ["nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cudnn-cu12==9.10.2.21"]
    torch(folder / "cu128", "2.10.0", "cu128", requires=["numpy", *cuda], git="449b1768")
    wheel(folder / "cu128", "nvidia-cudnn-cu12", "9.10.2.21", {"nvidia/cudnn/lib/libcudnn.so.9": b"\x7fELF cudnn 9.10"})
    wheel(folder / "cu128", "nvidia-cuda-runtime-cu12", "12.8.90", {"nvidia/cuda_runtime/lib/libcudart.so.12": b"12.8"})
    torch(folder / "cpu", "2.11.0+cpu", "cpu", requires=["numpy"])
    torch(folder / "mirror", "2.11.0", "cu128", requires=["numpy"])
    torch(folder / "source", "2.11.0", "cu130", requires=["numpy"], git="deadbeef")
    torch(folder / "tagged", "2.11.0", "cu130", requires=["numpy"], tag=f"{HERE}-{HERE}-linux_{os.uname().machine}")
    wheel(folder / "rebuilt", "numpy", "2.4.6", {"numpy/__init__.py": "__version__ = '2.4.6'  # rebuilt\n"})
    wheel(folder / "old", "numpy", "1.26.4", {"numpy/__init__.py": "__version__ = '1.26.4'\n"})
    wheel(
        folder / "engine",
        "flashinfer-python",
        "0.6.1",
        {"flashinfer/__init__.py": ""},
        requires=["torch", "nvidia-cublas-cu12==12.8.4.1", 'pynvml; extra == "monitor"'],
    )
    wheel(folder / "engine", "nvidia-cublas-cu12", "12.8.4.1", {"nvidia/cublas/lib/libcublas.so.12": b"\x7fELF 12.8"})


def run(*command: str | Path, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A program with its output, in an environment that knows of no index and no settings of this machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_", "PYTHON", "COV_", "LD_"))}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env={**kept, "UV_OFFLINE": "1"}
    )
    assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


class Workshop:
    """Wheels, the lock over them, and environments made from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels, self.others, self.lock = folder / "wheels", folder / "others", folder / "cu130.txt"
        locked_wheels(self.wheels)
        other_wheels(self.others)
        asked = folder / "cu130.in"
        asked.write_text("torch==2.11.0\ntransformers\nnvidia-cudnn-cu13\n")
        options = ["--universal", "--generate-hashes", "--python-version", f"3.{sys.version_info.minor}", "--no-config"]
        where: list[str | Path] = ["--no-index", "--find-links", self.wheels, "--cache-dir", folder / "cache"]
        run(uv(), "pip", "compile", "--quiet", *options, *where, "-o", self.lock, asked)

    def make(self, prefix: Path) -> Path:
        """What `--repair` does, for the small set: an environment from the lock, in place of what is there."""
        from env import drift

        shutil.rmtree(prefix, ignore_errors=True)
        cache: list[str | Path] = ["--no-config", "--cache-dir", self.folder / "cache"]
        run(uv(), "venv", "--quiet", "--no-project", *cache, "--python", sys.executable, prefix)
        self.install(prefix, "sync", "--require-hashes", "--find-links", self.wheels, self.lock)
        drift.stamp(prefix / "bin" / "python", self.lock)
        return prefix

    def copy(self, prefix: Path) -> Path:
        """The same as `make` in a tenth of the time; time stamps are kept, and so its stamp is right."""
        template = self.folder / "template"
        if not template.exists():
            self.make(template)
        return Path(shutil.copytree(template, prefix, symlinks=True))

    def install(self, prefix: Path, command: str, *arguments: str | Path) -> None:
        """`uv pip`, on an environment, from local folders only."""
        options: list[str | Path] = ["--quiet", "--no-config", "--cache-dir", self.folder / "cache"]
        options += [] if command == "uninstall" else ["--no-index", "--link-mode", "copy"]
        run(uv(), "pip", command, *options, "--python", prefix / "bin" / "python", *arguments)

    def pip(self, prefix: Path, *arguments: str | Path) -> None:
        """pip's own `install`, from local folders only; pip as Python brings it along."""
        unpacked = self.folder / "pip"
        if not unpacked.exists():
            bundled = sorted(Path(sys.base_prefix).glob("lib/python3.*/ensurepip/_bundled/pip-*.whl"))
            if not bundled:
                pytest.skip("this Python brings no pip along")
            zipfile.ZipFile(bundled[0]).extractall(unpacked)
        options = ["--disable-pip-version-check", "--quiet", "--no-index", "--no-deps"]
        run(prefix / "bin" / "python", unpacked / "pip", "install", *options, *arguments)


def processor_seconds() -> float:
    """What this process and the children that it waited for have cost; the wall clock would measure its neighbours."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def site(prefix: Path) -> Path:
    """Where the packages of an environment lie."""
    return prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


def listing(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder: kind, size, time stamps, hash or link target. Two equal ones: nothing was touched."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        stat = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else _digest(path.read_bytes()) if path.is_file() else ""
        found[str(path.relative_to(folder))] = (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, content)
    return found
