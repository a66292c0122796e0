"""Every factor that enters a compile cache's keys, with its value, as this process sees it.

All that the cache needs of torch's private parts is in this module, but for the setting that a card with little shared
memory needs (`fitting.py`).

Collected in the process, and in the thread, that will train: from torch 2.12 on each thread has a configuration of its
own. Values are plain JSON, so that two machines' factors can be compared line by line; what is only where something
lies, and not what it is, stays out.
"""

# ruff: noqa: SLF001  # torch has no public way to any of this

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import math
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from env.cache.canonical import Json, digest
from env.errors import Exit, Failure

READ_IN = ("2.10", "2.11", "2.15")
"""The versions of torch in which everything here was read: FxGraphHashDetails, AOTAutogradCacheDetails, get_system."""

FORMAT = 1
"""Enters every identity, so that another meaning of the same names cannot pass for the old one."""

NOT_DECIDING = frozenset((
    "error_on_nested_fx_trace", "error_on_nested_jit_trace", "force_compile_during_fx_trace", "suppress_errors",
    "error_on_dynamo_callback_in_fullgraph_compiled_code", "log_compilation_metrics", "log_graph_in_out_metadata",
    "record_runtime_overhead", "record_compile_time_instruction_count", "run_gc_after_compile",
    "gc_gen2_threshold_during_compile", "issue_3_13_0_warning", "debug_disable_compile_counter",
    "graph_deduplication_lint", "fake_tensor_cache_crosscheck_enabled", "pt2_compile_id_prefix",
    "capture_profiler_record_function", "enrich_profiler_metadata", "skip_code_recursive_on_recompile_limit_hit",
    "automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo", "only_allow_pt2_compliant_ops",
    "_custom_ops_profile", "strict_precompile", "invalidate_compile_context_weakrefs", "reorderable_logging_functions",
    "ignore_logging_functions", "ignore_logger_methods", "minimum_call_count",
))  # fmt: skip
"""Dynamo's settings that watch, limit or report, and never change a graph. Torch names others itself."""

NO_SETTING = frozenset(("TYPE_CHECKING", "_save_config_ignore", "_cache_config_ignore_prefix"))
"""Names in torch's configuration modules that are no settings of theirs."""


def collect(device: str = "cuda:0") -> dict[str, Json]:
    """Each factor by name, for compilations on a device: `cpu`, `cuda:0`, `cuda:5`.

    For the CPU this includes its instruction set, the compiler and its command line, because those kernels are built
    here; for a GPU it includes ptxas, and needs the card or `env.offline`'s pretence of one.

    Raises:
        Failure: Exit.HOST, for a torch whose keys we have not read, and when a compiler is missing.
    """
    import torch

    _require_known(torch.__version__)
    kind, _, index = device.partition(":")
    found: dict[str, Json] = {"device.type": kind}
    found |= _python()
    found |= _torch(torch)
    found |= _settings()
    found |= _system()
    if kind == "cuda":
        found["device.index"] = int(index or 0)
        found |= _gpu(torch, int(index or 0))
        if found["system.gpu"] is None:
            raise Failure(
                Exit.HOST,
                "torch's keys would hold no GPU's name here, so they would fit no card",
                hint="collect factors where torch sees the card, or inside of `env.offline.pretend`",
            )
    else:
        found |= _cpu(torch)
    return dict(sorted(found.items()))


def cache_id(factors: Mapping[str, Json], graph_id: str, gpu_id: str) -> str:
    """Hexadecimal sha256 that names a cache: of the factors, the graphs, and the card (`cpu` where there is none)."""
    return digest({"format": FORMAT, "factors": dict(factors), "graph_id": graph_id, "gpu_id": gpu_id})


def _require_known(version: str) -> None:
    if not version.startswith(tuple(f"{known}." for known in READ_IN)):
        raise Failure(
            Exit.HOST,
            f"torch {version}: what enters its cache keys is known only for {', '.join(READ_IN)}",
            hint="use a locked environment (`nox -s train`), or read its keys and add it to env/cache/factors.py",
        )


def _read(what: str, look: Callable[[], Any]) -> Any:
    """Read a private of torch; where it has moved, say so instead of leaving a factor out."""
    try:
        return look()
    except (AttributeError, ImportError) as error:
        raise Failure(
            Exit.HOST,
            f"this torch has no {what} where versions {', '.join(READ_IN)} have it",
            details=[str(error)],
            hint="the environment has drifted: `nox -s doctor` names what is not the locked package",
        ) from error


def _python() -> dict[str, Json]:
    return {
        "python.abi": str(sysconfig.get_config_var("SOABI")),
        "python.minor": sysconfig.get_python_version(),
    }


def _torch(torch: Any) -> dict[str, Json]:
    matmul, deterministic = torch.backends.cuda.matmul, torch.utils.deterministic

    def key() -> str:
        from torch._inductor.codecache import torch_key

        return torch_key().hex()

    def tag() -> str:
        from torch.compiler.config import cache_key_tag

        return str(cache_key_tag)

    return {
        "torch.version": torch.__version__,
        "torch.git": torch.version.git_version,
        "torch.cuda": torch.version.cuda,
        "torch.key": _read("torch_key", key),
        "torch.cache_key_tag": _read("cache_key_tag", tag),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch.deterministic.warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.deterministic.fill": deterministic.fill_uninitialized_memory,
        "torch.matmul.fp32_precision": matmul.fp32_precision,
        "torch.matmul.fp16_reduced_precision": plain(matmul.allow_fp16_reduced_precision_reduction),
        "torch.matmul.bf16_reduced_precision": plain(matmul.allow_bf16_reduced_precision_reduction),
    }


def _configurations() -> dict[str, Any]:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    return {
        "dynamo": torch._dynamo.config,
        "functorch": torch._functorch.config,
        "inductor": torch._inductor.config,
    }


def _settings() -> dict[str, Json]:
    """Inductor's, functorch's and dynamo's settings in this thread, as torch itself puts them into keys."""
    modules = _configurations()
    inductor, functorch, dynamo = modules["inductor"], modules["functorch"], modules["dynamo"]
    settings = {
        "inductor": _read("save_config_portable", lambda: inductor.save_config_portable(ignore_private_configs=False)),
        "functorch": _read(
            "configuration", lambda: functorch._get_dict(ignored_keys=list(functorch._save_config_ignore))
        ),
        "dynamo": _read(
            "configuration",
            lambda: dynamo._get_dict(ignored_keys=[*dynamo._compile_ignored_keys, *NOT_DECIDING]),
        ),
    }
    return {
        f"{family}.{name}": plain(value)
        for family, values in settings.items()
        for name, value in values.items()
        if name not in NO_SETTING
    }


def _system() -> dict[str, Json]:
    """What torch calls the system: the GPU's exact name, CUDA, and a key of Triton's sources."""

    def look() -> dict[str, Any]:
        from torch._inductor.codecache import CacheBase

        return dict(CacheBase.get_system())

    def triton() -> tuple[str, str, dict[str, Any]]:
        from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

        if not HAS_TRITON:
            return "", "", {}
        import triton  # type: ignore[import-untyped]
        from triton._C.libtriton import get_cache_invalidating_env_vars  # type: ignore[import-untyped]

        return triton.__version__, triton_key(), get_cache_invalidating_env_vars()

    system = _read("CacheBase.get_system", look)
    version, key, variables = _read("triton_key", triton)
    found: dict[str, Json] = {
        "system.gpu": (system.get("device") or {}).get("name"),
        "system.cuda": (system.get("version") or {}).get("cuda"),
        "triton.key": hashlib.sha256(key.encode()).hexdigest() if key else None,
        "triton.version": version or None,
    }
    found |= {f"triton.env.{name}": str(value) for name, value in variables.items()}
    interfaces = system.get("device_interfaces")
    if interfaces:
        found["system.interfaces"] = plain(interfaces)
    return found


def _gpu(torch: Any, index: int) -> dict[str, Json]:
    try:
        major, minor = torch.cuda.get_device_capability(index)
    except (RuntimeError, AssertionError) as error:
        raise Failure(
            Exit.HOST,
            f"torch sees no GPU {index} here",
            details=str(error).splitlines()[:1],
            hint="collect factors where there is one, or inside of `env.offline.pretend`",
        ) from error

    def look() -> tuple[str, str]:
        from triton.backends.nvidia.compiler import (  # type: ignore[import-untyped]
            get_ptxas_version,
            sm_arch_from_capability,
        )

        number = major * 10 + minor
        return get_ptxas_version(number), sm_arch_from_capability(number)

    try:
        version, arch = _read("get_ptxas_version", look)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        raise Failure(
            Exit.HOST,
            "Triton finds no ptxas that runs",
            details=[str(error)],
            hint="unset TRITON_PTXAS_PATH, or go through `nox -s train`, which pins it",
        ) from error
    return {"triton.ptxas": version.strip(), "triton.arch": arch}


def _cpu(torch: Any) -> dict[str, Json]:
    """What kernels for the CPU depend on.

    Torch tries each instruction set by a compilation. What the processor and the compiler can decides the outcome, so
    these stand here instead.
    """

    def look() -> tuple[list[str], str]:
        from torch._inductor import cpu_vec_isa
        from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

        builder = CppBuilder(name="o", sources="i", BuildOption=CppTorchOptions(vec_isa=cpu_vec_isa.invalid_vec_isa))
        return list(cpu_vec_isa.x86_isa_checker()), builder.get_command_line()

    try:
        instruction_sets, command = _read("C++ builder", look)
    except RuntimeError as error:  # torch's InvalidCxxCompiler among them
        raise Failure(
            Exit.HOST,
            "torch finds no C++ compiler, which kernels for the CPU need",
            details=[str(error).splitlines()[0] if str(error) else type(error).__name__],
            hint="install one (`apt-get install g++`)",
        ) from error
    compiler = command.split()[0]
    native = _said([compiler, "-march=native", "-Q", "--help=target"])
    return {
        "cpu.capability": torch.backends.cpu.get_cpu_capability(),
        "cpu.instruction_sets": plain(instruction_sets),
        # which of all instructions `-march=native` means here, and the tuning and cache sizes that go with it
        "cpu.native": hashlib.sha256((native or _cpu_flags()).encode()).hexdigest(),
        "cpu.compiler": (_said([compiler, "--version"]) or "unknown").partition("\n")[0],
        # the whole line, with its folders: its text is in the name of every kernel's file
        "cpu.command": command,
        "cpu.threads": torch.get_num_threads(),
    }


def _said(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _cpu_flags() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        return next((line for line in file if line.startswith(("flags", "Features"))), "")
    return ""


def plain(value: object) -> Json:
    """A setting's value as JSON, the same in every process: sets sorted, functions by name, no memory addresses."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '?')}.{name}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# Which variable feeds which setting


def variables() -> dict[str, tuple[str, ...]]:
    """For each setting that environment variables feed, by its factor's name, those variables; off torch's source."""
    found: dict[str, tuple[str, ...]] = {}
    for family, module in _configurations().items():
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            for name, names in _assignments(ast.parse(inspect.getsource(module))):
                found[f"{family}.{name}"] = names
    return found


def _assignments(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            yield from _assignments(statement, f"{prefix}{statement.name}.")
            continue
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        names = tuple(
            dict.fromkeys(
                node.value
                for node in ast.walk(value)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
            )
        )
        for target in targets:
            if names and isinstance(target, ast.Name):
                yield f"{prefix}{target.id}", names


VARIABLE = re.compile(r"CXX|CI|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""How the variables are written that torch's configuration modules ask for."""


# The details of single keys


@dataclass(slots=True)
class Details:
    """What torch hashed for each key that was asked for while `details` was entered: a line a field."""

    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each key, its lines; AOTAutograd's keys begin with `a`, FX's with `f`."""

    def note(self, key: str, lines: Any) -> None:
        """Keep a key's lines, without the memory addresses that torch prints in them."""
        blank = re.compile(r" at 0x[0-9a-f]+")
        self.lines.setdefault(str(key), tuple(blank.sub("", str(line)) for line in lines or ()))


@contextlib.contextmanager
def details() -> Iterator[Details]:
    """Note what enters each key: in a bake to keep it beside the cache, in a replay to explain a miss.

    Torch makes these lines anyway, for its log. Not to be entered by two threads at once.

    Raises:
        Failure: Exit.HOST, when this torch makes its keys elsewhere.
    """
    noted = Details()

    def look() -> tuple[Any, Any]:
        from torch._functorch._aot_autograd import autograd_cache
        from torch._inductor import codecache

        return (autograd_cache, autograd_cache.autograd_cache_key), (codecache, codecache.compiled_fx_graph_hash)

    places = _read("autograd_cache_key and compiled_fx_graph_hash", look)

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            key, lines = original(*args, **kwargs)
            noted.note(key, lines)
            return key, lines

        return made

    for module, original in places:
        setattr(module, original.__name__, noting(original))
    try:
        yield noted
    finally:
        for module, original in places:
            setattr(module, original.__name__, original)
