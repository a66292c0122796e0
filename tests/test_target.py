from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dflash import config, small_target, target
from env.errors import Exit, Failure

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SHAPES: dict[str, transformers.PreTrainedConfig] = {
    "qwen3": transformers.Qwen3Config(head_dim=8, **SIZES),
    "qwen3-tied": transformers.Qwen3Config(head_dim=8, tie_word_embeddings=True, **SIZES),
    "llama": transformers.LlamaConfig(bos_token_id=None, eos_token_id=None, **SIZES),
    "mistral-sliding": transformers.MistralConfig(sliding_window=5, bos_token_id=None, eos_token_id=None, **SIZES),
    "qwen3-sliding": transformers.Qwen3Config(
        head_dim=8, layer_types=SLIDING, use_sliding_window=True, sliding_window=5, **SIZES
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=272, n_embd=32, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    ),
    "gpt-neox": transformers.GPTNeoXConfig(bos_token_id=None, eos_token_id=None, **SIZES),
    "gemma2": transformers.Gemma2Config(head_dim=8, layer_types=SLIDING, sliding_window=5, **SIZES),
    "gemma3": transformers.Gemma3TextConfig(head_dim=8, layer_types=SLIDING, sliding_window=5, **SIZES),
    "mixtral": transformers.MixtralConfig(num_local_experts=4, bos_token_id=None, eos_token_id=None, **SIZES),
    "qwen3-next": transformers.Qwen3NextConfig(head_dim=8, **RECURRENT, **SIZES),
}
DOCUMENT = torch.tensor([[0] * 20 + [1] + [2] * 19 + [3] * 8 + [-1] * 16, [0] * 64], dtype=torch.int32)


def model(kind: str, **options: Any) -> Any:
    """A random model; untyped, as half of transformers is."""
    torch.manual_seed(5)
    maker: Any = transformers.AutoModelForCausalLM
    return maker.from_config(copy.deepcopy(SHAPES[kind]), **options).eval()


def wrapped(made: Any) -> target.Target:
    return target.Target(
        model=made, tokenizer=small_target.tokenizer(), name="tiny", packs=target.keeps_documents_apart(made)
    )


def write(folder: Path, kind: str = "qwen3") -> Path:
    with target.quiet():
        model(kind).save_pretrained(folder)
        small_target.tokenizer().save_pretrained(folder)
    return folder


def some_tokens(rows: int = 2, length: int = 64) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def refusal(name: str | Path) -> Failure:
    with pytest.raises(Failure) as caught:
        target.load(str(name), device=CPU, dtype=torch.float32)
    assert "\n" not in caught.value.message
    return caught.value


def drafter(**changes: Any) -> config.Drafter:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 272,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "mask_token_id": 257,
        "target_layers": 4,
        "target_layer_ids": (0, 2),
    }
    return config.Drafter(**(sizes | changes))


@pytest.mark.parametrize("kind", SHAPES)
def test_features_are_the_outputs_of_the_tapped_layers(kind: str) -> None:
    """Id j is `hidden_states[j + 1]`: the first of these is the embedding."""
    made = model(kind)
    tokens = some_tokens()
    states = made(input_ids=tokens, output_hidden_states=True).hidden_states
    found = target.features(wrapped(made), tokens, None, (0, 2))
    assert torch.equal(found, torch.cat((states[1], states[3]), dim=-1))


def test_the_last_layers_features_are_taken_before_the_final_norm() -> None:
    made = model("qwen3")
    tokens = some_tokens()
    found = target.features(wrapped(made), tokens, None, (3,))
    assert not torch.allclose(found, made(input_ids=tokens, output_hidden_states=True).hidden_states[4], atol=0.1)
    assert torch.equal(made.model.norm(found), made(input_ids=tokens, output_hidden_states=True).hidden_states[4])


def test_nothing_above_the_last_tapped_layer_is_computed() -> None:
    made = model("qwen3")
    ran: list[int] = []
    for number, layer in enumerate(target.decoder_layers(made)):
        layer.register_forward_pre_hook(lambda _module, _inputs, number=number: ran.append(number))
    made.model.norm.register_forward_pre_hook(lambda _module, _inputs: ran.append(99))
    packed = wrapped(made)
    ran.clear()
    found = target.features(packed, some_tokens(), None, (0, 1))
    assert ran == [0, 1]
    assert not found.requires_grad
    # No hook of ours stays behind, so the whole model still runs.
    assert made(input_ids=some_tokens()).logits.shape == (2, 64, 272)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("qwen3", "sdpa"),
        ("qwen3", "eager"),
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("mistral-sliding", "sdpa"),
        ("qwen3-sliding", "sdpa"),
        ("gpt2", "sdpa"),
        ("gpt-neox", "sdpa"),
        ("gemma2", "eager"),
        ("gemma3", "sdpa"),
        ("mixtral", "sdpa"),
    ],
)
def test_a_packed_document_comes_out_as_if_it_were_alone(kind: str, attention: str) -> None:
    made = model(kind, attn_implementation=attention)
    whole = wrapped(made)
    # how an expert's products are rounded depends on how many tokens it got; where it shows, documents run one by one
    assert whole.packs or kind == "mixtral"
    check_alone(whole)


def test_a_recurrent_target_which_would_leak_through_its_state_is_run_document_by_document() -> None:
    whole = wrapped(model("qwen3-next"))
    assert not whole.packs
    check_alone(whole)


def check_alone(whole: target.Target) -> None:
    tokens = some_tokens()
    found = target.features(whole, tokens, DOCUMENT, (0, 1, 3))
    assert found.shape == (2, 64, 96)
    for row in range(2):
        for number in set(DOCUMENT[row].tolist()):
            places = DOCUMENT[row] == number
            alone = target.features(whole, tokens[row, places][None], None, (0, 1, 3))
            torch.testing.assert_close(found[row, places][None], alone, rtol=1e-4, atol=1e-5)


def test_another_documents_tokens_change_nothing_at_all() -> None:
    whole = wrapped(model("qwen3"))
    tokens = some_tokens()
    changed = torch.where(DOCUMENT == 2, tokens, (tokens + 1) % 256)
    before, after = (target.features(whole, each, DOCUMENT, (0, 3)) for each in (tokens, changed))
    assert torch.equal(before[DOCUMENT == 2], after[DOCUMENT == 2])
    assert not torch.equal(before[DOCUMENT == 1], after[DOCUMENT == 1])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral-sliding", "gpt2", "gpt-neox", "gemma3"])
def test_a_packed_document_of_a_bfloat16_target_comes_out_as_if_it_were_alone_within_its_rounding(kind: str) -> None:
    """A bfloat16 number has 8 bits, so each of the few roundings on the way moves a value by up to 0.4 %."""
    whole = wrapped(model(kind).to(torch.bfloat16))
    assert whole.packs
    tokens = some_tokens()
    found = target.features(whole, tokens, DOCUMENT, (0, 1, 3))
    assert found.dtype == torch.bfloat16
    for number in range(4):
        places = DOCUMENT[0] == number
        alone = target.features(whole, tokens[0, places][None], None, (0, 1, 3))
        difference = (found[0, places][None] - alone).float().norm() / alone.float().norm()
        assert difference < 0.01


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_a_folder_is_loaded_frozen_with_its_tables_and_without_a_sound(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, kind)
    capfd.readouterr()
    found = target.load(str(tmp_path), device=CPU, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")
    assert not any(weight.requires_grad for weight in found.model.parameters())
    assert not found.model.training
    assert found.packs
    original = model(kind)
    assert torch.equal(target.embedding(found), original.get_input_embeddings().weight)
    assert torch.equal(target.head(found), original.lm_head.weight)
    assert torch.equal(target.head(found), target.embedding(found)) == (kind == "qwen3-tied")
    assert target.describe(found) == target.Facts(hidden_size=32, vocab_size=272, target_layers=4, rope_theta=10000.0)
    assert target.load(str(tmp_path), device=CPU, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_an_embedding_that_scales_is_given_as_it_is_looked_up() -> None:
    shape = transformers.Gemma3TextConfig(head_dim=8, layer_types=SLIDING, sliding_window=5, **SIZES)
    maker: Any = transformers.Gemma3ForCausalLM
    made = maker(shape).eval()
    whole = wrapped(made)
    assert whole.packs
    assert torch.equal(target.embedding(whole), made.model.embed_tokens(torch.arange(272)))
    assert not torch.equal(target.embedding(whole), made.model.embed_tokens.weight)


def test_text_becomes_tokens_even_where_it_spells_a_special_one() -> None:
    whole = wrapped(model("qwen3"))
    assert bytes(target.encode(whole, "é<|mask|>").tolist()).decode() == "é<|mask|>"
    long = "x" * 10_000
    assert len(target.encode(whole, long)) == 10_000


def test_stop_tokens_are_those_of_the_model_and_of_the_tokenizer() -> None:
    made = model("qwen3")
    made.generation_config.eos_token_id = [7, 9]
    assert target.stop_tokens(wrapped(made)) == {7, 9, 256}
    made.generation_config.eos_token_id = None
    assert target.stop_tokens(wrapped(made)) == {256}


def test_a_drafter_that_agrees_with_its_target_is_accepted() -> None:
    target.check(wrapped(model("qwen3")), drafter())
    # GPT-2 has no rotary embedding that a drafter's could contradict.
    target.check(wrapped(model("gpt2")), drafter(rope_theta=5.0))


def test_every_size_that_differs_is_named_with_both_values() -> None:
    wanted = drafter(hidden_size=64, target_layers=5, rope_theta=1e6, vocab_size=300)
    with pytest.raises(Failure) as caught:
        target.check(wrapped(model("qwen3")), wanted)
    assert caught.value.code is Exit.INPUT
    assert [line.split() for line in caught.value.details] == [
        ["hidden_size", "target", "32", "configured", "64"],
        ["vocab_size", "target", "272", "configured", "300"],
        ["target_layers", "target", "4", "configured", "5"],
        ["rope_theta", "target", "10000.0", "configured", "1000000.0"],
    ]


@pytest.mark.parametrize(("token", "what"), [(256, "eos_token"), (258, "pad_token"), (7, "end of text 7")])
def test_a_mask_token_that_means_something_else_is_refused(token: int, what: str) -> None:
    made = model("qwen3")
    made.generation_config.eos_token_id = 7
    with pytest.raises(Failure, match=f"is the {what} of"):
        target.check(wrapped(made), drafter(mask_token_id=token))


def test_a_head_with_a_bias_is_refused() -> None:
    made = model("qwen3")
    made.lm_head = torch.nn.Linear(32, 272)
    with pytest.raises(Failure, match="has a bias"):
        target.check(wrapped(made), drafter())


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    made = model("qwen3")
    made.config.num_hidden_layers = 3
    with pytest.raises(Failure, match="no list of 3 decoder layers"):
        target.decoder_layers(made)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).message.endswith("holds no model: it has no config.json")
    for content in ("{", "[]", "{}", '{"model_type": "no such thing"}', '{"model_type": "vit"}'):
        (tmp_path / "config.json").write_text(content)
        failure = refusal(tmp_path)
        assert failure.code is Exit.INPUT
        assert "holds no usable model: " in failure.message
    assert refusal(tmp_path / "none").message.endswith("does not exist")


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    write(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    assert "holds no usable model" in refusal(tmp_path).message
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_or_with_broken_ones_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:100], b""):
        weights.write_bytes(content)
        assert "holds no usable model" in refusal(tmp_path).message
    weights.unlink()
    assert "holds no usable model" in refusal(tmp_path).message


def test_a_folder_that_lacks_some_weights_is_refused_instead_of_drawing_them(tmp_path: Path) -> None:
    write(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["num_hidden_layers"] = 5
    settings["layer_types"] = ["full_attention"] * 5
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "lacks 11 of its weights, `model.layers.4." in refusal(tmp_path).message


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with target.quiet():
        for kind in ("qwen3", "llama"):
            model(kind).save_pretrained(tmp_path / kind)
            assert "has no usable tokenizer" in refusal(tmp_path / kind).message


def test_a_tokenizer_with_more_tokens_than_the_table_has_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    more = small_target.tokenizer()
    more.add_tokens(["<one more>"])
    more.save_pretrained(tmp_path)
    assert refusal(tmp_path).message.endswith("has 272 rows in its table, its tokenizer 273 tokens")


def test_a_hub_name_that_cannot_be_looked_up_is_one_sentence() -> None:
    command = """
import sys, torch
from dflash import target
from env.errors import Failure, report
try:
    target.load("nobody/no-such-model", device=torch.device("cpu"), dtype=torch.float32)
except Failure as failure:
    sys.exit(report(failure))
"""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", command], env=offline, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.UNREACHABLE
    assert done.stderr.splitlines()[0] == (
        "error: the target `nobody/no-such-model` is no folder, and the hub cannot be reached to look for it there"
    )
    assert len(done.stderr.splitlines()) == 2


def test_quiet_puts_back_what_it_silenced() -> None:
    noise: Any = transformers.logging
    before = noise.get_verbosity(), noise.is_progress_bar_enabled(), logging.getLogger("huggingface_hub").level
    with target.quiet():
        assert noise.get_verbosity() == logging.ERROR
        assert not noise.is_progress_bar_enabled()
    after = noise.get_verbosity(), noise.is_progress_bar_enabled(), logging.getLogger("huggingface_hub").level
    assert before == after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_document_comes_out_as_if_it_were_alone_on_a_gpu(dtype: torch.dtype) -> None:
    whole = wrapped(model("qwen3").to("cuda", dtype))
    assert whole.packs
    tokens, document = some_tokens().cuda(), DOCUMENT.cuda()
    found = target.features(whole, tokens, document, (0, 3))
    alone = target.features(whole, tokens[:1, 21:40], None, (0, 3))
    near = 1e-3 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found[:1, 21:40], alone, rtol=near, atol=near)
