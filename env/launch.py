"""From a session to the trainer: make sure of the environment, look for drift, record what it is, become the trainer.

Becoming it (`os.execve`) rather than running it lets Ctrl-C and SIGTERM reach the trainer and its exit code reach the
shell: there is no parent left that could swallow either. Standard library only, since all of this is overhead.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from env import bootstrap, environment, variants
from env.building import say
from env.errors import Exit, Failure
from env.variants import ROOT


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `launch` takes out of the arguments; all others are the program's."""

    variant: str | None = None
    """`--variant cu128`: another torch and CUDA than the default."""

    python: str | None = None
    """`--python 3.12`: another Python than the one that runs this."""

    repair: bool = False
    """`--repair`: make the environment anew from its lock first."""

    allow_drift: bool = False
    """`--allow-drift`: go on in an environment that is not the locked one, and write that into the run's record."""


HELP = """\
Options of every session that runs in a locked environment; all others are the program's own:
  --variant cu128|cu130|cu132  another torch and CUDA than the default
  --python 3.12                another Python than the one that runs the noxfile
  --repair                     make the environment anew from its lock first
  --allow-drift                go on in an environment that is not the locked one, and record that
"""


def take(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Split what is ours from what is the program's; from a `--` on, everything is the program's."""
    values: dict[str, str | None] = {"--variant": None, "--python": None}
    flags = {"--repair": False, "--allow-drift": False}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif name in values:
            values[name] = value if equals else next(words, None)
            if not values[name]:
                raise Failure(Exit.USAGE, f"`{name}` needs a value", hint=f"as in `{name} {_example(name)}`")
        elif word in flags:
            flags[word] = True
        else:
            rest.append(word)
    options = Options(
        variant=values["--variant"],
        python=values["--python"],
        repair=flags["--repair"],
        allow_drift=flags["--allow-drift"],
    )
    return options, rest


def _example(name: str) -> str:
    matrix = variants.load()
    return matrix.default if name == "--variant" else matrix.python[0]


def main(argv: Sequence[str]) -> int:
    """`python -m env launch MODULE ARGUMENTS`: become `python -m MODULE ARGUMENTS` in the locked environment.

    Raises a `Failure` when the environment cannot be made (see `environment.ensure`) or is not the locked one.
    """
    from env import drift, identity, record

    options, program = take(argv)
    variant = variants.load().variant(options.variant)
    if options.repair:
        python = environment.repair(variant.name, options.python)
    else:
        python = environment.ensure(variant.name, python=options.python)
    environ = bootstrap.environment(os.environ)
    environ.pop(bootstrap.FRONT_DOOR, None)  # how we were called is no part of what a run ran in
    drifts = drift.compare(python, variant.lock, environ=environ)
    if drifts:
        refusal = drift.failure(drifts, variant.name, command=_command(program))
        if not options.allow_drift:
            raise refusal
        say(f"going on in an environment that is not the locked one ({variant.name}), as `--allow-drift` says")
        print("\n".join(f"  {line}" for line in refusal.details), file=sys.stderr, flush=True)
    env_id = identity.env_id(variant.lock, variant=variant.name, python=options.python or bootstrap.python_version())
    cache = cache_home(environ)
    environ = pinned(environ, python, cache / "inductor" / env_id[:16])
    facts = record.environment_record(
        variant.name,
        python,
        drifts,
        lock=variant.lock,
        root=ROOT,
        allowed=options.allow_drift,
        environ=environ,
    )
    # Named by content: launches in equal environments share one file, and nothing piles up.
    place = cache / "environments" / f"{hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]}.json"
    place.parent.mkdir(exist_ok=True)
    record.write(place, facts)
    environ["DFLASH_ENVIRONMENT"] = str(place)
    if {"-h", "--help"}.intersection(program):
        print(HELP)
    bootstrap.become([str(python), "-m", *program], environ)


def _command(program: Sequence[str]) -> str:
    """The command that the user typed, as far as a hint needs it: `nox -s train` or `python3 noxfile.py -s train`."""
    session = program[1] if len(program) > 1 else "train"
    return f"{os.environ.get(bootstrap.FRONT_DOOR, 'nox')} -s {session}"


def pinned(environ: Mapping[str, str], python: Path, inductor: Path) -> dict[str, str]:
    """The program's environment: what enters torch's and Triton's cache keys, or chooses the cache, is settled here.

    What the user has set stays; the record names it, so a miss can be explained.
    """
    result = {"TORCHINDUCTOR_CACHE_DIR": str(inductor), **environ}
    # torch sets this path late, only in some processes, and Triton's keys hold the version of the ptxas that they find:
    # a cold process keys with Triton's own, a warm one with torch's, and so the first warm start misses.
    for ptxas in sorted(python.parent.parent.glob("lib/python*/site-packages/torch/bin/ptxas")):
        result.setdefault("TRITON_PTXAS_PATH", str(ptxas))
    return result


def cache_home(environ: Mapping[str, str]) -> Path:
    """Where caches go: the user's cache folder; for a user without a home, a private folder among the temporary ones.

    Caches are code. A folder where everybody can write must be ours alone, or another user could plant kernels.
    """
    base = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    if os.path.isabs(base):  # noqa: PTH117  # a text that may be empty, which Path would make `.`
        home = Path(base) / "dflash"
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass
        else:
            if os.access(home, os.W_OK):
                return home
    home = Path(tempfile.gettempdir()) / f"dflash-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    status = home.lstat()
    if not home.is_dir() or home.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Failure(
            Exit.STORAGE, f"{home} belongs to someone else, so it cannot hold caches", hint="set XDG_CACHE_HOME"
        )
    return home
