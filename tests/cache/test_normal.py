"""What differs between two bakes by nature is taken out, nothing else is, and nothing is ever unpickled."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from caches import Tripwire, entry
from hypothesis import given
from hypothesis import strategies as st

from env.cache import elf, normal, pickles


def same(text: str) -> str:
    return text


def test_elapsed_times_become_zero_whatever_their_size() -> None:
    results = set()
    for elapsed in (0, 7, 300, 70_000, 3_000_000_000, 10**15):
        results.add(normal.normalised(entry(elapsed)))
    assert len(results) == 1
    assert pickle.loads(results.pop()) == {"_time_taken_ns": 0, "code": "def f(): pass"}


def test_a_time_under_a_name_that_was_used_before_becomes_zero_too() -> None:
    name = "_time_taken_ns"
    data = pickle.dumps([{name: 5_000_000_000}, {name: 6_000_000_000}, {"other_ns": 7_000_000_000}])
    assert pickle.loads(normal.normalised(data)) == [{name: 0}, {name: 0}, {"other_ns": 7_000_000_000}]


def test_a_time_that_is_not_known_stays_none() -> None:
    assert pickle.loads(normal.normalised(pickle.dumps({"_time_taken_ns": None}))) == {"_time_taken_ns": None}


def test_memory_addresses_in_text_are_blank() -> None:
    lines = ["[ab] f: <function decompose at 0x7f93ad744720>", "at 0x12 stays", "é <x at 0x55d0c0ffee00>"]
    result = pickle.loads(normal.normalised(pickle.dumps(lines)))
    assert result == ["[ab] f: <function decompose at 0x0>", "at 0x12 stays", "é <x at 0x0>"]
    program = "os.environ['_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR'] = '140121018629712'\n" + "x" * 300
    assert "PTR'] = '0'" in pickle.loads(normal.normalised(pickle.dumps(program)))


def test_pickles_within_pickles_are_made_equal_too() -> None:
    def nested(elapsed: int) -> bytes:
        return pickle.dumps({"inner": entry(elapsed), "large": entry(elapsed, fill="x" * 70_000)})

    assert nested(1) != nested(10**12)
    assert normal.normalised(nested(1)) == normal.normalised(nested(10**12))
    assert pickle.loads(pickle.loads(normal.normalised(nested(3)))["inner"])["_time_taken_ns"] == 0


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    data = pickle.dumps({"_time_taken_ns": 1, "trap": Tripwire(tmp_path / "sprung"), "inner": entry(1)})
    normal.normalised(data)
    normal.decisive_digest(data, same)
    assert not (tmp_path / "sprung").exists()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_what_holds_no_time_means_the_same_afterwards(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert pickle.loads(normal.normalised(data)) == value
    assert normal.normalised(normal.normalised(data)) == normal.normalised(data)


def test_shared_and_recursive_objects_stay_so() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    result = pickle.loads(normal.normalised(pickle.dumps({"_time_taken_ns": 3, "a": shared, "b": shared})))
    assert result["a"] is result["b"]
    assert result["a"][1] is result["a"]


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_without_an_error(data: bytes) -> None:
    for start in (b"", b"\x80\x04", elf.MAGIC + b"\x02\x01"):
        normal.normalised(start + data + b".")
        normal.decisive_digest(start + data + b".", same)


def test_what_is_cut_off_is_left_as_it_is() -> None:
    whole = entry(5_000_000_000)
    for length in range(len(whole)):
        assert normal.normalised(whole[:length]) == whole[:length]


def test_a_best_config_loses_the_time_of_its_search_only() -> None:
    table = {"XBLOCK": 64, "num_warps": 4, "time_taken_ms": 17, "triton_cache_hash": "abc"}
    assert json.loads(normal.best_config(json.dumps(table).encode())) == {**table, "time_taken_ms": 0}
    assert normal.best_config(b"not JSON") == b"not JSON"


def test_an_entry_is_named_as_torch_names_it() -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    assert normal.entry_name(b"abc") == codecache.sha256_hash(b"abc")


# Real cubins, by Triton's own ptxas

PTX = """
.version {version}
.target {arch}
.address_size 64
.visible .entry k(.param .u64 p) {{
.reg .b32 %r<3>; .reg .b64 %rd<3>;
.loc 1 3 5
ld.param.u64 %rd1,[p];
cvta.to.global.u64 %rd2,%rd1;
.loc 1 4 5
mov.u32 %r1,{value};
st.global.u32 [%rd2],%r1;
ret;
}}
.file 1 "{source}"
.section .debug_abbrev {{ .b8 0 }}
"""


ARCHITECTURES = {"sm_80": "8.0", "sm_120a": "8.7"}
"""Those with which cubins of different kinds come, and the version of PTX that knows each."""

ASSEMBLERS = {"sm_80": "ptxas", "sm_120a": "ptxas-blackwell"}
"""Triton has one of its own for Blackwell."""

on_each = pytest.mark.parametrize("arch", ARCHITECTURES)


def cubin(folder: Path, name: str, *, changed: int, value: str = "%tid.x", arch: str = "sm_80") -> bytes:
    """A cubin whose source file has a name and was last changed at a time."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        pytest.skip("there is no Triton, and so no ptxas")
    source = folder / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.touch()
    os.utime(source, (changed, changed))
    (folder / "k.ptx").write_text(PTX.format(value=value, source=source, arch=arch, version=ARCHITECTURES[arch]))
    command = [
        str(Path(found.origin).parent / "backends/nvidia/bin" / ASSEMBLERS[arch]),
        "-lineinfo",
        f"-arch={arch}",
        "k.ptx",
        "-o",
        "k",
    ]
    subprocess.run(command, check=True, cwd=folder)
    return (folder / "k").read_bytes()


@on_each
def test_two_cubins_of_one_kernel_differ_only_in_a_time_stamp_that_is_taken_out(tmp_path: Path, arch: str) -> None:
    one, other = (cubin(tmp_path, "k.py", changed=when, arch=arch) for when in (1_700_000_000, 1_790_000_000))
    cuda = pytest.importorskip("torch").version.cuda
    stamped = not (arch == "sm_120a" and cuda == "13.2")  # there, ptxas no longer does
    assert (one != other) == stamped, "the premise: ptxas writes when the source was changed"
    assert normal.normalised(one) == normal.normalised(other)
    assert len(normal.normalised(one)) == len(one)
    code = {section.name: one[section.start :][: section.size] for section in elf.sections(one)}
    after = normal.normalised(one)
    for section in elf.sections(after):
        if section.name not in elf.LINES:
            assert after[section.start :][: section.size] == code[section.name]


@on_each
def test_cubins_from_sources_at_different_paths_have_one_digest_and_those_of_different_code_two(
    tmp_path: Path, arch: str
) -> None:
    here = cubin(tmp_path, "k.py", changed=1_700_000_000, arch=arch)
    there = cubin(tmp_path, "a/much/longer/path/k.py", changed=1_790_000_000, arch=arch)
    assert normal.normalised(here) != normal.normalised(there)
    assert normal.decisive_digest(here, same) == normal.decisive_digest(there, same)
    other = cubin(tmp_path, "k.py", changed=1_700_000_000, value="%ctaid.x", arch=arch)
    assert normal.decisive_digest(here, same) != normal.decisive_digest(other, same)


def test_a_cubin_cut_off_anywhere_is_left_as_it_is(tmp_path: Path) -> None:
    whole = cubin(tmp_path, "k.py", changed=1_700_000_000)
    for length in range(0, len(whole), 97):
        assert len(normal.normalised(whole[:length])) == length
        normal.decisive_digest(whole[:length], same)


def test_a_shared_object_built_in_two_folders_has_one_digest(tmp_path: Path) -> None:
    digests, contents = set(), set()
    for folder in (tmp_path / "a", tmp_path / "another"):
        folder.mkdir()
        (folder / "k.cpp").write_text('extern "C" int k(int x) { return x + 1; }\n')
        subprocess.run(
            ["g++", "-g1", "-shared", "-fPIC", str(folder / "k.cpp"), "-o", str(folder / "k.so")], check=True
        )
        data = (folder / "k.so").read_bytes()
        contents.add(data)
        digests.add(normal.decisive_digest(data, same))
    assert len(contents) == 2
    assert len(digests) == 1


def bundle(path: str, code: str, ptx: str) -> bytes:
    return pickle.dumps({"files": [("k.ptx", ptx.encode()), ("k.json", code.encode())], "source": f"# {path}"})


def test_intermediate_stages_and_paths_do_not_enter_the_digest_and_everything_else_does() -> None:
    def digest(path: str, code: str, ptx: str) -> str:
        return normal.decisive_digest(bundle(path, code, ptx), lambda text: text.replace(path, "@"))

    assert digest("/a", "{}", "one") == digest("/b/c", "{}", "two")
    assert digest("/a", "{}", "one") != digest("/a", "{1}", "one")


def test_opcodes_are_given_back_as_they_are_where_nothing_is_blanked() -> None:
    data = pickle.dumps({"a": [1, "b", b"c", 2.5, None]}, 3)  # protocol 3 has no frames
    assert b"".join(step.raw for step in pickles.steps(data, bytes)) == data
    with pytest.raises(ValueError, match="follows the end"):
        list(pickles.steps(data + b"more.", bytes))


def test_a_line_table_that_lies_about_its_length_is_left_as_it_is(tmp_path: Path) -> None:
    data = bytearray(cubin(tmp_path, "k.py", changed=1_700_000_000))
    table = next(section for section in elf.sections(bytes(data)) if section.name == ".debug_line")
    struct.pack_into("<I", data, table.start, 0x7FFFFFFF)
    assert normal.normalised(bytes(data)) == bytes(data)
