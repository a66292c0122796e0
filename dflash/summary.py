"""What a run came to, as one record and one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from dflash import config
from dflash.data import Packed
from dflash.evaluation import Evaluation
from dflash.progress import duration
from dflash.trainer import Outcome


def gather(
    settings: config.Config,
    target: dict[str, Any],
    rows: Packed,
    outcome: Outcome,
    caches: dict[str, Any],
    measured: Evaluation,
    seconds: dict[str, float],
    sha256: str,
) -> dict[str, Any]:
    """The record of a run, JSON-able; `target` and `caches` are what the run's folder says of them."""
    lookup = measured.of("prompt lookup")
    trained = measured.of("trained")
    ratio = None
    if trained.tau_without_loops is not None and lookup.tau_without_loops:
        ratio = trained.tau_without_loops / lookup.tau_without_loops
    return {
        "target": target,
        "samples": rows.documents,
        "steps": outcome.steps,
        "block": settings.shapes.block,
        "tau": {decoder.name: decoder.tau for decoder in measured.decoders},
        "tau_without_loops": {decoder.name: decoder.tau_without_loops for decoder in measured.decoders},
        "times_prompt_lookup_without_loops": ratio,
        "looping_responses": measured.looping,
        "identical_responses": {decoder.name: decoder.identical for decoder in measured.decoders},
        "prompts": measured.prompts,
        "dtype": measured.dtype,
        "smallest_gap": measured.smallest_gap,
        "caches": caches,
        "seconds": seconds,
        "export_sha256": sha256,
    }


def show(content: dict[str, Any], folder: Path, stream: TextIO) -> None:
    """Print the record as tables a person reads, at any width and without colour."""
    console = Console(file=stream, highlight=False)
    # captured: rich itself would end the process with exit code 1 when whoever reads has gone
    with console.capture() as captured:
        tau = Table(title=f"acceptance length τ, blocks of {content['block']}, bonus counted", title_justify="left")
        tau.add_column("proposer")
        for heading in ("τ", "τ without loops", "same as the target"):
            tau.add_column(heading, justify="right")
        for name, value in content["tau"].items():
            same = f"{content['identical_responses'][name]} of {content['prompts']}"
            tau.add_row(name, _number(value), _number(content["tau_without_loops"][name]), same)
        console.print(tau)

        for name, value in _facts(content, folder):
            console.print(f"{name:<27} {value}", soft_wrap=True)
    stream.write(captured.get())


def _facts(content: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    target, caches = content["target"], content["caches"]
    loss = target.get("held_out_loss")
    facts = [("target", target["name"] + ("" if loss is None else f", held-out loss {loss:.3f} nats a byte"))]
    ratio = content["times_prompt_lookup_without_loops"]
    if ratio is not None:
        facts.append(("against prompt lookup", f"{ratio:.2f} times its τ, without loops"))
    facts.append(("responses that loop", f"{content['looping_responses']:.0%}"))
    facts.append(("smallest gap of two logits", f"{content['smallest_gap']:.1e} ({content['dtype']})"))
    if caches:
        hit, missed, bypassed = (
            sum(caches[f"{cache}_{how}"] for cache in ("autograd", "fx", "triton") if f"{cache}_{how}" in caches)
            for how in ("hit", "miss", "bypass")
        )
        first = caches["first_step_seconds"]
        kind = "of an earlier run" if caches["kind"] == "cold" and not missed else caches["kind"]
        said = f"{hit} hit, {missed} missed, {bypassed} bypassed; first step {first:.1f} s, cache {kind}"
        facts.append(("compiled kernels", said))
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in content["seconds"].items())
    total = duration(sum(content["seconds"].values()))
    facts.append(("time", f"{total} ({phases})"))
    facts.append(("weights", f"{folder / 'drafter'}, sha256 {content['export_sha256'][:16]}…"))
    return facts


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
