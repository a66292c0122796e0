"""Spread runs for tests: a small target, packed rows, and `python tests/launching.py FOLDER ...` to train on them.

The program is what `dflash train --topology` does between its phases that happen once: it starts the agent and waits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MICRO: dict[str, Any] = {
    "drafter": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab_size": 272,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "mask_token_id": 257,
        "target_layers": 2,
        "target_layer_ids": [0, 1],
    },
    "shapes": {"rows": 1, "sequence": 128, "anchors": 8, "block": 16},
    "loss": {"gamma": 7.0, "chunk_blocks": 8},
    "optimizer": {
        "kind": "adamw",
        "lr": 1e-3,
        "warmup": 0.1,
        "clip": 1.0,
        "weight_decay": 0.0,
        "betas": [0.9, 0.95],
        "accumulate": 3,
        "epochs": 2,
    },
    "precision": {"compute": "float32"},
    "checkpoint": {"every": 4, "keep": 2},
    "data": {"prompts": 0, "prompt_tokens": 0, "response_tokens": 0},
    "evaluation": {"prompts": 1, "prompt_tokens": 8, "response_tokens": 8},
}
BOUND = 1e-6
"""Norm of the difference of two drafters' weights over their norm, after this run.

Each element of a gradient is a sum of 3 numbers, added in another order: it moves by 2 roundings of float32 at most,
2 ** -23 of the largest partial sum. AdamW divides by the gradient's own size, so an element near 0 may move by the
rate where it did not; over 20 steps that stays far below this bound, and a sample that went elsewhere far above."""

ROWS = 30
STEPS = 20
"""2 epochs of 30 rows, 3 passes of 1 row a step."""


def write_target(folder: Path, sizes: dict[str, Any]) -> Path:
    """A random target for a drafter's sizes, with a tokenizer."""
    import torch
    import transformers

    from dflash import small_target, target

    torch.manual_seed(5)
    shape = transformers.Qwen3Config(
        head_dim=16,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=48,
        num_hidden_layers=sizes["target_layers"],
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    maker: Any = transformers.AutoModelForCausalLM
    with target.quiet():
        maker.from_config(shape).save_pretrained(folder)
        small_target.tokenizer().save_pretrained(folder)
    return folder


def write_rows(file: Path, sequence: int = MICRO["shapes"]["sequence"]) -> Path:
    """Packed rows of random tokens that follow each other in a way that can be learnt."""
    import torch

    from dflash import data

    begin = torch.randint(0, 200, (ROWS, 1), generator=torch.Generator().manual_seed(1))
    tokens = (begin + torch.arange(sequence) * 3) % 256
    document = (torch.arange(sequence) >= 64).to(torch.int32).expand(ROWS, -1).contiguous()
    response = torch.ones(ROWS, sequence, dtype=torch.bool)
    rows = data.Rows(tokens=tokens, document=document, response=response, documents=2 * ROWS, truncated=0, empty=0)
    data.write(rows, file)
    return file


class World:
    """A folder with a target, rows and a compile cache that all runs of a test file share."""

    def __init__(self, folder: Path, tables: dict[str, Any] = MICRO) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.target = write_target(folder / "target", tables["drafter"])
        self.rows = write_rows(folder / "rows.safetensors", tables["shapes"]["sequence"])
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DFLASH_CACHE_HOME": str(folder / "caches"),
            "OMP_NUM_THREADS": "1",
            "DFLASH_SILENCE": "10",
        }
        self.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        self.started: list[subprocess.Popen[str]] = []

    def clear(self) -> None:
        """End what a test that failed has left running; workers follow their launcher."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            if process.stderr is not None and not process.stderr.closed:
                process.communicate()
        self.started = []

    def start(
        self, run: str, topology: str, *options: str, prefix: tuple[str, ...] = (), **changes: Any
    ) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, __file__, str(self.folder), run, topology, json.dumps(changes), *options]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.started.append(process)
        return process

    def train(self, run: str, topology: str, *options: str, **changes: Any) -> Path:
        """A run that ends well; its folder."""
        code, said = ended(self.start(run, topology, *options, **changes))
        assert code == 0, said
        return self.folder / run


def ended(process: subprocess.Popen[str], timeout: float = 400) -> tuple[int, str]:
    """Exit code and standard error of a process that ends by itself."""
    try:
        _, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def lines(run: Path) -> int:
    """Steps that a run has written down."""
    path = run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 400) -> None:
    begun = time.monotonic()
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() - begun < seconds, "waited in vain"
        time.sleep(0.02)


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """Processes of a launcher's workers by rank."""
    found = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in children:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = [value for value in variables if re.match(rb"RANK=\d", value)]
        if rank:
            found[int(rank[0].split(b"=")[1])] = int(pid)
    return found


def weights(run: Path, tables: dict[str, Any] = MICRO) -> dict[str, Any]:
    """The drafter's weights in a run's last checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from dflash import checkpoint, config, trainer
    from dflash.model import Drafter

    settings = config.parse(tables, "micro")
    drafter = Drafter(settings.drafter)
    optimizers = trainer.make_optimizers(drafter, settings.optimizer)
    assert checkpoint.resume(run / "checkpoints", drafter, optimizers) == STEPS
    return dict(get_model_state_dict(drafter))


def same(one: Path, other: Path, tables: dict[str, Any] = MICRO) -> bool:
    """Whether two runs have the same numbers in every step and the same weights, to the bit."""
    import torch

    if (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes():
        return False
    left, right = weights(one, tables), weights(other, tables)
    return all(torch.equal(left[name], right[name]) for name in left)


def distance(one: Path, other: Path) -> float:
    """Norm of the difference of two runs' weights over the norm of the weights."""
    import torch

    left, right = weights(one), weights(other)
    difference = torch.cat([(left[name] - right[name]).flatten() for name in left])
    return float(difference.norm() / torch.cat([part.flatten() for part in left.values()]).norm())


def main(folder: Path, run: str, topology: str, changes: dict[str, Any], options: dict[str, Any]) -> int:
    from dflash import config, launch
    from dflash.stopping import Stopped, listening
    from dflash.topology import Nodes, Plan, parse
    from dflash.worker import Job, say
    from env.errors import Failure, report

    tables = json.loads(json.dumps(MICRO))
    for table, values in changes.items():
        tables[table] = {**tables[table], **values}
    shape = parse(topology, visible=1)
    nodes = Nodes(**options.pop("nodes", {}))
    plan = Plan(topology=shape, nodes=nodes, **options)
    place = folder / run
    place.mkdir(exist_ok=True)
    job = Job(
        tables=config.to_tables(config.parse(tables, "micro")),
        seed=0,
        target=str(folder / "target"),
        rows=str(folder / "rows.safetensors"),
        folder=str(place),
        topology=[shape.targets, shape.drafters],
        launcher=plan.launcher,
        status="",
    )
    try:
        with listening() as stop:
            if nodes.node_rank:
                launch.wait_for_job(job, nodes, say, stop)
            launch.run(plan, job, stop, say=say, places=place / "checkpoints")
            if stop.asked():
                raise stop.stopped("the workers have saved")
    except Failure as failure:
        return report(failure)
    except Stopped as stopped:
        print(f"stopped: {stopped.where}", file=sys.stderr)
        return int(stopped.code)
    return 0


if __name__ == "__main__":
    asked = {key: json.loads(value) for key, _, value in (option.partition("=") for option in sys.argv[5:])}
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), asked))
