"""Each factor that differs is named once, with both values and what mends it; what follows from it is not."""

from __future__ import annotations

from typing import Any

import pytest
from caches import FACTORS, GPU

from env.cache import explain

BASE: dict[str, Any] = {
    "graph_id": "g" * 64,
    "gpu_id": "c" * 64,
    **{f"gpu.{name}": value for name, value in GPU.items()},
    **FACTORS,
    "torch.git": "abc",
    "torch.cuda": "13.0",
    "torch.cache_key_tag": "",
    "torch.default_dtype": "torch.float32",
    "torch.deterministic": False,
    "torch.matmul.fp32_precision": "none",
    "system.cuda": "13.0",
    "triton.key": "bb" * 32,
    "triton.version": "3.6.0",
    "triton.ptxas": "ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 13.0, V13.0.88",
    "functorch.error_on_custom_op_aliasing": False,
    "dynamo.capture_scalar_outputs": False,
    "cpu.command": "g++ i -O3 -ffast-math -march=native -I/a/include -I/b/include -o o.so",
    "cpu.native": "aa",
    "cpu.threads": 2,
}

CASES: dict[str, tuple[Any, str, str]] = {
    # the factor: its other value, what is shown of both, what mends it
    "graph_id": ("h" * 64, "h" * 64, "nox -s bake -- --config NAME"),
    "device.index": (5, "sealed `0`, here `5`", "CUDA_VISIBLE_DEVICES"),
    "python.minor": ("3.12", "sealed `3.11`, here `3.12`", "nox -s train -- --python"),
    "torch.version": ("2.10.0+cu128", "sealed `2.11.0+cu130`, here `2.10.0+cu128`", "nox -s train -- --repair"),
    "torch.key": ("cc" * 32, "cc" * 32, "`nox -s doctor` names them"),
    "torch.cuda": ("12.8", "sealed `13.0`, here `12.8`", "nox -s train -- --variant"),
    "torch.cache_key_tag": ("mine", "here `mine`", "unset TORCH_COMPILE_CACHE_KEY_TAG"),
    "torch.default_dtype": ("torch.bfloat16", "torch.bfloat16", "set_default_dtype"),
    "torch.deterministic": (True, "sealed `false`, here `true`", "use_deterministic_algorithms"),
    "torch.matmul.fp32_precision": ("tf32", "sealed `none`, here `tf32`", "set_float32_matmul_precision"),
    "triton.key": ("dd" * 32, "dd" * 32, "nox -s train -- --repair"),
    "triton.ptxas": (
        "ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 12.8, V12.8.93",
        "sealed `13.0, V13.0.88`, here `12.8, V12.8.93`",
        "TRITON_PTXAS_PATH",
    ),
    "triton.env.TRITON_DISABLE_LINE_INFO": ("true", "here `true`", "`unset TRITON_DISABLE_LINE_INFO`"),
    "inductor.cpp.cxx": ([None, "/usr/bin/g++"], "sealed `g++`, here `/usr/bin/g++`", "`unset CXX`"),
    "inductor.max_autotune": (
        True,
        "sealed `false`, here `true`",
        "something in this process set `torch._inductor.config",
    ),
    "functorch.error_on_custom_op_aliasing": (True, "sealed `false`, here `true`", "`unset CI`"),
    "dynamo.capture_scalar_outputs": (True, "sealed `false`, here `true`", "set `torch._dynamo.config.capture_scalar"),
    "cpu.command": (
        "g++ i -O3 -ffast-math -march=native -I/c/include -I/b/include -o o.so",
        "sealed `-I/a/include`, here `-I/c/include`",
        "nox -s bake",
    ),
    "cpu.native": ("bb", "sealed `aa`, here `bb`", "one instruction set"),
    "cpu.threads": (8, "sealed `2`, here `8`", "OMP_NUM_THREADS"),
}
FEEDING = {
    "inductor.cpp.cxx": ("CXX",),
    "inductor.max_autotune": ("TORCHINDUCTOR_MAX_AUTOTUNE",),
    "functorch.error_on_custom_op_aliasing": ("CI",),
}


@pytest.mark.parametrize("name", CASES)
def test_one_changed_factor_is_named_alone_with_both_values_and_the_mending_command(name: str) -> None:
    other, shown, mend = CASES[name]
    found = explain.differences(BASE, {**BASE, name: other}, variables=FEEDING, environ={"CXX": "x", "CI": "1"})
    assert [difference.name for difference in found] == [name]
    sentence = found[0].sentence()
    assert sentence.startswith(f"{name}: sealed `")
    assert shown in sentence
    assert mend in sentence


def test_a_setting_is_mended_by_its_variable_only_where_that_is_set() -> None:
    here = {**BASE, "inductor.max_autotune": True}
    given = explain.differences(BASE, here, variables=FEEDING, environ={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    assert given[0].mend == "`unset TORCHINDUCTOR_MAX_AUTOTUNE`"
    assert "something in this process" in explain.differences(BASE, here, variables=FEEDING, environ={})[0].mend


def test_a_variable_that_the_bake_had_and_this_process_has_not_is_to_be_set() -> None:
    sealed = {**BASE, "triton.env.USE_IR_LOC": "true"}
    (found,) = explain.differences(sealed, BASE)
    assert "set it likewise" in found.sentence()
    assert "here `(not there)`" in found.sentence()


def test_another_torch_is_one_difference_and_not_hundreds() -> None:
    other = {name: value for name, value in BASE.items() if not name.startswith(("inductor.", "dynamo."))}
    other |= {"torch.version": "2.15.0", "torch.git": "x", "torch.key": "y", "inductor.new": 1, "triton.key": "z"}
    other |= {"triton.version": "3.9.0", "triton.ptxas": "w"}
    assert [difference.name for difference in explain.differences(BASE, other)] == ["torch.version"]


def test_another_python_is_one_difference() -> None:
    other = {**BASE, "python.minor": "3.12", "python.abi": "cpython-312", "torch.key": "y", "triton.key": "z"}
    assert [difference.name for difference in explain.differences(BASE, other)] == ["python.minor"]


def test_another_compiler_is_one_difference() -> None:
    other = {**BASE, "inductor.cpp.cxx": [None, "clang++"], "cpu.command": "clang++ i", "cpu.native": "z"}
    assert [difference.name for difference in explain.differences(BASE, other)] == ["inductor.cpp.cxx"]


def test_another_card_is_named_by_what_differs_in_it_and_not_by_where_its_row_came_from() -> None:
    other = {
        **BASE,
        "gpu_id": "d" * 64,
        "gpu.name": "NVIDIA H100",
        "gpu.source": "a data sheet",
        "system.gpu": "NVIDIA H100",
    }
    found = explain.differences(BASE, other)
    assert [difference.name for difference in found] == ["gpu.name", "system.gpu"]
    assert "nox -s bake -- --config NAME --gpu" in found[0].sentence()


def test_rows_of_one_card_may_differ_in_what_decides_nothing() -> None:
    assert explain.differences(BASE, {**BASE, "gpu.source": "a data sheet", "gpu.total_memory": 1}) == []


def test_causes_come_before_settings() -> None:
    other = {**BASE, "inductor.max_autotune": True, "python.minor": "3.12", "graph_id": "h"}
    names = [difference.name for difference in explain.differences(BASE, other)]
    assert names == ["graph_id", "python.minor", "inductor.max_autotune"]


LINES = (
    "[aa] gm: GraphModule()\n\n\n\ndef forward(self, x):\n    y = x + 1\n    return y",
    "[bb] example_inputs[0]: Metadata(shape=torch.Size([4]))",
    "[cc] inductor_config[max_autotune]: False",
    "[dd] grad_enabled: True",
)


def test_of_two_keys_only_the_fields_that_differ_are_shown_and_of_code_only_the_lines() -> None:
    here = (
        LINES[0].replace("x + 1", "x + 2").replace("[aa]", "[a2]"),
        LINES[1].replace("[4]", "[8]"),
        LINES[2],
        "[ee] new_field: 3",
    )
    assert explain.key_differences(here, LINES) == [
        "gm differs (- sealed, + here):\n  -    y = x + 1\n  +    y = x + 2",
        "example_inputs[0]: sealed `Metadata(shape=torch.Size([4]))`, here `Metadata(shape=torch.Size([8]))`",
        "grad_enabled: sealed `True`, here `(not there)`",
        "new_field: sealed `(not there)`, here `3`",
    ]


def test_the_nearest_key_is_one_of_the_same_cache_with_most_fields_in_common() -> None:
    sealed = {"fnear": LINES[:3], "ffar": LINES[:1], "aother": LINES}
    assert explain.nearest("fnew", LINES, sealed) == "fnear"
    assert explain.nearest("xnew", LINES, sealed) is None


def test_long_values_are_cut() -> None:
    (found,) = explain.differences({"a": "x" * 500}, {"a": "y" * 500})
    assert len(found.sealed) < 250
