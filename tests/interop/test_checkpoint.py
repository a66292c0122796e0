from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dflash import config, export, mask
from dflash.decode import greedy, speculate
from dflash.model import Drafter
from dflash.proposers import Drafting

pytestmark = pytest.mark.interop

BLOCK, NEW, KNOWN = 8, 72, 37
SIZES = config.Drafter(
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=60,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    mask_token_id=59,
    target_layers=3,
    target_layer_ids=(0, 1),
)
TINY = config.load("tiny")
SETTINGS = replace(TINY, drafter=SIZES, shapes=replace(TINY.shapes, block=BLOCK, anchors=48))


def random_target() -> PreTrainedModel:
    """A target with clear preferences, whose greedy text is soon repetitive enough to be learnt by heart."""
    torch.manual_seed(7)
    shape: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.3}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **sizes, eos_token_id=None, pad_token_id=None))
    model.train(False)
    return model


def trained_drafter(target: Any, texts: torch.Tensor) -> Drafter:
    """A drafter that has learnt the texts (R, T) by heart in part: right often, wrong often."""
    with torch.no_grad():
        states = target(texts, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1] for layer in SIZES.target_layer_ids], -1)
    anchors = torch.arange(4, texts.shape[1] - BLOCK).expand(len(texts), -1)
    places = anchors.unsqueeze(-1) + torch.arange(BLOCK)
    labels = texts.unsqueeze(1).expand(-1, anchors.shape[1], -1).gather(2, places)
    block = torch.full_like(labels, SIZES.mask_token_id)
    block[..., 0] = labels[..., 0]
    seen = mask.dense(anchors, torch.zeros_like(anchors), sequence=texts.shape[1], block=BLOCK)
    embedded = target.get_input_embeddings()(block.flatten(1)).detach()
    drafter = Drafter(SIZES)
    drafter.initialise(1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(14):
        logits = target.lm_head(drafter(embedded, places.flatten(1), features, seen)).view(*labels.shape, -1)
        loss = F.cross_entropy(logits[:, :, 1:].flatten(0, 2), labels[:, :, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks() -> dict[str, torch.Tensor]:
    """Features (2, KNOWN, K*H), an embedded block (2, B, H) and the positions of both, (2, KNOWN + B)."""
    generator = torch.Generator().manual_seed(3)
    return {
        "features": torch.randn(2, KNOWN, 2 * 64, generator=generator),
        "embedded": torch.randn(2, BLOCK, 64, generator=generator),
        "positions": torch.arange(KNOWN + BLOCK).repeat(2, 1),
    }


def ask(script: str, peers: Path, *arguments: object) -> None:
    """Run a script with the peers' packages first on its path and check what it says of the drafter it loaded."""
    done = subprocess.run(
        # -P keeps the script's own folder off the path
        [sys.executable, "-P", str(Path(__file__).with_name(script)), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(peers), "OMP_NUM_THREADS": "1"},
        cwd=peers,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert Path(said["package"]).is_relative_to(peers)
    assert not any(said["loaded"].values()), said["loaded"]
    assert (said["block"], said["mask"], said["layers"]) == (BLOCK, SIZES.mask_token_id, [0, 1])


def our_hidden(drafter: Drafter, given: dict[str, torch.Tensor]) -> torch.Tensor:
    context = drafter.context(given["features"], given["positions"][:, :KNOWN])
    return drafter.draft(given["embedded"], given["positions"][:, KNOWN:], context)


def test_z_labs_own_program_loads_an_export_and_decodes_with_it_as_we_do(peers: Path, tmp_path: Path) -> None:
    target: Any = random_target()
    prompts = torch.randint(0, 59, (4, 12), generator=torch.Generator().manual_seed(2))
    references = greedy(target, prompts.tolist(), NEW)
    texts = torch.cat((prompts, torch.tensor([reference.tokens for reference in references])), 1)
    drafter = trained_drafter(target, texts)
    target.save_pretrained(tmp_path / "target")
    export.write(tmp_path / "drafter", drafter, SETTINGS)
    given = blocks()
    more = {"prompts": prompts, "new_tokens": torch.tensor(NEW)}
    safetensors.torch.save_file({**given, **more}, tmp_path / "given")
    ask("zlab.py", peers, *(tmp_path / name for name in ("drafter", "target", "given", "found")))
    found = safetensors.torch.load_file(tmp_path / "found")
    torch.testing.assert_close(found["hidden"], our_hidden(drafter, given), atol=2e-5, rtol=1e-5)

    responses = speculate(target, Drafting(drafter, target, BLOCK), prompts.tolist(), NEW)
    compared: list[int] = []
    for row, response in enumerate(responses):
        assert found[f"tokens.{row}"].tolist() == list(response.tokens)
        theirs = found[f"kept.{row}"].tolist()
        # near the end of a response z-lab drafts a shorter block, which is another question to the drafter
        place, whole = 1, 0
        while whole < len(response.kept) and place + BLOCK <= NEW:
            place += response.kept[whole]
            whole += 1
        assert theirs[:whole] == list(response.kept[:whole])
        compared += response.kept[:whole]
    assert len(compared) > 20
    assert len(set(compared)) >= 4, "cycles that keep one token only would prove little"


def test_spec_forges_model_class_loads_an_export_and_computes_what_we_do(peers: Path, tmp_path: Path) -> None:
    drafter = Drafter(SIZES).requires_grad_(False)
    drafter.initialise(1)
    export.write(tmp_path / "drafter", drafter, SETTINGS)
    given = blocks()
    safetensors.torch.save_file(given, tmp_path / "given")
    ask("specforge.py", peers, peers, *(tmp_path / name for name in ("drafter", "given", "found")))
    found = safetensors.torch.load_file(tmp_path / "found")
    torch.testing.assert_close(found["hidden"], our_hidden(drafter, given), atol=2e-5, rtol=1e-5)
