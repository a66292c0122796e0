"""From a session to the trainer: make sure of the environment, look for drift, record what it is, become the trainer.

Becoming it (`os.execve`) rather than running it lets Ctrl-C and SIGTERM reach the trainer and its exit code reach the
shell: there is no parent left that could swallow either. Standard library only, since all of this is overhead.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

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
  --variant cu128|cu130|cu132  another torch and CUDA than the default, or than DFLASH_VARIANT names
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
    from env import drift, record
    from env.cache import pins, places

    options, program = take(argv)
    variant = variants.load().variant(options.variant)
    if options.repair:
        python = environment.repair(variant.name, options.python)
    else:
        python = environment.ensure(variant.name, python=options.python)
    environ = bootstrap.environment(os.environ)
    environ.pop(bootstrap.FRONT_DOOR, None)  # how we were called is no part of what a run ran in
    drifts = drift.restamp(python, variant.lock, environ=environ)
    if drifts:
        chosen = f"--python {options.python}" if options.python else ""
        refusal = drift.failure(drifts, variant.name, command=_command(program), options=chosen)
        if not options.allow_drift:
            raise refusal
        say(f"going on in an environment that is not the locked one ({variant.name}), as `--allow-drift` says")
        print("\n".join(f"  {line}" for line in refusal.details), file=sys.stderr, flush=True)
    environ, overridden = pins.pinned(environ, python)
    for override in overridden:
        if override.old is not None:  # what was unset is recorded, but nobody's wish was overruled
            say(override.sentence())
    # Threads of a pool that wait by spinning starve each other where cores are shared: a step took three times as long.
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    home = places.cache_home(environ)
    if home.notice:
        say(home.notice)
        environ.setdefault(
            "MPLCONFIGDIR", str(home.path / "matplotlib")
        )  # which goes to the home, and says so at length
    facts = record.environment_record(
        variant.name,
        python,
        drifts,
        lock=variant.lock,
        root=ROOT,
        allowed=options.allow_drift,
        environ=environ,
    )
    facts["overridden"] = [override.sentence() for override in overridden]
    # Named by content: launches in equal environments share one file, and nothing piles up.
    place = home.path / "environments" / f"{hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]}.json"
    place.parent.mkdir(exist_ok=True)
    record.write(place, facts)
    environ["DFLASH_ENVIRONMENT"] = str(place)
    if {"-h", "--help"}.intersection(program):
        print(HELP)
    # -P: a file of the current folder must not stand in for a locked package
    bootstrap.become([str(python), "-P", "-m", *program], environ)


def _command(program: Sequence[str]) -> str:
    """The command that the user typed, as far as a hint needs it: `nox -s train` or `python3 noxfile.py -s train`."""
    session = program[1] if len(program) > 1 else "train"
    return f"{os.environ.get(bootstrap.FRONT_DOOR, 'nox')} -s {session}"
