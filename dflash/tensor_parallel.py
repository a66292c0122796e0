"""A target larger than one GPU: split over processes by the plan that transformers has for its architecture.

Every process of the group runs the same calls on the same tokens, and gets the same whole features.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from dflash.stopping import Stop
from env.errors import Exit, Failure

SPLIT = "DFLASH_SPLIT"
"""Tells a process that it is one of a group."""
GRACE = 3.0
"""Seconds that a process which is not the first keeps silent about its failure."""


def rank() -> int:
    """The number of this process in its group; 0 when there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def agree(number: int) -> int:
    """What process 0 says, for all of the group."""
    told = torch.tensor([number])
    if dist.is_initialized():
        dist.broadcast(told, 0)
    return int(told)


def run(count: int, work: Callable[[Sequence[str]], int], arguments: Sequence[str], stop: Stop) -> int:
    """Do the same work in `count` processes of one group, with a GPU each where there are any.

    The exit code is that of the first to fail, 0 when none does. A signal to this process goes on to all of them.

    Raises:
        Failure: Exit.HOST, when there are fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count()
    if 0 < gpus < count:
        raise Failure(Exit.HOST, f"the target is to be split over {count} GPUs, and there are {gpus}")
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # that it ends those who wait is meant
    spawn: Any = importlib.import_module("torch.multiprocessing.spawn")  # hidden by a function of its name
    given = (count, _free_port(), work, list(arguments))
    context = spawn.start_processes(_one, given, nprocs=count, join=False, start_method="spawn")
    asked = False
    try:
        while not context.join(timeout=0.2):
            if stop.signal is not None and not asked:
                asked = True
                for pid in context.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), stop.signal)
    except spawn.ProcessExitedException as error:
        return int(error.exit_code) if error.exit_code > 0 else int(Exit.BUG)
    return 0


def _one(number: int, count: int, port: int, work: Callable[[Sequence[str]], int], arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update({SPLIT: str(count), "RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_RANK": str(number)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(number)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", rank=number, world_size=count)
    if number == 0:
        code = work(arguments)
    else:  # what all would say is said once; a failure is said by whoever has it
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = work(arguments)
        if code and code not in {Exit.INTERRUPTED, Exit.TERMINATED}:
            time.sleep(GRACE)  # process 0 mostly fails of the same, and then ends this one
            print(said.getvalue(), file=sys.stderr, flush=True)
    if code:
        os._exit(code)  # the others wait in a collective call, so nothing can be ended in common
    dist.destroy_process_group()


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def split(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Keep this process's part of a model that lies on the CPU, moved to the group's device.

    `from_pretrained` would split while it reads, but only with a package that nothing else here needs; so each process
    holds the whole model in host memory for a moment.

    Raises:
        Failure: Exit.USAGE, when there is no process group; Exit.INPUT, when transformers cannot split this model.
    """
    if not dist.is_initialized():
        hint = "with `--split 2`, `nox -s data -- features` starts two"
        raise Failure(Exit.USAGE, f"the target `{name}` is to be split over processes, but there is one", hint=hint)
    size = dist.get_world_size()
    ragged = uneven(model.config, size)
    if ragged:
        message = f"the target `{name}` cannot be split {size} ways: {', '.join(ragged)}"
        raise Failure(Exit.INPUT, message, hint="`--split` must divide each of them")
    kind: Any = type(model)
    untyped: Any = model
    output = untyped.get_output_embeddings()
    if output is not None and output.weight is untyped.get_input_embeddings().weight:
        # the plan splits the two apart, each in its own way
        output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=False)
    try:
        plan, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=size), device_map=None)
        made: PreTrainedModel = kind.maybe_distribute_model(model, plan, mesh)
    except (ValueError, RuntimeError, NotImplementedError, KeyError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Failure(Exit.INPUT, f"transformers cannot split the target `{name}` {size} ways: {said}") from None
    return made


def uneven(config: PretrainedConfig, size: int) -> list[str]:
    """The numbers of a model that cannot be shared equally by so many processes, as `name is value`.

    transformers' plans cut the projections anyway, and the first pass then fails in a reshape.
    """
    text = config.get_text_config()
    counts = {name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return [f"{name} is {count}" for name, count in counts.items() if isinstance(count, int) and count % size]


def whole(tensor: Tensor) -> Tensor:
    """A weight's full value, also where this process holds a part; then all processes must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
