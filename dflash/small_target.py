"""A small target, trained in a minute on the text at hand: Qwen3's architecture over bytes, in an ordinary folder."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash import checkpoint, config, storage
from dflash.target import quiet
from dflash.text import Text
from env.errors import Exit, Failure

BYTES = 256
SPECIAL = ("<|endoftext|>", "<|mask|>", "<|pad|>", *(f"<|reserved_{number}|>" for number in range(13)))
"""Tokens 256 to 271: the end of a document, what stands for a token to be drafted, padding, and some in reserve."""
END = BYTES
MASK = BYTES + 1
SUMMARY = "training.json"
"""In the model's folder: how it came about. Without it a folder is somebody else's and is never replaced."""
_EVALUATION_ROWS = 32
# Chosen by trying: 250 steps of 8 x 256 bytes of the shipped text leave 1.56 nats a byte on its held-out part with a
# momentum of 0.95, embeddings drawn like the rest and no decay, 1.51 with the momentum below, 1.45 with all of these.
_MOMENTUM = 0.85
_DECAY = 0.1
_TABLE_SCALE = 5.0
"""How much larger than other weights the embeddings are drawn."""
_ADAMW_SHARE = 0.1
"""AdamW's rate for embeddings, head and norms, as a share of Muon's for the matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A trained small target; the same for the same configuration, text and seed on one machine."""

    key: str
    """Digest of everything that decides the weights: configuration, seed, text."""
    sha256: str
    """Digest of its model.safetensors."""
    parameters: int
    """Weights, embeddings and head included."""
    steps: int
    """Training steps."""
    held_out_loss: float
    """Cross-entropy in nats a byte on the held-out documents."""
    held_out_bytes: int
    """Bytes that this was measured on."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of UTF-8, with `SPECIAL` after them; a byte's token is its value."""
    # Byte-level tokenizers write each byte as a printable character: itself, or one from 256 on (GPT-2's alphabet).
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]
    core = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    made: Any = PreTrainedTokenizerFast  # whose constructor has no types
    whole: PreTrainedTokenizerFast = made(
        tokenizer_object=core,
        eos_token=SPECIAL[0],
        mask_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )
    return whole


def train(
    settings: config.Config,
    text: Text,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    stop: Callable[[], None],
    report: Callable[[dict[str, Any]], None],
) -> Summary:
    """Train a small target on `text` into `folder`, from the newest checkpoint of an earlier try if there is one.

    Matrices are trained by Muon, the rest by AdamW, on windows of the training documents joined by an end of text.
    The number of steps is fixed. Products run in bfloat16 where the processor has instructions for them.

    Args:
        settings: `target` says how to train; width, heads and vocabulary are the drafter's.
        text: what to train on, and what to measure on.
        folder: becomes a folder in transformers' format. Checkpoints stand beside it until it is there; a folder that
            an equal call has made is used as it is.
        seed: decides initial weights and the order of the windows, and nothing else does.
        device: where to train.
        stop: called after each step; what it raises ends the training after a checkpoint.
        report: takes step, loss and lr of each step, numbered from 1. After a restart it begins again after the
            checkpoint's step, so lines from there on are to be dropped.

    Raises:
        Failure: Exit.USAGE, when the configuration's vocabulary cannot be this tokenizer's; Exit.INPUT, when the text
            is too short, or the folder is somebody else's; Exit.TRAINING, when the loss is not finite; Exit.STORAGE,
            when the disk refuses.
    """
    recipe = _recipe(settings)
    key = _key(settings, text, seed)
    made = _made(folder)
    weights = folder / "model.safetensors"
    if made is not None and made.key == key and weights.is_file() and storage.sha256(weights) == made.sha256:
        return made
    stream = join(text.train)
    if len(stream) <= recipe.sequence:
        message = f"the training part of `{text.name}` has {len(stream)} tokens, a sequence needs {recipe.sequence + 1}"
        raise Failure(Exit.INPUT, message)
    model = build(settings, seed)
    nn.Module.to(model, device)
    optimizers = _optimizers(model, recipe)
    # The key in the name: a checkpoint of another configuration is never gone on from.
    places = folder.with_name(f"{folder.name}-training-{key[:12]}")
    begun = checkpoint.resume(places, model, optimizers)
    model.train()
    with _fast_products():
        for step in range(begun, recipe.steps):
            rate = learning_rate(step, recipe)
            windows = batch(stream, recipe.rows, recipe.sequence, seed=seed, step=step).to(device)
            loss = _step(model, optimizers, windows, rate)
            if not math.isfinite(loss):
                raise Failure(
                    Exit.TRAINING,
                    f"the small target's loss is {loss} at step {step + 1}",
                    hint="a lower `target.lr` may help; the newest checkpoint is untouched",
                )
            report({"step": step + 1, "loss": loss, "lr": rate})
            save = (step + 1) % settings.checkpoint.every == 0 and step + 1 < recipe.steps
            try:
                stop()
            except BaseException:
                save = True
                raise
            finally:
                if save:
                    checkpoint.save(places, step + 1, model, optimizers, keep=settings.checkpoint.keep)
    loss, count = held_out_loss(model, text.held_out, recipe.sequence)
    summary = _write(model, folder, key, steps=recipe.steps, loss=loss, count=count)
    shutil.rmtree(places, ignore_errors=True)
    return summary


def build(settings: config.Config, seed: int) -> Qwen3ForCausalLM:
    """A small target with weights drawn from `seed`, in float32 on the CPU.

    The head is a table of its own: a drafter borrows both, and most large targets do not tie them either.
    """
    recipe, drafter = _recipe(settings), settings.drafter
    shape = Qwen3Config(
        vocab_size=drafter.vocab_size,
        hidden_size=drafter.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=drafter.target_layers,
        num_attention_heads=drafter.heads,
        num_key_value_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        rms_norm_eps=drafter.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": drafter.rope_theta},
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=BYTES + 2,
    )
    # transformers draws from the global generator: seeded for these lines, and put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_number("weights", seed))
        model = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(_TABLE_SCALE)
    return model


def join(documents: Sequence[str]) -> Tensor:
    """Documents as one stream of tokens, (T,) int64, an end of text after each."""
    parts = [np.frombuffer(document.encode(), dtype=np.uint8).astype(np.int64) for document in documents]
    return torch.from_numpy(np.concatenate([part for text in parts for part in (text, np.array([END]))]))


def batch(stream: Tensor, rows: int, sequence: int, *, seed: int, step: int) -> Tensor:
    """Windows of a step, (rows, sequence + 1) int64: inputs and, shifted by one, labels.

    Each epoch cuts the stream at another place and takes all windows once, in an order drawn from (seed, epoch).
    """
    count = (len(stream) - 1) // sequence
    windows = []
    for number in range(step * rows, (step + 1) * rows):
        epoch, place = divmod(number, count)
        drawn = torch.Generator().manual_seed(_number("windows", seed, epoch))
        spare = len(stream) - 1 - count * sequence
        shift = int(torch.randint(spare + 1, (), generator=drawn))
        start = shift + int(torch.randperm(count, generator=drawn)[place]) * sequence
        windows.append(stream[start : start + sequence + 1])
    return torch.stack(windows)


def learning_rate(step: int, recipe: config.SmallTarget) -> float:
    """Muon's rate of step 0, 1, ...: a linear rise over the first `warmup` share, then a line down to zero."""
    rise = max(1, round(recipe.steps * recipe.warmup))
    if step < rise:
        return recipe.lr * (step + 1) / rise
    return recipe.lr * (recipe.steps - step) / (recipe.steps - rise + 1)


@torch.no_grad()
def held_out_loss(model: nn.Module, documents: Sequence[str], sequence: int) -> tuple[float, int]:
    """Cross-entropy in nats a byte, and over how many bytes: every byte but the first of each window of a document."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    ignored = -100
    windows = []
    for document in documents:
        tokens = torch.frombuffer(bytearray(document.encode()), dtype=torch.uint8).long()
        windows += [part for part in tokens.split(sequence) if len(part) > 1]
    lost, count = 0.0, 0
    for start in range(0, len(windows), _EVALUATION_ROWS):
        rows = windows[start : start + _EVALUATION_ROWS]
        labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=ignored).to(device)
        logits = model(input_ids=labels[:, :-1].clamp(min=0), use_cache=False).logits.float()
        wanted = labels[:, 1:].flatten()
        lost += F.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=ignored, reduction="sum").item()
        count += int((wanted != ignored).sum())
    model.train(training)
    return lost / max(count, 1), count


def _recipe(settings: config.Config) -> config.SmallTarget:
    recipe, drafter = settings.target, settings.drafter
    if recipe is None:
        raise Failure(
            Exit.USAGE,
            "this configuration has no table [target], so it cannot train a small target of its own",
            hint="`--target FOLDER_OR_NAME` names the model to draft for",
        )
    known = BYTES + len(SPECIAL)
    if drafter.vocab_size < known:
        message = f"drafter.vocab_size is {drafter.vocab_size}, the small target has {known} tokens"
        raise Failure(Exit.USAGE, message)
    if drafter.mask_token_id < MASK or drafter.mask_token_id == MASK + 1:
        message = f"drafter.mask_token_id is {drafter.mask_token_id}, a token that the small target uses"
        raise Failure(Exit.USAGE, message, hint=f"its mask token is {MASK}")
    return recipe


def _optimizers(model: Qwen3ForCausalLM, recipe: config.SmallTarget) -> list[torch.optim.Optimizer]:
    """Muon for what multiplies hidden states; AdamW for norms and for the two tables, whose rows are looked up."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.lr, momentum=_MOMENTUM, weight_decay=_DECAY),
        torch.optim.AdamW(others, lr=recipe.lr * _ADAMW_SHARE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], windows: Tensor, rate: float) -> float:
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    loss.backward()
    for optimizer, share in zip(optimizers, (1.0, _ADAMW_SHARE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@contextmanager
def _fast_products() -> Iterator[None]:
    """Let float32 products use bfloat16 instructions; without effect on processors and GPUs that have none.

    Weights, sums and everything between products stay float32. On a CPU with avx512_bf16 a step takes two thirds of
    the time; asking for bfloat16 outright would be slower than float32 where it has to be emulated.
    """
    before = torch.get_float32_matmul_precision()
    cpu: Any = torch.backends.mkldnn  # whose types leave `matmul` out
    backends = (torch.backends.cuda.matmul, cpu.matmul)
    exact = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        # that leaves "ieee" where "none" was: the same numbers, but another key of every compiled graph
        for backend, precision in zip(backends, exact, strict=True):
            backend.fp32_precision = precision


def _key(settings: config.Config, text: Text, seed: int) -> str:
    tables = config.to_tables(settings)
    # Of the drafter only what `build` takes: another number of its layers needs no other target.
    shared = (
        "vocab_size",
        "hidden_size",
        "target_layers",
        "heads",
        "kv_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
    )
    shape = {name: tables["drafter"][name] for name in shared}
    decisive = {"target": tables["target"], "shape": shape, "text": text.sha256, "seed": seed}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _number(*key: object) -> int:
    """A seed for one purpose, drawn from what it may depend on."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:7], "big")


def _made(folder: Path) -> Summary | None:
    """The summary of a folder that an earlier call has made; None when there is no folder."""
    if not folder.exists():
        return None
    try:
        return Summary(**json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        message = f"`{folder}` is there already and is no small target of ours: it has no readable {SUMMARY}"
        raise Failure(Exit.INPUT, message) from None


def _write(model: Qwen3ForCausalLM, folder: Path, key: str, *, steps: int, loss: float, count: int) -> Summary:
    with storage.new_folder(folder) as beside, quiet():
        model.save_pretrained(beside)
        tokenizer().save_pretrained(beside)
        summary = Summary(
            key=key,
            sha256=storage.sha256(beside / "model.safetensors"),
            parameters=sum(weight.numel() for weight in model.parameters()),
            steps=steps,
            held_out_loss=loss,
            held_out_bytes=count,
        )
        (beside / SUMMARY).write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    return summary
