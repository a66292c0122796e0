"""What an image's container does before its command: look at the host, check the sealed caches, become the command.

`nox -s train` and `nox -s verify` are refused, in one sentence, on a host that cannot run them as the image is: a
driver below the floor, a card without code or without baked kernels, no folder to write. Anything else (a shell, the
doctor) just runs, so that one can look. The caches' copying to a writable folder, and the count of hits in the first
step, happen in the training process, as on any host. Standard library only.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from env import environment, variants
from env.building import say
from env.cache import examine, manifest, places, sign
from env.doctor import CHECKS, Host, Plan, Severity
from env.doctor import examine as judged
from env.doctor.checks import capability, driver
from env.doctor.facts.nvidia import usable
from env.doctor.host import gather
from env.errors import Exit, Failure, report

GUARDED = ("train", "verify")
"""Sessions that the host must be fit for."""

LAUNCHED = (*GUARDED, "data", "bench")
"""Sessions that run in the image's environment."""

COLD = "DFLASH_ALLOW_COLD"
"""Set to 1, it lets a card without baked kernels compile for itself."""

PASSED_OVER = ("environment", "containers", "clock", "local", "disk")
"""Checks of the doctor that do not speak here: the gate compares the environment at every launch, and the others are
about the machine around the container or about sizes that the command knows better."""

FLAGS = {"avx2": "avx2", "avx512": "avx512f", "amx": "amx_tile"}
"""Instruction sets as torch calls them, and the processor's flag that each of them needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """One cache of the image."""

    gpu: str
    """The card's exact name; `cpu` for none."""

    instruction_sets: tuple[str, ...] = ()
    """For the CPU: what the kernels' builder could."""


def main(argv: Sequence[str]) -> int:
    """Prepare, judge, and become the command.

    Returns only with an exit code of a refusal, which has been printed.
    """
    command = list(argv) or ["nox", "-s", "train"]
    try:
        os.environ.update(prepared(os.environ))
        if guarded(command, LAUNCHED):
            ours = variants.load().variant(environ=os.environ).name
            refuse_other_variant(command, ours)
            environment.refuse_unmakable(ours)  # somebody has set the variable to another than the image's
        if guarded(command):
            look(os.environ)
    except Failure as failure:
        return report(failure)
    try:
        os.execvpe(command[0], command, os.environ)
    except FileNotFoundError:
        return report(Failure(Exit.USAGE, f"there is no program `{command[0]}` in this image"))
    except PermissionError:
        return report(Failure(Exit.USAGE, f"`{command[0]}` is no program"))


def guarded(command: Sequence[str], sessions: Sequence[str] = GUARDED) -> bool:
    """Whether a command is one of those sessions: one that trains or verifies."""
    words = list(command)
    name = Path(words[0]).name
    return name == "nox" and any(session in sessions for session in words) and not {"-h", "--help"} & set(words)


def prepared(environ: Mapping[str, str]) -> dict[str, str]:
    """The folders that programs expect, where they can be written: HOME and temporary files.

    A container has a read-only root, and its user id may have no passwd entry: both then go beside the caches.
    """
    home = places.cache_home(environ)
    if home.notice:
        say(home.notice)
    found = {"HOME": str(_made(home.path / "home"))}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # torch asks for the user's name, and dies of there being none
        found["USER"] = found["LOGNAME"] = environ.get("USER") or f"uid{os.getuid()}"
    wanted = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108  # looked at, not written
    if not os.access(wanted, os.W_OK):
        found["TMPDIR"] = str(_made(home.path / "tmp"))
    return found


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(Exit.STORAGE, f"cannot write in {folder.parent}: {error.strerror}") from error
    return folder


def look(environ: Mapping[str, str]) -> None:
    """Say what this host lacks; refuse what cannot work.

    Raises:
        Failure: Exit.HOST, with need, have and what to do; Exit.CACHE, when a sealed cache was altered.
    """
    matrix = variants.load()
    variant = matrix.variant(environ=environ)
    host = gather(variant, hashes=False)
    plan = Plan(variant=variant, matrix=matrix)
    refuse_unfit(host, plan)
    several = host.nvidia is not None and len(usable(host.nvidia) or ()) > 1
    # one process needs no shared memory
    checks = [check for check in CHECKS if check.name not in PASSED_OVER and (several or check.name != "shm")]
    for name, finding in judged(host, plan, checks):
        if finding.severity >= Severity.WARNING:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            say(f"{finding.severity.word}: {name}: {finding.message}{remedy}")
    caches = intact(environ)
    refuse_unbaked(host, caches, allowed=environ.get(COLD) == "1")
    for sentence in notices(host, caches, cpu_flags()):
        say(sentence)


def refuse_other_variant(command: Sequence[str], ours: str) -> None:
    """Refuse a variant that the image does not hold: a read-only root cannot be given another environment.

    Raises:
        Failure: Exit.USAGE.
    """
    words = [word for argument in command for word in argument.split("=", 1)]
    asked = words[words.index("--variant") + 1] if "--variant" in words[:-1] else ours
    if asked != ours:
        raise Failure(
            Exit.USAGE,
            f"this image holds {ours}, not {asked}",
            hint=f"each variant has an image of its own: `nox -s image -- --variant {asked}` builds that one",
        )


def refuse_unfit(host: Host, plan: Plan) -> None:
    """Refuse a driver below the floor and a card that the wheels have no code for.

    Raises:
        Failure: Exit.HOST, in one sentence.
    """
    for judge in (driver.judge, capability.judge):
        finding = judge(host, plan)
        if finding is not None and finding.severity is Severity.ERROR:
            hint = finding.remedy
            if hint and "--variant" in hint:
                hint = f"{hint}: that is another image"
            raise Failure(Exit.HOST, finding.message, details=finding.details, hint=hint)


def refuse_unbaked(host: Host, caches: Sequence[Sealed], *, allowed: bool) -> None:
    """Refuse a card for which nothing was baked, because the first step would compile in silence.

    Raises:
        Failure: Exit.HOST, in one sentence.
    """
    cards = usable(host.nvidia) if host.nvidia is not None else None
    baked = sorted({cache.gpu for cache in caches if cache.gpu != "cpu"})
    for card in cards or ():
        if card.name in baked:
            continue
        sentence = f"this image has no kernels for {card.name}; it has them for {' and '.join(baked) or 'no card'}"
        if not allowed:
            raise Failure(
                Exit.HOST,
                sentence,
                hint=f"`nox -s image -- --gpu CARD` bakes them; `-e {COLD}=1` compiles them in the first step",
            )
        say(f"{sentence}: they are compiled in the first step")


def intact(environ: Mapping[str, str]) -> list[Sealed]:
    """The image's sealed caches, every file checked against its manifest.

    Raises:
        Failure: Exit.CACHE, naming what was altered.
    """
    home = places.cache_home(environ).path
    believed = sign.trust(places.trust_folders(environ, home))
    found = []
    for folder in places.sealed_folders(environ, home):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir() and not path.name.startswith(".") and (path / manifest.NAME).exists():
                record, _ = examine.examine(path, believed)
                sets = record.factors.get("cpu.instruction_sets") or ()
                found.append(
                    Sealed(
                        gpu=str(record.gpu.get("name", "cpu")),
                        instruction_sets=tuple(map(str, sets if isinstance(sets, list | tuple) else ())),
                    )
                )
    return found


def notices(host: Host, caches: Sequence[Sealed], flags: frozenset[str]) -> list[str]:
    """What is no reason to stop, but must not be silent."""
    said = []
    cards = usable(host.nvidia) if host.nvidia is not None else None
    if not cards:
        said.append("no card is visible here: this runs on the CPU")
        wanted = {name for cache in caches if cache.gpu == "cpu" for name in cache.instruction_sets}
        lacking = sorted(name for name in wanted if flags and FLAGS.get(name, "") not in {"", *flags})
        if lacking:
            said.append(
                f"the CPU kernels were built where the processor has {', '.join(lacking)}, and this one has not: "
                "they are compiled in the first step"
            )
    return said


def cpu_flags() -> frozenset[str]:
    """What this processor says it can; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    told = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(told, "").split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
