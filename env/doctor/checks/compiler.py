"""The compilers for the CPU's kernels and for Triton's launchers."""

from __future__ import annotations

from env.doctor.facts.compilers import Compiler
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

PACKAGES = "`apt-get install g++ libc6-dev` (Debian, Ubuntu) or `dnf install gcc-c++` (Fedora, RHEL)"
HEADERS = "`apt-get install python3-dev` (Debian, Ubuntu) or `dnf install python3-devel` (Fedora, RHEL)"


def judge(host: Host, _plan: Plan) -> Finding | None:
    """`torch.compile` needs a C++ compiler with OpenMP for the CPU's kernels and, on a GPU, a C compiler with Python.h.

    On the CPU that is every run; on a GPU Triton compiles a launcher with the C compiler where no cache brings it
    (measured: a cache that hits needs none for the kernels it holds). Images without gcc are the usual way to fail
    here.
    """
    found = host.compilers
    if found is None:
        return Finding(Severity.UNKNOWN, "the compilers could not be tried", host.why("compilers"))
    for compiler, language, use in ((found.cxx, "C++", "compiled CPU kernels"), (found.cc, "C", "Triton's launchers")):
        problem = _problem(compiler, language, use, found.include)
        if problem is not None:
            return problem
    return Finding(
        Severity.OK,
        f"`{found.cxx.command}` and `{found.cc.command}` compile and link, with Python.h and OpenMP",
        tuple(filter(None, (found.cxx.version, f"Python.h in {found.include}" if found.include else None))),
    )


def _problem(compiler: Compiler, language: str, use: str, include: str | None) -> Finding | None:
    name = f"`{compiler.command}`" + (f" (from {compiler.named_by})" if compiler.named_by else "")
    said = (compiler.said,) if compiler.said else ()
    if compiler.path is None:
        unset = f"unset {compiler.named_by}, or " if compiler.named_by else ""
        return Finding(
            Severity.ERROR,
            f"no {language} compiler: {name} is not on PATH, {use} need it",
            remedy=f"{unset}{PACKAGES}",
        )
    if compiler.plain is False:
        return Finding(
            Severity.ERROR, f"{name} cannot compile and link a {language} library of three lines", said, remedy=PACKAGES
        )
    if compiler.header is False:
        return Finding(
            Severity.ERROR,
            f"Python.h is missing, or {name} cannot use it: {use} include it",
            (*said, f"looked for in {include}"),
            remedy=HEADERS,
        )
    if compiler.parallel is False:
        return Finding(
            Severity.ERROR,
            f"{name} has no OpenMP, which inductor's CPU kernels are built with",
            said,
            remedy="`apt-get install libgomp1 g++`, or for clang `apt-get install libomp-dev`",
        )
    return None
