"""Compile every graph of a training step for GPUs that need not be here, prove that it hits, and seal it.

Each GPU and device index is compiled in a process of its own that believes in the card (`env.offline`), then replayed
in another one from nothing but what will be shipped: a bake that does not hit where it was made would hit nowhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env import bakers, bootstrap, environment, gpus, launch, variants
from env.cache import examine, manifest, places, seal, sign
from env.cache.canonical import digest
from env.cache.manifest import Manifest
from env.errors import Exit, Failure
from env.gpus import Gpu

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A tensor that a step is called with: only what a graph can depend on."""

    shape: tuple[int, ...]
    """Sizes; they are fixed, as everything that is baked."""
    dtype: str = "float32"
    """As torch spells it: `bfloat16`."""
    requires_grad: bool = False
    """Whether a gradient flows to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A training step that can be baked, by name: the process that bakes it imports and builds it."""

    name: str
    """As the user knows it."""
    factory: str
    """`package.module:function`; called with `arguments` and `device`, it returns the step, compiled or in parts."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the factory."""
    examples: tuple[Example, ...] = ()
    """What the step is called with; a result that requires a gradient is summed and run backward."""
    graph_id: str = ""
    """Identity of what the step compiles; made of the other fields if it is empty."""

    def identity(self) -> str:
        """The `graph_id` given, or one made of factory, arguments and examples."""
        return self.graph_id or digest([self.factory, dict(self.arguments), self.inputs()])

    def inputs(self) -> list[dict[str, Any]]:
        """The examples as JSON has them."""
        return [{**dataclasses.asdict(one), "shape": list(one.shape)} for one in self.examples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kitchen:
    """Where a bake is made, and with what."""

    python: Path
    """Interpreter of the environment that will train: its minor version is part of every key."""
    home: Path
    """Folder for unfinished bakes, on a local disk."""
    out: Path
    """Folder for sealed caches."""
    key: Path | None = None
    """A private key that signs what is sealed."""
    trust: Path | None = None
    """Folder in which to note that a cache was sealed here, so that it is believed here without a signature."""
    again: bool = False
    """Bake even if an earlier bake of the same is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baked:
    """A sealed cache, and what it took."""

    folder: Path
    """Where it is sealed."""
    manifest: Manifest
    """What it promises."""
    seconds: float | None
    """What compiling took; None when an earlier bake was found."""

    def sentence(self) -> str:
        """The outcome in one line."""
        keys = self.manifest.keys
        kernels = f"{len(keys['triton'])} kernels, " if keys["triton"] else ""
        took = "baked before" if self.seconds is None else f"{self.seconds:.0f} s"
        return f"{len(keys['fx'])} graphs, {kernels}{self.manifest.size / 1e6:.1f} MB, {took}: {self.folder}"


def bake(
    recipe: Recipe,
    gpu: Gpu | None,
    kitchen: Kitchen,
    *,
    index: int = 0,
    count: int = 1,
    kernels: Path | None = None,
    say: Say = lambda _: None,
) -> Baked:
    """Bake one recipe for one GPU and device index, or for this machine's CPU, and seal it.

    What an interrupted bake has compiled is taken up again. Two processes that bake the same thing wait for each other.

    Args:
        recipe: the step.
        gpu: the card; None for the kernels of this CPU, which are built by really running the step.
        kitchen: where and with what.
        index: of the device that will run it; 0 for a worker that sees one GPU.
        count: how many devices that process sees, at least `index` + 1.
        kernels: a folder in which bakes of one GPU for several indices share what they compile.
        say: told what happens, a line at a time.

    Raises:
        Failure: Exit.HOST, without g++, with a torch that was never read, or when a kernel does not fit the card;
            Exit.CACHE, when what was compiled does not hit in a fresh process; Exit.STORAGE, when a disk is full or a
            folder cannot be written.
    """
    job = {
        "factory": recipe.factory,
        "arguments": dict(recipe.arguments),
        "examples": recipe.inputs(),
        "gpu": dataclasses.asdict(gpu) if gpu else None,
        "index": index,
        "count": max(count, index + 1),
    }
    work = kitchen.home / digest([job, recipe.identity(), bakers.compilers(kitchen.python)])[:32]
    note = work.with_suffix(".sealed")
    with _storage(kitchen.home), _alone(work):
        if not kitchen.again and (before := _earlier(note, kitchen, say)) is not None:
            return before
        compiled = _kept(work / "compiled.json", lambda: _compile(kitchen.python, job, work, kernels, say))
        if compiled.get("said"):
            say(compiled["said"])
        proof = _kept(work / "proof.json", lambda: _prove(kitchen.python, job, work, compiled, say))
        folder, sealed = _seal(recipe, gpu, kitchen, work / "cache", compiled, proof)
        note.write_text(str(folder), encoding="utf-8")
        shutil.rmtree(work)
    return Baked(folder=folder, manifest=sealed, seconds=compiled["seconds"])


def _earlier(note: Path, kitchen: Kitchen, say: Say) -> Baked | None:
    """The cache that an earlier bake of the same thing sealed, if it is still there, whole, and as this one asks."""
    try:
        folder = Path(note.read_text(encoding="utf-8"))
    except OSError:
        return None
    if not folder.is_dir():
        return None
    if folder.parent.absolute() != kitchen.out.absolute():
        say(f"baking anew, as what was baked before is in {folder.parent}, and not in {kitchen.out}")
        return None
    if kitchen.key is not None and examine.signature_of(folder) is None:
        say("baking anew, as what was baked before is not signed")
        return None
    try:
        found, _ = examine.examine(
            folder, sign.Trust(policy="unsigned")
        )  # whether it is believed is the launch's affair
    except Failure as failure:
        say(f"baking anew, as what was baked before is damaged: {failure.message}")
        return None
    return Baked(folder=folder, manifest=found, seconds=None)


def _kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part of a bake led to: from the file in which it was kept, or by doing it now."""
    try:
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        outcome = make()
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(outcome), encoding="utf-8")
        fresh.replace(path)
    return outcome


def _compile(python: Path, job: Mapping[str, Any], work: Path, kernels: Path | None, say: Say) -> dict[str, Any]:
    # below the cache itself, even where it is shared: entries mention its path, which sealing knows how to leave out
    place = work / "cache" / "triton" / str(job["index"])
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        if kernels is None:
            place.mkdir()
        else:
            kernels.mkdir(parents=True, exist_ok=True)
            place.symlink_to(kernels)
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(work / "cache"), "TRITON_CACHE_DIR": str(place)}
    outcome = bakers.run(python, job, work, environ, lambda: say(f"{len(_kernels(place))} kernels so far"))
    return {**outcome, "kernels": _kernels(place)}


def _kernels(folder: Path) -> list[str]:
    return sorted({path.parent.name for path in folder.glob("*/*.cubin")})


def _prove(python: Path, job: Mapping[str, Any], work: Path, compiled: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Replay the step in a fresh process from what will be shipped, at another path: every graph must hit."""
    say(f"compiled in {compiled['seconds']:.0f} s, replaying in a fresh process")
    shutil.rmtree(work / "proof", ignore_errors=True)
    shutil.copytree(work / "cache", work / "proof", ignore=shutil.ignore_patterns("triton", "*.lock"))
    outcome = bakers.run(python, job, work, {"TORCHINDUCTOR_CACHE_DIR": str(work / "proof")}, lambda: None)
    shutil.rmtree(work / "proof")
    counts: dict[str, int] = outcome["counts"]
    wrong = [f"{name}: {value}" for name, value in counts.items() if value and not name.endswith("_hit")]
    if wrong or not counts["fx_hit"]:
        shutil.rmtree(work)
        raise Failure(
            Exit.CACHE,
            "what was compiled does not hit in a fresh process, so it is not sealed",
            details=[*(f"{name}: {value}" for name, value in counts.items() if name.endswith("_hit")), *wrong],
            hint="something in the step differs from process to process; `TORCH_LOGS=+inductor` shows what is hashed",
        )
    return outcome


def _seal(
    recipe: Recipe,
    gpu: Gpu | None,
    kitchen: Kitchen,
    cache: Path,
    compiled: Mapping[str, Any],
    proof: Mapping[str, Any],
) -> tuple[Path, Manifest]:
    hit: dict[str, Sequence[str]] = {"aot_autograd": proof["keys"]["autograd_hit"], "fx": proof["keys"]["fx_hit"]}
    for pattern, family in (("aotautograd/*", "aot_autograd"), ("fxgraph/*/*", "fx")):
        for entry in cache.glob(pattern):  # what nobody asked for is left over from a bake of older source
            if entry.name not in hit[family]:
                shutil.rmtree(entry)
    asked = {*hit["aot_autograd"], *hit["fx"]}
    return seal.seal(
        cache,
        kitchen.out,
        graph_id=recipe.identity(),
        gpu_id=gpus.gpu_id(gpu) if gpu else "cpu",
        gpu=dataclasses.asdict(gpu) if gpu else {"name": "cpu"},
        factors=compiled["factors"],
        counts={name: proof["counts"][name] for name in manifest.COUNTS},
        keys={**hit, "triton": compiled["kernels"]},
        details={key: lines for key, lines in compiled["details"].items() if key in asked},
        key=kitchen.key,
        trust=kitchen.trust,
        code=[variants.ROOT, *_packages(kitchen.python)],
    )


def _packages(python: Path) -> list[Path]:
    """Where an interpreter's packages lie; not resolved, as that of a virtual environment is a link out of it."""
    return sorted(python.absolute().parent.parent.glob("lib/python*/site-packages"))


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Hold a bake's folder; whoever comes second waits, and then finds the work done."""
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    with work.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work.mkdir(mode=0o700, exist_ok=True)
        yield


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise seal.unwritable(folder, error) from error


# The command

EXAMPLES = """
examples:
  nox -s bake -- --config qwen3-8b --gpu h200 --gpu rtx-pro-6000
      one cache for each card, for workers that see one GPU each
  nox -s bake -- --config qwen3-8b --gpu h200 --devices 5,6,7
      for a process that sees eight cards and trains on three of them
  nox -s bake -- --config tiny
      the kernels of this machine's CPU, by really running a step
"""


def parser() -> argparse.ArgumentParser:
    """The command line of `bake`."""
    made = argparse.ArgumentParser(
        prog="nox -s bake --",
        description="Compile every kernel that a run needs, for GPUs that need not be here, and seal them in a cache.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--config", action="append", default=[], help="a preset or a TOML file; may be given repeatedly")
    made.add_argument("--gpu", action="append", default=[], help="a card of `--list`; none: this CPU's own kernels")
    made.add_argument("--devices", type=_indices, default=(0,), help="indices of the cards in one process, as in 5,6,7")
    made.add_argument("--variant", help=f"torch and CUDA to bake for ({variants.UNLESS_GIVEN})")
    made.add_argument("--python", help="Python that will train, as in 3.12; its version is in every key")
    made.add_argument("--repair", action="store_true", help="make the environment anew from its lock first")
    made.add_argument("--interpreter", type=Path, help="bake with this environment's Python instead of the locked one")
    made.add_argument("--out", type=Path, help="folder for sealed caches (default: the user's cache folder)")
    made.add_argument("--key", type=Path, help="a private SSH key that signs what is sealed")
    made.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once (default: cores)"
    )
    made.add_argument("--again", action="store_true", help="bake anew what was baked before")
    made.add_argument("--list", action="store_true", help="list the cards that can be baked for")
    return made


def _indices(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"-?\d{1,3}(,-?\d{1,3})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of indices, as in 5,6,7")
    found = tuple(int(word) for word in text.split(","))
    if min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names one twice, or one below 0")
    return found


def main(argv: Sequence[str]) -> int:
    """`python -m env bake`: bake configurations for cards; prints a line for each sealed cache.

    Raises:
        Failure: Exit.USAGE, for a configuration or card that does not exist, with the nearest name; see `bake`.
    """
    options = parser().parse_args(list(argv))
    if options.list:
        print("\n".join(map(_row, gpus.load().values())))
        return int(Exit.DONE)
    if not options.config:
        raise Failure(Exit.USAGE, "no configuration is given", hint="`--config qwen3-8b`, for example")
    if options.interpreter and (options.variant or options.python or options.repair):
        said = "`--interpreter` names the environment, so `--variant`, `--python` and `--repair` have nothing to choose"
        raise Failure(Exit.USAGE, said, hint="leave them out")
    cards: list[Gpu | None] = [gpus.find(name) for name in dict.fromkeys(options.gpu)] or [None]
    if cards == [None] and options.devices != (0,):
        raise Failure(Exit.USAGE, "`--devices` is given without a card", hint="add `--gpu h200`, for example")
    if options.key is not None and not options.key.is_file():  # before minutes of compiling
        raise Failure(
            Exit.USAGE, f"`--key {options.key}`: there is no such file", hint="`ssh-keygen -t ed25519` makes one"
        )
    caches = places.cache_home(os.environ).path
    kitchen = Kitchen(
        python=options.interpreter.absolute() if options.interpreter else _locked(options, argv),
        home=caches / "baking",
        out=options.out or caches / "sealed",
        key=options.key,
        trust=caches / "trust",
        again=options.again,
    )
    recipes = [_drafter(name, kitchen.python) for name in dict.fromkeys(options.config)]
    try:
        return _bake_all(recipes, cards, options.devices, kitchen, max(1, options.jobs))
    except KeyboardInterrupt:
        _say("stopped; the same command goes on where this one was")
        raise
    finally:
        bakers.stop_all()


def _locked(options: argparse.Namespace, argv: Sequence[str]) -> Path:
    """The Python of the locked environment, after a look whether it still is the locked one."""
    from env import drift

    chosen = variants.load().variant(options.variant)
    make = environment.repair if options.repair else environment.ensure
    found = make(chosen.name, python=options.python)
    drifts = drift.compare(found, chosen.lock)
    if drifts:
        command = f"{os.environ.get(bootstrap.FRONT_DOOR, 'nox')} -s bake"
        _, words = launch.take(argv)
        words = [*(["--python", options.python] if options.python else []), *words]
        # what is sealed is for others, who have the locked set: there is no going on as it is
        raise drift.failure(drifts, chosen.name, command=command, options=shlex.join(words), passable=False)
    return found


def _drafter(config: str, python: Path) -> Callable[[Gpu | None], Recipe]:
    """The recipe of a drafter's configuration, for a card or the CPU."""
    # the process that reads it runs in the project's folder, the user named the file from here
    name = str(Path(config).absolute()) if Path(config).is_file() else config
    known = bakers.describe(python, "dflash.graphs:describe", {"name": name})["value"]

    def recipe(gpu: Gpu | None) -> Recipe:
        return Recipe(
            name=config,
            factory="dflash.graphs:rehearsal",
            arguments={"tables": known["tables"]},
            graph_id=known["graph_ids"]["cuda" if gpu else "cpu"],
        )

    return recipe


def _bake_all(
    recipes: Sequence[Callable[[Gpu | None], Recipe]],
    cards: Sequence[Gpu | None],
    indices: Sequence[int],
    kitchen: Kitchen,
    jobs: int,
) -> int:
    """Bake everything, `jobs` processes at once; all are tried before the first failure is raised."""
    places_free = threading.Semaphore(jobs)
    pairs = [(recipe(card), card) for recipe in recipes for card in cards]

    def one(recipe: Recipe, card: Gpu | None, kernels: Path | None, index: int) -> Baked:
        title = f"{recipe.name} for {card.key if card else 'this CPU'}" + (f", device {index}" if index else "")
        with places_free:
            _say(f"{title}: compiling")
            baked = bake(
                recipe,
                card,
                kitchen,
                index=index,
                count=max(indices) + 1,
                kernels=kernels,
                say=lambda line: _say(f"{title}: {line}"),
            )
        print(f"{title}: {baked.sentence()}", flush=True)
        return baked

    def group(recipe: Recipe, card: Gpu | None) -> None:
        if len(indices) == 1:
            one(recipe, card, None, indices[0])
            return
        kernels = (
            kitchen.home / f"{digest([recipe.identity(), str(card), bakers.compilers(kitchen.python)])[:32]}.kernels"
        )
        one(recipe, card, kernels, indices[0])  # the first compiles the kernels, which have no index in them
        with ThreadPoolExecutor(len(indices)) as others:
            _wait([others.submit(one, recipe, card, kernels, index) for index in indices[1:]])
        shutil.rmtree(kernels, ignore_errors=True)

    with ThreadPoolExecutor(len(pairs)) as pool:
        _wait([pool.submit(group, *pair) for pair in pairs])
    return int(Exit.DONE)


def _wait(futures: Sequence[Future[Any]]) -> None:
    try:
        failures = [error for future in futures if (error := future.exception()) is not None]
    except KeyboardInterrupt:
        bakers.stop_all()
        raise
    for failure in failures[1:]:
        if isinstance(failure, Failure):
            print(failure, file=sys.stderr, flush=True)
    if failures:
        raise failures[0]


def _row(gpu: Gpu) -> str:
    mark = "read off a card" if gpu.verified else "from data sheets"
    return f"{gpu.key:26} {gpu.name:58} sm_{gpu.major}{gpu.minor:<4} {mark}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
