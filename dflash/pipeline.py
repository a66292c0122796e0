"""A run from its request to its summary: target, samples, training, export, decoding, pictures.

Each phase leaves its result in the run's folder and is passed over when it is there already, so a run that was stopped
anywhere goes on where it was.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash import (
    chats,
    checkpoint,
    config,
    data,
    evaluation,
    export,
    features,
    passes,
    pictures,
    prepared,
    progress,
    regenerate,
    run,
    small_target,
    sources,
    summary,
    trainer,
)
from dflash import target as targets
from dflash import text as texts
from dflash.graphs import DTYPES
from dflash.model import Drafter
from dflash.stopping import Stop, listening
from dflash.topology import ONE, Plan, remarks
from dflash.worker import Job
from env.errors import Exit, Failure, visible

RUNS = Path("runs")
"""Where runs go unless `--run` names a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asks for."""

    settings: config.Config
    """The configuration."""
    name: str
    """What the run's folder is called unless `run` says so."""
    seed: int
    """Seed of everything that is drawn."""
    run: Path | None
    """Folder of the run."""
    target: str | None
    """Folder or hub name of the target; None to train a small one."""
    text: Path | None
    """File or folder of text; None for the shipped one."""
    plan: Plan | None = None
    """How training is spread over workers; None for this process alone."""
    data: Path | None = None
    """File or folder of JSON lines, instead of samples from a text."""
    features: Path | None = None
    """Folder of features, with the rows that they belong to."""
    faulty: float = 0.1
    """Share of the lines of `data` that may be of no use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What every phase needs: where the run lives, how it is asked to stop, what its status lines say."""

    request: Request
    """What was asked for."""
    text: texts.Text
    """The text that was read."""
    folder: Path
    """The run's folder."""
    device: torch.device
    """Where tensors live."""
    stop: Stop
    """Whether a signal has asked to stop."""
    status: str
    """What every status line says of the environment; empty when it is the locked one."""
    phases: run.Phases
    """Seconds of each phase."""

    def check(self, where: str) -> None:
        """Raise Stopped when a signal asked for it; `where` says what a rerun goes on from."""
        if self.stop.asked():
            raise self.stop.stopped(where)


def follow(request: Request) -> None:
    """Carry out a request; prints the summary on standard output.

    Raises:
        Failure: with the exit code of whatever cannot be had.
        Stopped: when a signal asked for it, after saving.
    """
    settings = request.settings
    if request.target is None and settings.target is None:
        raise Failure(
            Exit.USAGE,
            "this configuration trains no target of its own, and none is named",
            hint="name one: `--target FOLDER_OR_HUB_NAME`",
        )
    _require_one_source(request)
    if request.data is None and request.features is None and settings.data.prompts == 0:
        raise Failure(  # before a target is loaded or trained
            Exit.USAGE,
            "this configuration cuts no prompts from a text (data.prompts is 0), and no data are named",
            hint="name some: `--data chats.jsonl` or `--features DIR`; or set `data.prompts`, `data.prompt_tokens` and "
            "`data.response_tokens`",
        )
    if request.plan is not None and request.plan.nodes.node_rank > 0:
        help_out(request, request.plan)
        return
    text = texts.load(request.text, shortest=settings.shapes.sequence)
    given = {
        "config": config.to_tables(settings),
        "seed": request.seed,
        "target": request.target,
        "text": text.sha256,
        **sources.given(request.data, request.features),
    }
    folder = request.run or run.choose(RUNS, request.name, given)
    with listening() as stop, run.occupied(folder, settings, given) as begun:
        course = Course(
            request=request,
            text=text,
            folder=folder,
            device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"),
            stop=stop,
            status=run.drifted(folder),
            phases=run.Phases(folder),
        )
        said = f" ({course.status})" if course.status else ""
        say(f"{'going on with' if begun else 'new run'} `{folder}` on {course.device.type}{said}")
        _carry_out(course)


def _carry_out(course: Course) -> None:
    settings, folder = course.request.settings, course.folder
    if course.request.target is None:
        made = own_target(course)
        name, facts = str(folder / "target"), {"name": "a small one of its own", **dataclasses.asdict(made)}
    else:
        name, facts = course.request.target, {"name": course.request.target}
    target = targets.load(name, device=course.device, dtype=DTYPES[settings.precision.compute])
    targets.check(target, settings.drafter)
    if course.request.target is not None:
        run.keep_target(folder, name, targets.digest(target))
    rows, kept = read(course, target)
    outcome = trained(course, name, rows, target, kept)
    sha256 = export.write(folder / "drafter", outcome.drafter, settings)
    measured = decoded(course, name, target, outcome.drafter, held_out(rows))
    with course.phases.measured("pictures"):
        pictures.draw(folder)
    content = summary.gather(
        settings,
        facts,
        rows,
        outcome,
        run.caches(folder),
        measured,
        course.phases.seconds,
        sha256,
    )
    run.write_json(folder / "summary.json", content)
    try:
        summary.show(content, folder, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has gone, but the run is whole; Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def own_target(course: Course) -> small_target.Summary:
    """Train the small target into the run's folder, or take it from there."""
    request, folder = course.request, course.folder
    recipe = request.settings.target
    assert recipe is not None
    metrics: run.Metrics | None = None
    with course.phases.measured("target"), _track(course, "training a target", recipe.steps) as bar:

        def report(numbers: dict[str, Any]) -> None:
            nonlocal metrics
            step = numbers["step"]
            if metrics is None:
                metrics = run.Metrics(folder, "target_metrics", step - 1)
            metrics.add(step, {"loss": numbers["loss"], "lr": numbers["lr"]})
            bar.reached(step, loss=numbers["loss"], tokens=recipe.rows * recipe.sequence)

        try:
            made = small_target.train(
                request.settings,
                course.text,
                folder / "target",
                seed=request.seed,
                device=course.device,
                stop=lambda: course.check(f"step {bar.done} of {bar.total} of the target is saved in `{folder}`"),
                report=report,
            )
        finally:
            if metrics is not None:
                metrics.close()
        bar.done = bar.total  # also when an earlier start had done it
    return made


def read(course: Course, target: targets.Target) -> tuple[data.Packed, features.Kept | None]:
    """The packed rows, and the features that were kept of them, if it is these that are trained on."""
    request = course.request
    if request.features is not None:
        kept = features.opened(request.features, request.settings, target)
        prepared.report(kept.rows, say)
        sources.keep(course.folder, kept.rows)
        return kept.rows, kept
    if request.data is None:
        return packed(course, target), None
    total = chats.size(chats.files(request.data))
    with course.phases.measured("samples"), _track(course, "preparing data", total, "bytes") as bar:

        def watch(count: int) -> None:
            bar.advance(count)
            course.check("nothing of the data is prepared yet")

        rows = sources.stored(request.data, request.settings, target, faulty=request.faulty, watch=watch, say=say)
        bar.done = total
    sources.keep(course.folder, rows)
    return rows, None


def held_out(rows: data.Packed) -> list[list[int]] | None:
    """Prompts that a user's data keep for the evaluation; None where they come from a text."""
    return [list(prompt) for prompt in rows.held_out] if isinstance(rows, prepared.Stored) else None


def packed(course: Course, target: targets.Target) -> data.Rows:
    """Samples that the target continued itself, packed; says what was left out."""
    settings = course.request.settings
    with course.phases.measured("samples"), _track(course, "writing samples", settings.data.prompts, "samples") as bar:

        def watch(count: int, *, made: bool) -> None:
            bar.advance(count) if made else bar.skip(count)
            course.check(f"{bar.done} of {bar.total} samples are kept in `{course.folder}`")

        samples = regenerate.samples(
            settings, course.text, target, course.folder, seed=course.request.seed, watch=watch
        )
        bar.done = bar.total
    rows = data.pack(samples, settings.shapes.sequence)
    left_out = f", {rows.truncated} cut short, {rows.empty} empty" if rows.truncated or rows.empty else ""
    say(f"{rows.documents} samples in {len(rows.tokens)} rows, {rows.fill:.0%} full{left_out}")
    return rows


def trained(
    course: Course, name: str, rows: data.Packed, target: targets.Target, kept: features.Kept | None
) -> trainer.Outcome:
    """Train the drafter to its end."""
    request = course.request
    if request.plan is not None:
        return spread(course, request.plan, name, rows, target)
    for remark in remarks(ONE, request.settings.optimizer):
        say(remark)
    source: trainer.Supply
    if kept is None:
        source = trainer.Borrowed(target, course.device, request.settings)
    else:
        source = features.Shelved(kept, target, course.device)
    total = passes.total_steps(len(rows.tokens), request.settings)
    with course.phases.measured("drafter"), _track(course, "training the drafter", total) as bar:

        def watch(step: trainer.Step) -> None:
            bar.reached(step.step, loss=step.loss, tokens=step.tokens, note=step.note)

        outcome = trainer.train(
            request.settings,
            rows,
            lambda _: source,
            course.folder,
            seed=request.seed,
            place=trainer.Place(device=course.device),
            stop=course.stop,
            watch=watch,
            say=say,
        )
        bar.done = bar.total
    if outcome.caches is not None:
        run.write_json(course.folder / "caches.json", outcome.caches)
    return outcome


def spread(course: Course, plan: Plan, name: str, rows: data.Packed, target: targets.Target) -> trainer.Outcome:
    """Let workers train the drafter to its end, and take it from the last checkpoint."""
    from dflash import launch

    module: torch.nn.Module = target.model
    request, folder = course.request, course.folder
    total, places = passes.total_steps(len(rows.tokens), request.settings), folder / "checkpoints"
    if newest(places) < total:
        for remark in remarks(plan.topology, request.settings.optimizer):
            say(remark)
        sources.place(rows, rows_of(request, folder))
        module.to("cpu")  # the first GPU is a worker's now
        torch.cuda.empty_cache()
        with course.phases.measured("drafter"):
            launch.run(plan, job(request, plan, folder, name, course.status), course.stop, say=say, places=places)
        module.to(course.device)
        if (kept := newest(places)) < total:
            course.stop.ask(signal.SIGTERM)  # should no worker of this node have come to say that another was asked
            saved = f"step {kept} of {total} is saved in `{places}`"
            raise course.stop.stopped(saved if kept else f"none of {total} steps was trained yet")
    drafter = Drafter(request.settings.drafter).to(course.device)
    checkpoint.resume(places, drafter, trainer.make_optimizers(drafter, request.settings.optimizer))
    return trainer.Outcome(drafter=drafter, steps=total, caches=None)


def help_out(request: Request, plan: Plan) -> None:
    """What a node other than 0 does: wait until node 0 has prepared everything, and run workers with it."""
    from dflash import launch

    folder = request.run
    assert folder is not None
    with listening() as stop:
        name = request.target or str(folder / "target")
        wanted = job(request, plan, folder, name, "")
        launch.wait_for_job(wanted, plan.nodes, say, stop)
        launch.run(plan, wanted, stop, say=say, places=folder / "checkpoints")
        if stop.asked():
            kept = newest(folder / "checkpoints")
            raise stop.stopped(f"step {kept} is saved in `{folder}`" if kept else "no step was trained yet")


def job(request: Request, plan: Plan, folder: Path, name: str, status: str) -> Job:
    """What the workers of a run are told."""
    return Job(
        tables=config.to_tables(request.settings),
        seed=request.seed,
        target=name,
        rows=str(rows_of(request, folder)),
        features=str(request.features or ""),
        folder=str(folder),
        topology=[plan.topology.targets, plan.topology.drafters],
        launcher=plan.launcher,
        status=status,
    )


def newest(places: Path) -> int:
    """Step of the newest checkpoint; 0 when there is none."""
    return max(checkpoint.steps(places), default=0)


def rows_of(request: Request, folder: Path) -> Path:
    """Where the workers of a run find its packed rows: in its folder, which all nodes share."""
    return folder / ("rows.safetensors" if request.data is None else "rows")


def decoded(
    course: Course, name: str, target: targets.Target, drafter: Drafter, prompts: list[list[int]] | None
) -> evaluation.Evaluation:
    """Decode held-out prompts, the text's if none are given, in float32: there, output must equal the target's own."""
    settings = course.request.settings
    wanted = settings.evaluation
    exact = target
    if settings.precision.compute != "float32":
        exact = targets.load(name, device=course.device, dtype=torch.float32)
    untrained = Drafter(settings.drafter)
    untrained.initialise(course.request.seed)
    untrained.to(course.device)
    if prompts is None:
        prompts = regenerate.prompts(
            exact, course.text.held_out, wanted.prompts, wanted.prompt_tokens, seed=course.request.seed
        )
    tokens = 5 * len(prompts) * wanted.response_tokens  # the target alone and four proposers
    with course.phases.measured("decoding"), _track(course, "decoding", tokens, unit="tokens") as bar:
        before: dict[str, int] = {}

        def report(who: str, done: int, _total: int) -> None:
            course.check("the drafter is trained and saved; only decoding is left")
            bar.advance(done - before.get(who, 0))
            before[who] = done

        measured = evaluation.evaluate(
            exact.model,
            drafter,
            untrained,
            prompts,
            wanted.response_tokens,
            block=settings.shapes.block,
            stop=targets.stop_tokens(exact),
            report=report,
        )
    run.write_json(course.folder / "evaluation.json", dataclasses.asdict(measured))
    return measured


def _require_one_source(request: Request) -> None:
    given = {"--data": request.data, "--features": request.features}
    if request.target is not None:  # a small target of its own is trained on the text
        given["--text"] = request.text
    named = [name for name, path in given.items() if path is not None]
    if len(named) > 1:
        message = f"{' and '.join(named)} each say what to train on"
        raise Failure(Exit.USAGE, message, hint="give one of them; features have their data with them")
    if request.features is not None and request.plan is not None and request.plan.topology.targets:
        message = f"features that are read leave nothing to do for {request.plan.topology.targets} targets"
        raise Failure(Exit.USAGE, message, hint="`--topology colocated` gives every worker a drafter")


def _track(course: Course, title: str, total: int, unit: str = "steps") -> AbstractContextManager[progress.Track]:
    return progress.track(title, total, unit=unit, status=course.status)


def say(line: str) -> None:
    """One line for whoever watches, beside the results on standard output."""
    with suppress(BrokenPipeError):  # whoever read the log has gone; the run need not
        print(visible(line), file=sys.stderr, flush=True)
