"""`python -m env cache COMMAND`: the caches of this machine, by hand. The launch does the same by itself."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from env.cache import examine, explain, fitting, leftovers, pins, places, sign, store, verify
from env.cache import manifest as manifests
from env.cache.canonical import Json, strict
from env.errors import Exit, Failure, report


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code. Failures are reported here, because some commands go on after one."""
    options = _parser().parse_args(list(argv))
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except Failure as failure:
        return report(failure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cache", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    def identity(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--factors", metavar="FILE", help="what to compare with, as `factors` prints it; - for standard input"
        )
        made.add_argument("--config", help="a preset's name or a TOML file, to find that out here")
        made.add_argument("--device", default="", help="cpu, cuda:0, cuda:5; by default the first GPU, or the CPU")
        made.add_argument("--variant", help="the environment to ask; the default one if left out")

    def unsigned(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--allow-unsigned", action="store_true", help="also use a cache that nobody trusted has signed"
        )

    made = command("list", _list, "Show the caches of this machine: size, age, what for, and why they do not fit.")
    identity(made)
    made.add_argument("--json", action="store_true", help="print JSON")

    made = command("seal", _seal, "Seal a directory of caches that a real step has filled.")
    made.add_argument("source", type=Path, help="what TORCHINDUCTOR_CACHE_DIR was")
    made.add_argument(
        "--replay", required=True, metavar="FILE", help="what a replay from it printed: the hits to promise"
    )
    made.add_argument("--key", type=Path, help="sign with this key (ssh-keygen -Y)")
    made.add_argument("--parent", help="the digest of the cache that it was made from")
    made.add_argument("--to", type=Path, help="the folder below which sealed caches go")
    identity(made)

    made = command("seed", _seed, "Copy a sealed cache to this node and print where it is.")
    made.add_argument("folder", type=Path)
    unsigned(made)

    made = command("verify", _verify, "Check a sealed cache's files, or what a replay counted with it.")
    made.add_argument("folder", type=Path)
    made.add_argument("--replay", metavar="FILE", help="what `python -m dflash.replay` printed; - for standard input")
    identity(made)
    unsigned(made)

    made = command("explain", _explain, "Say why a cache does not fit: what differs, both values, what to do.")
    made.add_argument("folder", type=Path, nargs="?", help="the nearest one if left out")
    identity(made)

    made = command(
        "prune", _prune, "Free caches, and what killed processes left. Shows what it would free unless --yes is given."
    )
    made.add_argument("--keep", type=_whole, default=0, metavar="N", help="of each kind, keep the N last used")
    made.add_argument("--older-than", metavar="DAYS", type=_days, help="only those unused for so many days")
    made.add_argument("--yes", action="store_true", help="do it")

    made = command("trust", _trust, "Take over a sealed cache: note that its manifest is believed from now on.")
    made.add_argument("folder", type=Path)

    made = command("factors", _factors, "Print every factor of the training environment's cache keys as JSON.")
    identity(made)
    return parser


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of caches")
    return int(text)


def _days(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return found


# What this machine needs a cache for


def _present(options: argparse.Namespace, *, needed: bool) -> store.Identity | None:
    """The identity to compare with: from a file, or from the training environment.

    Raises:
        Failure: Exit.USAGE when it is needed and neither is told.
    """
    if options.factors:
        return store.read_identity(_input(options.factors))
    if options.config:
        if _has_torch():
            return present(options.config, options.device)
        return store.read_identity(_asked(options))
    if needed:
        raise Failure(
            Exit.USAGE,
            "what should it be compared with?",
            hint="`--config NAME` asks the training environment here, `--factors FILE` reads what `factors` printed",
        )
    return None


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _found(device: str) -> str:
    """The device that was named, or else the one that a training takes; torch must be there."""
    import torch

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that a CPU run has no CUDA
    if device:
        return device
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def present(config: str, device: str = "") -> store.Identity:
    """What this process would need a cache for, to train a configuration on a device; torch must be there.

    Raises:
        Failure: see `dflash.config.load` and `store.here`.
    """
    from dflash import config as configurations
    from dflash import graphs

    settings = configurations.load(config)
    device = _found(device)
    fitting.fit([device])
    return store.here(graphs.graph_id(settings, device.partition(":")[0]), device)


def _asked(options: argparse.Namespace) -> bytes:
    """What `factors` prints in the training environment's Python, with what a launch would pin."""
    from env import bootstrap, environment, variants

    variant = variants.load().variant(options.variant)
    python = environment.python_of(variant.name)
    if not python.exists():
        environment.refuse_unmakable(variant.name)
        raise Failure(
            Exit.USAGE,
            "there is no training environment yet to ask",
            hint="`nox -s train` makes it, or give `--factors FILE`",
        )
    environ, _ = pins.pinned(bootstrap.environment(os.environ), python)
    command = [str(python), "-m", "env", "cache", "factors", "--device", options.device]
    command += ["--config", options.config] if options.config else []
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode if done.returncode > 0 else int(Exit.BUG))  # it has said why
    return done.stdout


def _input(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise Failure(Exit.INPUT, f"cannot read {name}: {error.strerror}") from error


def _replay(name: str) -> Mapping[str, Any]:
    try:
        table = strict(_input(name))
    except ValueError as error:
        raise Failure(Exit.INPUT, f"{name} is no replay's record: {error}") from error
    if not isinstance(table, dict):
        raise Failure(Exit.INPUT, f"{name} is no replay's record")
    return table


def _policy(options: argparse.Namespace) -> str | None:
    return "unsigned" if options.allow_unsigned else None


def _believed(options: argparse.Namespace) -> sign.Trust:
    return sign.trust(places.trust_folders(), policy=_policy(options))


# Commands


def _factors(options: argparse.Namespace) -> int:
    if not _has_torch():
        sys.stdout.buffer.write(_asked(options))
    elif options.config:
        sys.stdout.buffer.write(store.identity_bytes(present(options.config, options.device)))
    else:
        from env.cache.factors import collect

        print(json.dumps(collect(_found(options.device)), indent=1, sort_keys=True, ensure_ascii=False))
    return int(Exit.DONE)


def _list(options: argparse.Namespace) -> int:
    home = places.cache_home().path
    caches = store.stored(home)
    wanted = _present(options, needed=False)
    rows = [_row(cache, wanted, _identity_words(options)) for cache in caches]
    if options.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return int(Exit.DONE)
    if not rows:
        print(f"no caches in {home}")
    for row in rows:
        size, ago = megabytes(int(row["size"])), age(float(row["used"]))
        print(f"{row['kind']:<7} {row['cache_id'][:16]}  {size:>9}  {ago:>8}  {row['gpu']}  {row['path']}")
        for reason in row["reasons"]:
            print(f"        {reason}")
    if rows and wanted is None:
        print("`--config NAME` also says which fit this machine, and why the others do not")
    return int(Exit.DONE)


def _identity_words(options: argparse.Namespace) -> str:
    """The options by which this command was told what to compare with, for another command."""
    told = {f"--{name}": getattr(options, name) for name in ("factors", "config", "device", "variant")}
    return shlex.join(word for pair in told.items() if pair[1] for word in pair)


def _row(cache: store.Stored, wanted: store.Identity | None, told: str) -> dict[str, Any]:
    """A cache as `list` shows it; the reasons why it does not fit, at most three and then their number."""
    identity = cache.identity or {}
    reasons = [f"cannot be used: {cache.problem}"] if cache.problem else []
    fits = None
    if wanted is not None and cache.identity is not None:
        fits = cache.cache_id == wanted.cache_id
        found = [] if fits else explain.differences(identity, wanted.flat(), variables=store.variables())
        reasons += [difference.sentence() for difference in found[:3]]
        command = f"nox -s cache -- explain {shlex.quote(str(cache.path))} {told}"
        reasons += [f"and {len(found) - 3} more: `{command}`"] if len(found) > 3 else []
        reasons += ["fits"] if fits else []
    return {
        "kind": cache.kind,
        "cache_id": cache.cache_id,
        "digest": cache.digest,
        "path": str(cache.path),
        "size": cache.size,
        "used": cache.used,
        "gpu": str(identity.get("gpu.name", "?")),
        "fits": fits,
        "reasons": reasons,
    }


def _seal(options: argparse.Namespace) -> int:
    from env.cache.seal import seal

    home = places.cache_home().path
    identity = _present(options, needed=True)
    assert identity is not None
    replay = _replay(options.replay)
    counts = {name: replay.get("counts", {}).get(name, 0) for name in manifests.COUNTS}
    place, manifest = seal(
        options.source,
        options.to or home / "sealed",
        graph_id=identity.graph_id,
        gpu_id=identity.gpu_id,
        gpu=identity.gpu,
        factors=identity.factors,
        counts=counts,
        details=replay.get("details"),
        parent=options.parent,
        key=options.key,
        trust=home / "trust",
    )
    print(f"{place}  {len(manifest.files)} files, {megabytes(manifest.size)}, digest {manifest.digest}")
    return int(Exit.DONE)


def _seed(options: argparse.Namespace) -> int:
    from env.cache.seed import seed

    home = places.cache_home()
    if home.notice:
        print(home.notice, file=sys.stderr)
    place, _, who = seed(options.folder, home.path, _believed(options))
    print(who, file=sys.stderr)
    print(place)
    return int(Exit.DONE)


def _verify(options: argparse.Namespace) -> int:
    manifest, who = examine.examine(options.folder, _believed(options))
    print(f"{options.folder}: {len(manifest.files)} files as the manifest says, {who}")
    if not options.replay:
        return int(Exit.DONE)
    here = _present(options, needed=False)
    verdict = verify.judge(
        manifest,
        _replay(options.replay),
        here=here.flat() if here is not None else None,
        sealed_details=examine.read_details(options.folder, manifest),
        variables=store.variables(),
    )
    if verdict.problems:
        raise verdict.failure(str(options.folder))
    print(verdict.sentence())
    return int(Exit.DONE)


def _explain(options: argparse.Namespace) -> int:
    wanted = _present(options, needed=True)
    assert wanted is not None
    here: Mapping[str, Json] = wanted.flat()
    if options.folder is not None:
        sealed, name = manifests.read(options.folder)[0].identity(), str(options.folder)
        found = explain.differences(sealed, here, variables=store.variables())
    else:
        caches = [cache for cache in store.stored(places.cache_home().path) if cache.kind == "sealed"]
        near = store.nearest(wanted, caches)
        if near is None:
            hint = "`nox -s bake -- --config NAME` makes one"
            raise Failure(Exit.CACHE, "there is no sealed cache here to compare with", hint=hint)
        name, found = str(near[0].path), near[1]
    count = "one factor differs" if len(found) == 1 else f"{len(found)} factors differ"
    print(f"{name}: {count if found else 'it fits, every factor is equal'}")
    for difference in found:
        print(f"  {difference.sentence()}")
    return int(Exit.CACHE if found else Exit.DONE)


def _prune(options: argparse.Namespace) -> int:
    home = places.cache_home().path
    older = options.older_than * 86400 if options.older_than is not None else None
    going = store.doomed(store.stored(home), home=home, keep=options.keep, older_than=older)
    freed = 0
    for cache in going:
        stays = store.free(cache) if options.yes else None
        freed += 0 if stays else cache.size
        what = f"kept, {stays}" if stays else ("freed" if options.yes else "would be freed")
        print(f"{what}: {cache.path}  {megabytes(cache.size)}, last used {age(cache.used)} ago")
    begun = leftovers.found(home)
    for leftover in begun:
        stays = leftovers.free(leftover) if options.yes else None
        freed += 0 if stays else leftover.size
        what = f"kept, {stays}" if stays else ("freed" if options.yes else "would be freed")
        print(f"{what}: {leftover.path}  {megabytes(leftover.size)}, left unfinished {age(leftover.touched)} ago")
    verb = "freed" if options.yes else "would be freed; `--yes` does it"
    print(f"{megabytes(freed)} {verb}" if going or begun else "nothing to free")
    return int(Exit.DONE)


def _trust(options: argparse.Namespace) -> int:
    # everything but the signature is checked first: only a whole cache can be taken over
    manifest, _ = examine.examine(options.folder, sign.Trust(policy="unsigned"))
    _, data = manifests.read(options.folder)
    folder = places.cache_home().path / "trust"
    sign.remember(data, folder, f"taken over from {options.folder}")
    print(f"{manifest.cache_id} is believed from now on ({folder / 'known'})")
    return int(Exit.DONE)


def megabytes(size: int) -> str:
    """A size in bytes, as these commands print it."""
    return f"{size / 1e6:.1f} MB"


def age(used: float) -> str:
    """How long ago that was, in seconds since 1970, as these commands print it."""
    hours = max(0.0, time.time() - used) / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"
