"""The environment variables of a training process: those that feed cache keys are taken away or fixed, and it is said.

A cache baked on another machine hits only if nothing that enters a key differs, and a host's modules, profiles and job
systems set many such variables: one that set `CXX` made every key of a GPU cache miss. Standard library only, because
the launch calls this before torch exists.
"""

from __future__ import annotations

import fnmatch
import os
import pwd
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

KEEP = "DFLASH_KEEP"
"""The variable by which a user keeps others: names or patterns, as in `DFLASH_KEEP=CXX,TORCHINDUCTOR_MAX_AUTOTUNE*`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One variable of the host that the training process does not get as it was, or that the user had kept."""

    name: str
    """The variable."""

    old: str | None
    """Its value in the host's environment; None if it was not set."""

    new: str | None
    """Its value in the training process; None if it was taken away."""

    why: str
    """What it would have fed."""

    def sentence(self) -> str:
        """What happened to it, for the user."""
        if self.old is not None and self.new == self.old:
            return f"kept {self.name}={self.old}: {self.why}"
        if self.new is None:
            return f"took away {self.name}={self.old}: {self.why} (`{KEEP}={self.name}` keeps it)"
        before = "unset" if self.old is None else f"`{self.old}`"
        return f"set {self.name} to `{self.new}` (was {before}): {self.why}"


HARMLESS = (
    "TORCH_LOGS", "TORCH_LOGS_*", "TORCH_TRACE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_DISTRIBUTED_DEBUG",
    "TORCHDYNAMO_VERBOSE", "TORCHDYNAMO_REPRO_*", "TORCH_COMPILE_CPROFILE", "TORCH_COMPILE_DYNAMO_PROFILER",
    "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_*", "TORCHINDUCTOR_COMPILE_WORKER_*",
    "TORCH_COMPILE_WORKER_MODE", "TRITON_PRINT_AUTOTUNING", "TRITON_LIBCUDA_PATH", "TRITON_CUPTI_LIB*",
    "TRITON_PROTON_DISABLE",
)  # fmt: skip
"""They match a pattern below, but what they set is in no key: logs, workers, where a driver lies."""

FEEDS: tuple[tuple[str, str], ...] = (
    ("CXX", "its text is inductor's `cpp.cxx`, which is in every key, even of kernels for GPUs"),
    ("TORCHINDUCTOR_CACHE_DIR", "the cache's directory is chosen by its identity"),
    ("TRITON_CACHE_DIR", "Triton's cache lies inside of the one that is chosen by its identity"),
    ("TRITON_PTXAS*PATH", "the version of ptxas is in the keys of Triton's kernels"),
    ("TRITON_*", "Triton's settings are in its keys or change its kernels"),
    ("TORCHINDUCTOR_*", "inductor's settings are in every key"),
    ("INDUCTOR_*", "inductor's settings are in every key"),
    ("AOTINDUCTOR_*", "inductor's settings are in every key"),
    ("AOT_*", "inductor's and functorch's settings are in every key"),
    ("TORCHDYNAMO_*", "dynamo's settings decide what the graphs are"),
    ("TORCH_DYNAMO_*", "dynamo's settings decide what the graphs are"),
    ("TORCH_COMPILE_*", "the compiler's settings decide what the graphs and their keys are"),
    ("TORCH_COMPILER_*", "the compiler's settings decide what the graphs and their keys are"),
    ("TORCH_CACHING_PRECOMPILE", "it adds another cache with keys of its own"),
    ("TORCH_STRICT_PRECOMPILE", "it adds another cache with keys of its own"),
    ("TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK", "it decides whether ranks and device indices are in keys"),
    ("TORCH_FAKE_TENSOR_*", "dynamo's settings decide what the graphs are"),
    ("TORCH_CUDAGRAPH_GC", "inductor's settings are in every key"),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "the precision of matrix products is in every key"),
    ("ATEN_CPU_CAPABILITY", "it limits the instructions of the CPU's kernels"),
    ("CUTLASS_*", "inductor's settings are in every key"),
    ("CUTEDSL_*", "inductor's settings are in every key"),
    ("PALLAS_*", "inductor's settings are in every key"),
    ("FLYDSL_*", "inductor's settings are in every key"),
    ("ENABLE_PERSISTENT_TMA_MATMUL", "inductor's settings are in every key"),
    ("ENABLE_HOST_SIDE_TMA", "inductor's settings are in every key"),
    ("ENABLE_TMA_LOAD_FOR_TEMPLATE_EPILOGUE", "inductor's settings are in every key"),
    ("ENABLE_TEMPLATE_*", "inductor's settings are in every key"),
    ("ENABLE_EPILOGUE_SUBTILING", "inductor's settings are in every key"),
    ("LOG_TLPARSE", "inductor's settings are in every key"),
    ("LOG_AUTOTUNE_RESULTS", "inductor's settings are in every key"),
    ("DUMP_AOTI_MINIFIER", "inductor's settings are in every key"),
    ("CI", "functorch's `error_on_custom_op_aliasing` is true where it is set: what CI bakes would hit nowhere else"),
    ("FAKE_ALLOW_META", "functorch's settings are in every key"),
    ("PARTITIONER_*", "functorch's settings are in every key"),
    ("UNSAFE_SKIP_FSDP_MODULE_GUARDS", "dynamo's settings decide what the graphs are"),
    ("PTXAS_OPTIONS", "Triton's settings are in its keys or change its kernels"),
    ("DISABLE_PTXAS_OPT", "Triton's settings are in its keys or change its kernels"),
    ("DISABLE_LLVM_OPT", "Triton's settings are in its keys or change its kernels"),
    ("DISABLE_MMA_V*", "Triton's settings are in its keys or change its kernels"),
    ("ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "Triton's settings are in its keys or change its kernels"),
    ("USE_IR_LOC", "Triton's settings are in its keys or change its kernels"),
    ("LLVM_*", "Triton's settings are in its keys or change its kernels"),
    ("MLIR_*", "Triton's settings are in its keys or change its kernels"),
    ("NVPTX_*", "Triton's settings are in its keys or change its kernels"),
    ("AMDGCN_*", "Triton's settings are in its keys or change its kernels"),
)
"""Which variables feed keys (torch 2.10 to 2.15, Triton 3.6 to 3.9), the first pattern that matches; and by what way.

`CC` is not among them: it only chooses what compiles Triton's launchers, and on some hosts it is the only way to one.
"""


def feeds(name: str) -> str | None:
    """What a variable feeds; None if it cannot change a key or a kernel."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in HARMLESS):
        return None
    return next((why for pattern, why in FEEDS if fnmatch.fnmatchcase(name, pattern)), None)


def kept(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names and patterns that the user keeps, from `DFLASH_KEEP`; blanks and commas separate them."""
    return tuple(word for word in re.split(r"[\s,]+", environ.get(KEEP, "")) if word)


def pinned(
    environ: Mapping[str, str], python: Path | None = None, *, keep: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[Override, ...]]:
    """The environment of a training process, and what in it is not as the host had it, in the order of names.

    `python` is the interpreter that will run: torch's ptxas beside it is fixed, because torch would find it only in
    some processes, which gave a cold process other keys than a warm one. `keep` are names or patterns that stay, beside
    those in `DFLASH_KEEP`. Calling this on its own result changes nothing and reports what is kept.
    """
    patterns = (*kept(environ), *keep)
    result = dict(environ)
    overridden = []
    fixed = _fixed(python)
    for name in sorted({*environ, *fixed}):
        why = feeds(name)
        old = environ.get(name)
        if why is None or old == fixed.get(name):
            continue
        if old is not None and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            overridden.append(Override(name=name, old=old, new=old, why=f"{why} ({KEEP} keeps it)"))
            continue
        if name == "CXX" and shutil.which("g++", path=environ.get("PATH")) is None:
            # without it there would be no compiler at all, which is worse than another key
            why = f"{why}, but there is no `g++` on the PATH to use instead; install one for baked caches to fit"
            overridden.append(Override(name=name, old=old, new=old, why=why))
            continue
        new = fixed.get(name)
        if new is None:
            del result[name]
        else:
            result[name] = new
        overridden.append(Override(name=name, old=old, new=new, why=why))
    if _nameless(environ):
        why = "this user id has no passwd entry, and torch asks for the user's name"
        result["USER"] = f"uid{os.getuid()}"
        overridden.append(Override(name="USER", old=environ.get("USER"), new=result["USER"], why=why))
    return result, tuple(overridden)


PROBING = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
"""Inductor believes what the CPU says of itself, rather than ask in child processes that compile and import torch.

Each process that compiles for the CPU asked anew, which was most of a warm first step; a compiler that does not know
the CPU's instructions fails at the first kernel instead. It is in every key: `tests/conftest.py` sets it, too.
"""


def _fixed(python: Path | None) -> dict[str, str]:
    """Variables that get a value rather than none."""
    if python is None:
        return {}
    # not resolved: the interpreter of a virtual environment is a link out of it
    found = sorted(python.absolute().parent.parent.glob("lib/python*/site-packages/torch/bin/ptxas"))
    return PROBING | ({"TRITON_PTXAS_PATH": str(found[-1])} if found else {})


NAMING = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where Python looks for the user's name before it asks the password database."""


def _nameless(environ: Mapping[str, str]) -> bool:
    """Whether asking for the user's name would fail: torch does so for a folder of temporary files."""
    if any(environ.get(name) for name in NAMING):
        return False
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return True
    return False
