"""The doctor's command line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from env.doctor import CHECKS, examine
from env.doctor.finding import exit_code
from env.doctor.host import Host, decode, gather
from env.doctor.need import PRESETS, read
from env.doctor.plan import Plan
from env.doctor.report import as_json, as_text, put, terminal
from env.errors import Exit, Failure, report
from env.variants import ROOT, UNLESS_GIVEN, load

ELSEWHERE = {
    "--compare": "env.record:main",
    "--compile": "env.doctor.training:compiling",
    "--gpu-row": "env.doctor.training:gpu_row",
}
"""Questions that another module answers, and the function that is given the other arguments. Those that need torch are
put to the training environment's Python, since this process has none."""

DEFAULT = "tiny"
"""The configuration of a run without `--config`."""

EXAMPLES = """\
examples:
  doctor                              this host, the default variant, the configuration `tiny`
  doctor --config qwen3-8b --full     with all evidence
  doctor --variant cu132 --json       for a program; holds the facts too
  doctor --json | doctor --host -     judge what another host's facts say
  doctor --compare RUN_A RUN_B        what differs between two runs' environments
  doctor --compile                    what compiling in several threads does here (--compile --help)
  doctor --gpu-row                    the card at hand as a row of env/gpus.toml (--gpu-row --help)

exit codes: 0 nothing worse than a warning, 2 wrong command line or configuration,
            3 the environment is not the locked one, 5 this host lacks something"""


def main(argv: list[str]) -> int:
    """Examine a host and print the report; the exit code by the worst finding. Failures are reported, never raised."""
    try:
        words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--gpu-row=") else [word])]
        for question in ELSEWHERE:  # wherever it stands: `doctor --variant cu132 --compile`
            if question in words:
                return _elsewhere(question)([word for word in words if word != question])
        return _doctor(_parser().parse_args(argv))
    except Failure as failure:
        return report(failure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="doctor",
        description="Say whether this host can train: what is missing, what will go wrong later, and what mends it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--variant", help=f"the set of packages: {', '.join(load().variants)} ({UNLESS_GIVEN})")
    parser.add_argument("--config", help=f"a preset, or a TOML file (default {DEFAULT})")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="where the run's folder will be (default `runs`)")
    parser.add_argument(
        "--containers", action="store_true", help="containers with GPUs shall be started here: judge that too"
    )
    names = [check.name for check in CHECKS]
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="CHECK",
        help=f"make one check only; may be repeated: {', '.join(names)}",
    )
    parser.add_argument("--full", action="store_true", help="show the evidence of what is fine, too")
    parser.add_argument("--json", action="store_true", help="print JSON: findings, and the facts they were judged by")
    parser.add_argument(
        "--host", metavar="FILE", help="judge facts recorded by --json instead of this host; - for stdin"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("RUN_A", "RUN_B"), help="what differs between two runs' environments"
    )
    parser.add_argument(
        "--compile", action="store_true", help="ask a variant's torch what compiling in several threads does, and why"
    )
    parser.add_argument("--gpu-row", nargs="?", metavar="INDEX", help="print a real card's row for env/gpus.toml")
    return parser


def _doctor(asked: argparse.Namespace) -> int:
    matrix = load()
    variant = matrix.variant(asked.variant)
    # An image's stage may hold env alone; without presets the host is judged for no configuration.
    need = read(asked.config or DEFAULT) if asked.config or (PRESETS / f"{DEFAULT}.toml").is_file() else None
    plan = Plan(variant=variant, matrix=matrix, need=need, containers=asked.containers)
    checks = [check for check in CHECKS if not asked.only or check.name in asked.only]
    if asked.host is not None:
        host = _recorded(asked.host)
    else:
        importlib.import_module("env.environment").refuse_unmakable(variant.name)
        if sys.stderr.isatty():
            put("looking at this host; comparing a whole environment with its lock takes some seconds", sys.stderr)
        hashes = any(check.name == "environment" for check in checks)
        host = gather(variant, here=_here(), runs=asked.run, hashes=hashes)
    findings = examine(host, plan, checks)
    if asked.json:
        put(as_json(plan, findings, host))
    else:
        width, colour = terminal(sys.stdout)
        put(as_text(plan, findings, width=width, colour=colour, full=asked.full))
    return int(exit_code(finding for _, finding in findings))


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError:  # the folder was removed under the shell
        return ROOT


def _recorded(name: str) -> Host:
    """Facts from a file: the whole report of --json, or its `host` alone."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        facts = json.loads(text)
        return decode(facts["host"] if isinstance(facts, dict) and "host" in facts else facts)
    except OSError as error:
        raise Failure(Exit.USAGE, f"the facts in `{name}` cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Failure(Exit.USAGE, f"`{name}` holds no host's facts: {error}") from None


def _elsewhere(question: str) -> Callable[[list[str]], int]:
    module, _, function = ELSEWHERE[question].partition(":")
    answer: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return answer
