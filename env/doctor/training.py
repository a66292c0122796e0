"""Questions that only a Python with torch can answer, put to the training environment's: this process has none."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from env import bootstrap, environment, variants
from env.cache import pins
from env.errors import Exit, Failure

COMPILE_EXAMPLES = """\
examples:
  doctor --compile                    what compiling in several threads does on the default variant's torch
  doctor --compile --variant cu132    on another's
  doctor --compile --no-cure          only look at torch as it is
  doctor --compile --json             for a program

exit codes: 0 threads may compile at once, 5 the cure is refused or does not hold, or there is no torch to ask"""

ROW_EXAMPLES = """\
examples:
  doctor --gpu-row                    the first card, as a row for env/gpus.toml, compared with the row that is there
  doctor --gpu-row 5                  another card of this machine
  doctor --gpu-row --json             for a program

exit codes: 0 printed, 5 there is no such card, or no torch to ask"""


def compiling(argv: list[str]) -> int:
    """`doctor --compile`: what `dflash.diagnose` sees in the training environment; its exit code.

    Raises:
        Failure: Exit.HOST, when there is no such environment.
    """
    parser = _parser("--compile", "Say what compiling in several threads does on this torch.", COMPILE_EXAMPLES)
    parser.add_argument("--no-cure", action="store_true", help="only look at torch as it is")
    asked = parser.parse_args(argv)
    return _ask(asked, "dflash.diagnose", ["--no-cure"] if asked.no_cure else [])


def gpu_row(argv: list[str]) -> int:
    """`doctor --gpu-row [INDEX]`: a real card's row as `env.gpus` reads it in the training environment; its exit code.

    Raises:
        Failure: Exit.HOST, when there is no such environment.
    """
    parser = _parser("--gpu-row", "Print the row of the card at hand for env/gpus.toml.", ROW_EXAMPLES)
    parser.add_argument("index", nargs="?", default="0", help="which card, counted from 0 (default 0)")
    asked = parser.parse_args(argv)
    return _ask(asked, "env.gpus", [asked.index])


def _parser(question: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"doctor {question}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--variant", help=f"whose torch to ask ({variants.UNLESS_GIVEN})")
    parser.add_argument(
        "--python", metavar="3.12", help="that environment's Python, if it is not the one that runs this"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ask(asked: argparse.Namespace, module: str, arguments: list[str]) -> int:
    python = interpreter(asked.variant, asked.python)
    # as a launch would start it: what a run will see is the question
    environ, overridden = pins.pinned(bootstrap.environment(os.environ), python)
    for override in overridden:
        if override.old is not None:
            print(override.sentence(), file=sys.stderr)
    command = [str(python), "-P", "-m", module, *arguments, *(["--json"] if asked.json else [])]
    return subprocess.run(command, env=environ, check=False).returncode


def interpreter(variant: str | None, version: str | None = None) -> Path:
    """The Python of a variant's environment; the running one where none is named, that is not made, and it has torch.

    Raises:
        Failure: Exit.HOST, when there is none; Exit.USAGE, for an unknown variant.
    """
    chosen = variants.load().variant(variant)
    python = environment.python_of(chosen.name, python=version)
    if python.exists():
        return python
    named = variant or os.environ.get(variants.NAMED)
    if not named and version is None and importlib.util.find_spec("torch") is not None:
        return Path(sys.executable)
    environment.refuse_unmakable(chosen.name, python=version)
    words = f" --variant {variant}" if variant else ""
    words += f" --python {version}" if version else ""
    raise Failure(
        Exit.HOST,
        f"there is no environment of {chosen.name} here yet, and so no torch to ask",
        details=[f"it would be {python.parent.parent}"],
        hint=f"`nox -s train --{words} --help` makes it" if words else "`nox -s train -- --help` makes it",
    )
