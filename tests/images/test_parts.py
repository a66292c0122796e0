from __future__ import annotations

import ast
from pathlib import Path

import pytest

from env import drift, variants
from env.closure import ROOTS, closure
from env.parts import PARTS, part_of, split

LOCK = """
# a comment of the whole file
torch==2.11.0 ; python_full_version < '3.14' \\
    --hash=sha256:{0} \\
    --hash=sha256:{1}
    # via -r train.in
nvidia-cublas==13.1 \\
    --hash=sha256:{0}  # via torch
""".format("0" * 64, "1" * 64)


@pytest.mark.parametrize("variant", variants.load().variants.values(), ids=lambda variant: variant.name)
def test_the_parts_of_a_lock_add_up_to_it_exactly(variant: variants.Variant, tmp_path: Path) -> None:
    pins: list[drift.Pin] = []
    for name, text in split(variant.lock.read_text()).items():
        part = tmp_path / name
        part.write_text(text)
        pins += drift.read_lock(part)

    def told(pin: drift.Pin) -> tuple[str, str, str, tuple[str, ...]]:
        return pin.name, pin.version, pin.marker, pin.hashes

    assert sorted(map(told, pins)) == sorted(map(told, drift.read_lock(variant.lock)))


@pytest.mark.parametrize("variant", variants.load().variants.values(), ids=lambda variant: variant.name)
def test_no_part_is_empty_and_torch_lies_above_cuda(variant: variants.Variant) -> None:
    assert all(split(variant.lock.read_text()).values())
    order = list(PARTS)
    assert order.index(part_of("nvidia-nccl-cu13")) < order.index(part_of("torch")) < order.index(part_of("numpy"))
    assert part_of("torchvision") == "rest"


def test_a_comment_moves_no_layer() -> None:
    assert split(LOCK) == split(LOCK.replace("via -r train.in", "via something else").replace("a comment", "another"))


def test_a_changed_pin_changes_its_part_and_no_other() -> None:
    one, other = split(LOCK), split(LOCK.replace("torch==2.11.0", "torch==2.11.1"))
    assert [name for name in PARTS if one[name] != other[name]] == ["torch"]


def test_what_is_no_pin_is_refused() -> None:
    with pytest.raises(ValueError, match="is no pin of a lock"):
        split("--index-url https://example.org/simple\n")


def test_a_bake_depends_on_what_it_imports_and_on_nothing_else_of_the_training() -> None:
    found = closure(variants.ROOT)
    assert {"dflash/graphs.py", "dflash/model.py", "dflash/mask.py", "dflash/loss.py", "dflash/compiling.py"} < {*found}
    assert {"dflash/trainer.py", "dflash/pipeline.py", "dflash/cli.py", "env/image.py", "env/entry.py"}.isdisjoint(
        found
    )


def test_every_import_of_a_bake_is_in_what_it_is_shown() -> None:
    found = closure(variants.ROOT)
    for path in found:
        for node in ast.walk(ast.parse((variants.ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("env", "dflash"):
                stem = node.module.replace(".", "/")
                assert {f"{stem}.py", f"{stem}/__init__.py"} & {*found}, (path, node.module)
    assert all((variants.ROOT / f"{root.replace('.', '/')}.py").is_file() for root in ROOTS)
