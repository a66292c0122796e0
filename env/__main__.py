"""`python -m env COMMAND`: what the noxfile's sessions run. A command's module is imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from env.errors import Exit, Failure, full_output, nobody_reads, report, speak_anywhere

COMMANDS = {
    "launch": "env.launch:main",
    "tests": "env.checks:tests",
    "lint": "env.checks:lint",
    "typecheck": "env.checks:typecheck",
    "lock": "env.lock:main",
    "drift": "env.drift:main",
    "bake": "env.bake:main",
    "base": "env.base:main",
    "image": "env.image:main",
    "cache": "env.cache:main",
    "id": "env.identity:main",
    "doctor": "env.doctor:main",
    "audit": "env.audit:main",
    "bom": "env.bom:main",
    "push": "env.push:main",
    "pull": "env.pull:main",
    "rootfs": "env.rootfs:main",
    "scale": "env.scale:main",
}
"""Each command's `module:function`, which takes the remaining arguments and returns an exit code."""


def main(argv: Sequence[str]) -> int:
    """Run one command; every `Failure` becomes a sentence and its exit code."""
    if argv and argv[0] in {"-h", "--help"}:
        print(f"{__doc__.splitlines()[0]}\n\ncommands: {', '.join(COMMANDS)}\n`COMMAND --help` tells more of each.")
        return int(Exit.DONE)
    if not argv or argv[0] not in COMMANDS:
        asked = f"`{argv[0]}` is no command" if argv else "no command is given"
        return report(Failure(Exit.USAGE, asked, details=[f"commands: {', '.join(COMMANDS)}"]))
    module, _, function = COMMANDS[argv[0]].partition(":")
    try:
        code = int(getattr(importlib.import_module(module), function)(list(argv[1:])))
        if (refused := full_output()) is not None:
            return report(refused)
    except Failure as failure:
        return report(failure)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except OSError as error:
        # one without a file's name may be that of what was printed
        if isinstance(error, BrokenPipeError) and nobody_reads():
            return int(Exit.DONE)
        if error.filename is None and (refused := full_output(b"\n")) is not None:
            return report(refused)
        raise
    return code


if __name__ == "__main__":
    speak_anywhere()
    sys.exit(main(sys.argv[1:]))
