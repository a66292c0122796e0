"""A target split over two processes that talk over Gloo, started by torchrun as on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chatting
import pytest
import torch
import transformers

from dflash import small_target, target, tensor_parallel
from env.errors import Exit, Failure

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from dflash import target
from env.errors import Failure
torch.set_num_threads(1)
dist.init_process_group("gloo")
folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    found = target.load(str(folder / name), device=torch.device("cpu"), dtype=torch.float32, split=True)
    tokens = torch.arange(128).reshape(2, 64)
    document = torch.tensor([[0] * 20 + [1] * 44, [0] * 63 + [-1]], dtype=torch.int32)
    parts = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in found.model.parameters())
    save_file(
        {
            "features": target.features(found, tokens, document, (0, 2)),
            "embedding": target.embedding(found).clone(),
            "head": target.head(found).clone(),
            "held": torch.tensor(sum(part.numel() for part in parts)),
        },
        folder / f"{name}-{dist.get_rank()}.safetensors",
        metadata={"digest": target.digest(found)},
    )
try:
    target.load(str(folder / "gpt2"), device=torch.device("cpu"), dtype=torch.float32, split=True)
except Failure as failure:
    (folder / f"refused-{dist.get_rank()}").write_text(failure.message)
dist.destroy_process_group()
"""


def llama(place: Path) -> None:
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    maker: Any = transformers.LlamaForCausalLM
    shape: Any = transformers.LlamaConfig
    made = maker(shape(vocab_size=272, hidden_size=32, intermediate_size=48, tie_word_embeddings=True, **sizes))
    with target.quiet():
        made.save_pretrained(place)
        small_target.tokenizer().save_pretrained(place)


def test_a_target_that_is_split_over_two_processes_gives_the_features_of_the_whole(tmp_path: Path) -> None:
    chatting.folder(tmp_path / "qwen3", num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    llama(tmp_path / "llama")
    maker: Any = transformers.GPT2LMHeadModel
    with target.quiet():
        maker(transformers.GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
            tmp_path / "gpt2"
        )
        small_target.tokenizer().save_pretrained(tmp_path / "gpt2")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "program.py"), str(tmp_path), "qwen3", "llama"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    from safetensors import safe_open

    for name in ("qwen3", "llama"):
        whole = target.load(str(tmp_path / name), device=torch.device("cpu"), dtype=torch.float32)
        tokens = torch.arange(128).reshape(2, 64)
        document = torch.tensor([[0] * 20 + [1] * 44, [0] * 63 + [-1]], dtype=torch.int32)
        wanted = target.features(whole, tokens, document, (0, 2))
        everything = sum(weight.numel() for weight in whole.model.parameters())
        for rank in range(2):
            with safe_open(tmp_path / f"{name}-{rank}.safetensors", framework="pt") as found:
                # another order of sums: the halves of each product are added at the end
                torch.testing.assert_close(found.get_tensor("features"), wanted, rtol=1e-4, atol=1e-4)
                assert torch.equal(found.get_tensor("embedding"), target.embedding(whole))
                assert torch.equal(found.get_tensor("head"), target.head(whole))
                assert int(found.get_tensor("held")) < 0.75 * everything
                assert found.metadata()["digest"] == target.digest(whole)
    assert (tmp_path / "refused-1").read_text().startswith("transformers cannot split the target")


def test_a_target_cannot_be_split_over_one_process() -> None:
    with pytest.raises(Failure, match="is to be split over processes, but there is one") as caught:
        tensor_parallel.split(chatting.model(), "tiny")
    assert caught.value.code is Exit.USAGE


def test_heads_that_cannot_be_shared_equally_are_named() -> None:
    shape = transformers.Qwen3Config(num_attention_heads=32, num_key_value_heads=8)
    assert tensor_parallel.uneven(shape, 3) == ["num_attention_heads is 32", "num_key_value_heads is 8"]
    assert tensor_parallel.uneven(shape, 16) == ["num_key_value_heads is 8"]
    assert tensor_parallel.uneven(shape, 8) == []
