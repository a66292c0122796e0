"""A configuration's own cache, really baked for this CPU: verified, harvested, trained from, and explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import micro
import pytest
import torch
from caches import make_sealed

from dflash import caches, config
from env.cache import store
from env.errors import Exit

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1500)  # a minute of one core's work, much longer where cores are shared
SMALL = micro.toml(
    drafter={"layers": 1},
    optimizer={"epochs": 1},
    target={"rows": 2, "sequence": 64, "steps": 2, "intermediate_size": 96},
    data={"prompts": 4, "prompt_tokens": 32, "response_tokens": 32},
    evaluation={"prompts": 2, "prompt_tokens": 32, "response_tokens": 32},
)


class Baked:
    """A cache home in which the small configuration is baked, and commands that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir(mode=0o700)
        (folder / "small.toml").write_text(SMALL)
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DFLASH_CACHE_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
        }
        self.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, "--config", "small.toml"],
            cwd=self.folder,
            env={**self.environ, **more},
            capture_output=True,
            text=True,
            check=False,
        )

    def said(self, *command: str, **more: str) -> str:
        done = self.run(*command, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def manifests(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.home / "sealed").glob("*/manifest.json"))]


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Baked:
    place = Baked(tmp_path_factory.mktemp("baked"))
    said = place.said("-m", "env", "bake", "--interpreter", sys.executable)
    assert "3 graphs" in said
    return place


HITS = "AOTAutograd 2 of 2 hit, 0 missed; FX 3 of 3 hit, 0 missed; Triton 0 of 0 hit, 0 missed; first step "


def test_verify_harvests_what_is_new_and_a_whole_training_run_then_hits_everything_that_was_baked(baked: Baked) -> None:
    (parent,) = baked.manifests()
    seeded = subprocess.run(
        [sys.executable, "-m", "env", "cache", "seed", str(baked.home / "sealed" / parent["cache_id"])],
        env=baked.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    kernel = next(path for path in Path(seeded.stdout.strip()).glob("??/*.so"))
    kernel.with_suffix(".best_config").write_text('{"XBLOCK": 64, "time_taken_ms": 3}')  # as a card's benchmark does
    said = baked.said("-m", "dflash", "verify", "--harvest").splitlines()
    assert said[0].startswith(HITS)
    assert said[1].startswith(f"1 winner brought back: {baked.home}/sealed/{parent['cache_id']}.")
    made = next(one for one in baked.manifests() if one["parent"] is not None)
    assert made["parent"] == parent["digest"]
    assert f"digest {made['digest'][:16]}, parent {parent['digest'][:16]}" in said[1]
    # a run that also trains its target: nothing that it does before may move a key
    done = baked.run("-m", "dflash", "train", "--run", "run")
    assert done.returncode == 0, done.stderr
    assert ", sealed here" in done.stderr
    answers = json.loads((baked.folder / "run/summary.json").read_text())["caches"]
    assert answers["kind"] == "seeded"
    assert answers["problems"] == []
    assert [answers[name] for name in ("autograd_hit", "autograd_miss", "fx_hit", "fx_miss")] == [2, 0, 3, 0]
    assert answers["path"] != seeded.stdout.strip(), "the new cache was chosen, in a directory of its own"
    assert Path(answers["path"], kernel.parent.name, f"{kernel.stem}.best_config").exists()
    assert answers["first_step_seconds"] > 0
    assert answers["warm_up_seconds"] > 0


def test_a_first_step_that_misses_names_the_factor_both_values_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"DFLASH_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr("dflash.caches.HANDED", environ)
    wanted = caches.identity(config.load("tiny"), torch.device("cpu"))
    sealing: dict[str, Any] = {"graph_id": wanted.graph_id, "gpu_id": "cpu", "gpu": wanted.gpu}
    counts = {"autograd_hit": 1, "fx_hit": 2, "triton_hit": 0}
    make_sealed(tmp_path, factors=wanted.factors, counts=counts, details={"fabc": ["[aa] gm: x"]}, **sealing)
    choice = store.choose(wanted, environ=environ)
    assert choice.manifest is not None
    missed = {"autograd_hit": 0, "fx_hit": 0, "triton_hit": 0, "autograd_miss": 1, "fx_miss": 2, "triton_miss": 0}
    keys = {"autograd_miss": ["azzz"], "fx_miss": ["fzzz"]}
    assert caches.judged(choice, counts, {"autograd_hit": ["aaaa"], "fx_hit": ["fabc", "fcde"]})[1] == []
    _, said = caches.judged(choice, missed, keys, {"fzzz": ["[bb] gm: y"]})
    assert said[0].startswith("the baked cache did not hold what it promises (AOTAutograd 0 of 1 hit, 1 missed")
    assert "gm: sealed `x`, here `y`" in said, "with equal factors, the keys' own details tell it"
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # something changes after the cache was chosen
    try:
        record, said = caches.judged(choice, missed, keys)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    (named,) = [line for line in said if line.startswith("torch.matmul.fp32_precision: sealed `none`, here `tf32`")]
    assert named.endswith("undo that")
    assert record["reasons"] == [named]


def test_a_key_without_a_harvest_is_refused(baked: Baked) -> None:
    done = baked.run("-m", "dflash", "verify", "--key", "id_ed25519")
    assert done.returncode == Exit.USAGE
    assert "`--key` signs what `--harvest` seals, which is not asked for" in done.stderr
