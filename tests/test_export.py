from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash import config, export, storage
from dflash.model import Drafter
from env.errors import Exit, Failure

ROOT = Path(__file__).parents[1]
TINY = config.load("tiny")


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return lively(TINY.drafter)


def lively(sizes: config.Drafter) -> Drafter:
    """A drafter no part of which is neutral: norms away from one, products that matter."""
    drafter = Drafter(sizes)
    drafter.initialise(3)
    generator = torch.Generator().manual_seed(4)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data * 5 if parameter.ndim == 2 else 1 + 0.3 * noise
    return drafter.requires_grad_(False)


@pytest.fixture
def exported(drafter: Drafter, tmp_path: Path) -> Path:
    export.write(tmp_path / "export", drafter, TINY)
    return tmp_path / "export"


def test_what_was_written_is_read_back_to_the_last_bit(drafter: Drafter, exported: Path) -> None:
    back = export.read(exported)
    assert (back.sizes, back.block) == (TINY.drafter, 16)
    assert back.drafter.state_dict().keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(back.drafter.state_dict()[name], value), name
    assert all(parameter.requires_grad for parameter in back.drafter.parameters())


def test_the_files_hold_what_z_labs_layout_names_and_nothing_else(exported: Path) -> None:
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
    layer = [
        "input_layernorm",
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "post_attention_layernorm",
        *(f"self_attn.{name}" for name in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")),
    ]
    names = [f"layers.{i}.{name}.weight" for i in range(2) for name in layer]
    with safetensors.safe_open(exported / "model.safetensors", "pt") as weights:
        assert sorted(weights.keys()) == sorted([*names, "fc.weight", "hidden_norm.weight", "norm.weight"])
        assert weights.get_tensor("fc.weight").shape == (256, 3 * 256)
        assert weights.metadata() == {"format": "pt"}
    content = json.loads((exported / "config.json").read_text())
    assert content["architectures"] == ["DFlashDraftModel"]
    assert content["model_type"] == "qwen3"
    assert content["dflash_config"] == {"block_size": 16, "mask_token_id": 257, "target_layer_ids": [0, 1, 2]}
    assert (content["block_size"], content["num_target_layers"], content["num_hidden_layers"]) == (16, 4, 2)


def test_transformers_understands_the_configuration_as_it_is_meant(exported: Path) -> None:
    read = AutoConfig.from_pretrained(exported)
    assert read.rope_parameters["rope_theta"] == TINY.drafter.rope_theta
    assert read.rope_parameters["rope_type"] == "default"
    assert (read.head_dim, read.num_key_value_heads, read.rms_norm_eps) == (64, 2, 1e-6)
    assert read.layer_types == ["full_attention"] * 2
    assert read.dtype == torch.float32
    assert read.dflash_config["target_layer_ids"] == [0, 1, 2]


def test_the_same_weights_give_the_same_bytes_and_others_do_not(drafter: Drafter, tmp_path: Path) -> None:
    first = export.write(tmp_path / "a", drafter, TINY)
    again = export.write(tmp_path / "b", drafter, TINY)
    other = export.write(tmp_path / "c", export.read(tmp_path / "a").drafter.double().float(), TINY)
    assert first == again == other == storage.sha256(tmp_path / "a" / "model.safetensors")
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    changed = export.read(tmp_path / "a").drafter.requires_grad_(False)
    changed.norm.weight[0] += 1e-3
    assert export.write(tmp_path / "d", changed, TINY) != first


def test_weights_are_stored_in_the_dtype_that_training_computed_in(drafter: Drafter, tmp_path: Path) -> None:
    half = replace(TINY, precision=config.Precision(compute="bfloat16"))
    export.write(tmp_path / "export", drafter, half)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    stored = safetensors.torch.load_file(tmp_path / "export" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    features, embedded = inputs(torch.bfloat16)
    back = export.read(tmp_path / "export").drafter
    assert torch.equal(draft(back, features, embedded), draft(drafter, features, embedded))


def test_longest_is_the_length_of_training_unless_given(drafter: Drafter, tmp_path: Path) -> None:
    for longest, expected in ((None, TINY.shapes.sequence), (40960, 40960)):
        export.write(tmp_path / "export", drafter, TINY, longest=longest)
        assert json.loads((tmp_path / "export" / "config.json").read_text())["max_position_embeddings"] == expected


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features (2, 37, K*H) and an embedded block (2, 16, H)."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 37, 3 * 256, generator=generator)
    return features.to(dtype), torch.randn(2, 16, 256, generator=generator).to(dtype)


def draft(drafter: Drafter, features: Tensor, embedded: Tensor) -> Tensor:
    places = torch.arange(features.shape[1] + embedded.shape[1]).expand(len(features), -1)
    known = features.shape[1]
    with torch.no_grad():
        return drafter.draft(embedded, places[:, known:], drafter.context(features, places[:, :known]))


def test_a_forward_pass_of_transformers_own_qwen3_parts_over_the_exported_files_is_ours(
    drafter: Drafter, exported: Path
) -> None:
    """The architecture once more, from its description, with none of our modules: norms, MLP and rotary embedding are
    transformers'; attention is written out as a softmax."""
    read: Any = AutoConfig.from_pretrained(exported)
    weights = safetensors.torch.load_file(exported / "model.safetensors")
    features, embedded = inputs()
    known, block = features.shape[1], embedded.shape[1]

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=read.rms_norm_eps)
        module.load_state_dict({"weight": weights[f"{name}.weight"]})
        out: Tensor = module(x)
        return out

    def heads(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"]).view(*x.shape[:2], -1, read.head_dim)

    places = torch.arange(known + block).unsqueeze(0)
    cosine, sine = Qwen3RotaryEmbedding(read)(embedded, places)
    fused = norm("hidden_norm", F.linear(features, weights["fc.weight"]))
    x = embedded
    for i in range(read.num_hidden_layers):
        here = f"layers.{i}"
        normed = norm(f"{here}.input_layernorm", x)
        both = torch.cat((fused, normed), 1)
        keys = norm(f"{here}.self_attn.k_norm", heads(f"{here}.self_attn.k_proj", both)).transpose(1, 2)
        values = heads(f"{here}.self_attn.v_proj", both).transpose(1, 2)
        queries = norm(f"{here}.self_attn.q_norm", heads(f"{here}.self_attn.q_proj", normed)).transpose(1, 2)
        # a query for every place, so that the library's function, which turns both alike, can be used as it is
        padded = F.pad(queries, (0, 0, known, 0))
        padded, keys = apply_rotary_pos_emb(padded, keys.repeat_interleave(2, 1), cosine, sine)
        scores = padded[:, :, known:] @ keys.transpose(2, 3) / read.head_dim**0.5
        seen = scores.softmax(-1) @ values.repeat_interleave(2, 1)
        x = x + F.linear(seen.transpose(1, 2).flatten(2), weights[f"{here}.self_attn.o_proj.weight"])
        mlp = Qwen3MLP(read)  # type: ignore[no-untyped-call]
        mlp.load_state_dict({name: weights[f"{here}.mlp.{name}"] for name in mlp.state_dict()})
        x = x + mlp(norm(f"{here}.post_attention_layernorm", x))
    expected = norm("norm", x)
    assert expected.std() > 0.5
    torch.testing.assert_close(draft(drafter, features, embedded), expected.detach(), atol=2e-5, rtol=1e-5)


def change(folder: Path, **keys: Any) -> None:
    """Set keys of config.json; a dot reaches into dflash_config, None removes."""
    content = json.loads((folder / "config.json").read_text())
    for name, value in keys.items():
        table = content["dflash_config"] if name.startswith("dflash_") and name != "dflash_config" else content
        key = name.removeprefix("dflash_") if table is not content else name
        if value is None:
            del table[key]
        else:
            table[key] = value
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "keys",
    [{"block_size": None}, {"dflash_block_size": None}, {"block_size": 16, "dflash_block_size": 16}],
    ids=["only inside", "only at the top", "both"],
)
def test_the_block_size_is_read_wherever_it_stands(keys: dict[str, Any], exported: Path) -> None:
    change(exported, **keys)
    assert export.read(exported).block == 16


def test_what_other_versions_of_the_layout_write_is_read_too(exported: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    change(exported, rope_theta=None, rope_parameters=parameters, num_target_layers=None, dflash_num_target_layers=4)
    change(exported, layer_types=None, dflash_causal=False)
    assert export.read(exported).sizes == TINY.drafter


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, 'is for ["Qwen3ForCausalLM"], not for a DFlash drafter'),
        ({"architectures": None}, "is for null, not for a DFlash drafter"),
        ({"hidden_size": None}, "lacks the key `hidden_size`"),
        ({"hidden_size": "256"}, 'has "256" as `hidden_size`'),
        ({"hidden_size": True}, "has true as `hidden_size`"),
        ({"head_dim": 63}, "cannot be a drafter's: head_dim is 63, must be even"),
        ({"hidden_act": "gelu"}, 'has "gelu" as `hidden_act`; only "silu" is supported'),
        ({"rope_scaling": {"factor": 2.0}}, 'has {"factor": 2.0} as `rope_scaling`; only null is supported'),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only 2 of full_attention are supported"),
        ({"dflash_config": None}, "lacks the key `dflash_config`"),
        ({"dflash_mask_token_id": None}, "lacks the key `mask_token_id`"),
        ({"dflash_target_layer_ids": [0, "1"]}, 'has [0, "1"] as `target_layer_ids`'),
        ({"dflash_target_layer_ids": [0, 4]}, "must lie in 0 to 3"),
        ({"dflash_projector_type": "domino"}, 'has `projector_type` = "domino" in `dflash_config`'),
        ({"block_size": 8}, "names two block sizes: 8 and 16"),
        ({"block_size": None, "dflash_block_size": None}, "lacks the key `block_size`"),
        ({"rope_theta": None}, "lacks the key `rope_parameters`"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "yarn"}}, "only the default type is supported"),
    ],
)
def test_a_configuration_that_is_no_drafters_is_refused_by_its_key(
    keys: dict[str, Any], said: str, exported: Path
) -> None:
    change(exported, **keys)
    with pytest.raises(Failure) as caught:
        export.read(exported)
    assert caught.value.code is Exit.INPUT
    assert f"`{exported / 'config.json'}`" in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"), [(b"{", "cannot be read"), (b"[]", "holds no table"), (b"\xff\xfe", "cannot be read")]
)
def test_a_config_json_that_is_none_is_refused(content: bytes, said: str, exported: Path) -> None:
    (exported / "config.json").write_bytes(content)
    with pytest.raises(Failure, match=said) as caught:
        export.read(exported)
    assert caught.value.code is Exit.INPUT


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, exported: Path) -> None:
    (exported / name).unlink()
    with pytest.raises(Failure, match=f"the drafter folder `{exported}` has no {name}"):
        export.read(exported)


def test_weights_that_are_cut_short_are_refused(exported: Path) -> None:
    with (exported / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(Failure, match=r"model\.safetensors` cannot be read") as caught:
        export.read(exported)
    assert caught.value.code is Exit.INPUT


def drop(weights: dict[str, Tensor]) -> None:
    del weights["layers.1.self_attn.q_norm.weight"]


def add(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = torch.zeros(272, 256)


def reshape(weights: dict[str, Tensor]) -> None:
    weights["fc.weight"] = torch.zeros(256, 512)


def truncate(weights: dict[str, Tensor]) -> None:
    weights["norm.weight"] = torch.ones(256, dtype=torch.int64)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (drop, "layers.1.self_attn.q_norm.weight  missing"),
        (add, "lm_head.weight  unknown"),
        (reshape, "fc.weight  is (256, 512), must be (256, 768)"),
        (truncate, "norm.weight  holds int64, must hold floating-point numbers"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(
    spoil: Callable[[dict[str, Tensor]], None], said: str, exported: Path
) -> None:
    weights = safetensors.torch.load_file(exported / "model.safetensors")
    spoil(weights)
    safetensors.torch.save_file(weights, exported / "model.safetensors")
    with pytest.raises(Failure) as caught:
        export.read(exported)
    assert caught.value.code is Exit.INPUT
    assert caught.value.details == (said,)


def test_a_configuration_of_absurd_size_is_refused_without_asking_for_its_memory(exported: Path) -> None:
    change(exported, intermediate_size=10**9)
    with pytest.raises(Failure) as caught:
        export.read(exported)
    assert len(caught.value.details) == 6


def test_a_full_disk_leaves_the_old_export_whole_and_nothing_beside_it(exported: Path) -> None:
    """A limit on file size stands for the disk: the write really fails, in a process of its own."""
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    script = f"""
import resource, signal, sys
from pathlib import Path
from dflash import config, export
from dflash.model import Drafter
from env.errors import Failure, report
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    export.write(Path({str(exported)!r}), Drafter(config.load("tiny").drafter), config.load("tiny"))
except Failure as failure:
    sys.exit(report(failure))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.STORAGE, done.stderr
    assert done.stderr.startswith("error: cannot write `export` in ")
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == ["export"]
