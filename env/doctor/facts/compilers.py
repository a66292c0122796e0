"""The compilers that inductor and Triton would choose, tried on what they will be given."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from env.doctor.facts.probing import run

SECONDS = 60.0
"""A compiler on a cold network file system takes its time; a healthy one needs half a second."""

PLAIN = '#include <cmath>\n#include <vector>\nextern "C" double f(double x) { return std::sqrt(x); }\n'
HEADER = "#include <Python.h>\n"
PARALLEL = '#include <omp.h>\nextern "C" int g() { return omp_get_max_threads(); }\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """One compiler, and what became of what it was given."""

    command: str
    """What would be run, as `CXX` or `CC` has it or by its usual name."""

    named_by: str | None = None
    """The environment variable that names it; None where the usual name is looked for."""

    path: str | None = None
    """Where PATH has it; None if nowhere."""

    version: str | None = None
    """First line of `--version`."""

    plain: bool | None = None
    """Whether a shared library of a few lines could be compiled and linked; None if not tried."""

    header: bool | None = None
    """The same with `#include <Python.h>`; None if not tried."""

    parallel: bool | None = None
    """The same with OpenMP, which inductor's CPU kernels are built with; None if not tried."""

    said: str | None = None
    """The compiler's own words at the first failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilers:
    """Inductor compiles the CPU's kernels as C++, Triton its launchers as C."""

    cxx: Compiler
    """For inductor: `CXX`, else g++."""

    cc: Compiler
    """For Triton: `CC`, else gcc, else clang."""

    include: str | None = None
    """Where the interpreter says that Python.h is."""


def look(include: Path | None, environ: Mapping[str, str] = os.environ) -> Compilers:
    """Choose as torch/_inductor/config.py (cpp.cxx) and triton/runtime/build.py do, and compile with each choice."""
    path = environ.get("PATH")
    cxx, cc = environ.get("CXX"), environ.get("CC")
    c_default = "gcc" if shutil.which("gcc", path=path) or not shutil.which("clang", path=path) else "clang"
    return Compilers(
        cxx=_try("g++" if cxx is None else cxx, "CXX" if cxx is not None else None, "c++", include, environ),
        cc=_try(c_default if cc is None else cc, "CC" if cc is not None else None, "c", include, environ),
        include=str(include) if include else None,
    )


def _try(
    command: str, variable: str | None, language: str, include: Path | None, environ: Mapping[str, str]
) -> Compiler:
    # Not split at blanks: both callers run the whole text as one program's name, so `CXX="ccache g++"` fails there too.
    path = shutil.which(command, path=environ.get("PATH"))
    if path is None:
        return Compiler(command=command, named_by=variable)
    answer = run([path, "--version"], seconds=SECONDS, environ=environ)
    version = answer.output.splitlines()[0].strip() if answer and answer.output.strip() else None
    plain = PLAIN if language == "c++" else "int f(int x) { return x; }\n"
    parts = {"plain": plain, "header": HEADER if include else None, "parallel": PARALLEL if language == "c++" else None}
    asked = {name: source for name, source in parts.items() if source is not None}
    whole, said = _compile(path, language, "".join(reversed(asked.values())), "parallel" in asked, include, environ)
    results: dict[str, bool | None] = dict.fromkeys(asked, True)
    if not whole:  # only then is each part tried by itself, to name the one that is missing
        for name, source in asked.items():
            results[name], words = _compile(path, language, source, name == "parallel", include, environ)
            if not results["plain"]:
                results = {"plain": False}
                said = words
                break
    return Compiler(
        command=command,
        named_by=variable,
        path=path,
        version=version,
        plain=results["plain"],
        header=results.get("header"),
        parallel=results.get("parallel"),
        said=said,
    )


def _compile(
    path: str, language: str, source: str, parallel: bool, include: Path | None, environ: Mapping[str, str]
) -> tuple[bool, str | None]:
    """Compile and link one library in a folder of its own; what the compiler said if it failed."""
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "probe.cpp" if language == "c++" else "probe.c")
        file.write_text(source, encoding="utf-8")
        library = file.with_suffix(".so")
        command = [path, str(file), "-shared", "-fPIC", "-o", str(library)]
        if parallel:
            command.append("-fopenmp")
        if include is not None:
            command.append(f"-I{include}")
        answer = run(command, seconds=SECONDS, environ=environ)
        if answer is None:
            return False, f"`{shlex.join(command)}` did not end within {SECONDS:g} s"
        if answer.code == 0 and library.is_file():
            return True, None
        lines = [line.replace(f"{folder}/", "") for line in answer.output.splitlines() if line.strip()]
        telling = next((line for line in lines if "error" in line.lower() or "cannot find" in line), None)
        return False, telling or (lines[0] if lines else f"exit code {answer.code}, no output")
