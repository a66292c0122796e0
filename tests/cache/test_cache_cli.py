"""`python -m env cache …` as users type it: what it prints, and its exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from caches import FACTORS, GPU, identity, make_sealed, make_source, opened

from env.cache import main, manifest, store
from env.errors import Exit

REPLAY: dict[str, Any] = {
    "counts": {"autograd_hit": 1, "autograd_miss": 0, "fx_hit": 2, "fx_miss": 0, "triton_hit": 3, "triton_miss": 0},
    "keys": {"autograd_hit": ["aaaa"], "fx_hit": ["fabc", "fcde"]},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for caches."""
    monkeypatch.setenv("DFLASH_CACHE_HOME", str(tmp_path))
    for name in ("DFLASH_SEALED", "DFLASH_CACHE_TRUST", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def written(folder: Path, value: Any) -> str:
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(value))
    return str(path)


def wanted(folder: Path, **differing: Any) -> str:
    """A file with what this machine needs a cache for."""
    factors = {**FACTORS, **{name.replace("__", "."): value for name, value in differing.items()}}
    made = store.Identity(factors=factors, graph_id="graphs", gpu_id="card", gpu=GPU)
    path = folder / f"wanted-{len(list(folder.iterdir()))}.json"
    path.write_bytes(store.identity_bytes(made))
    return str(path)


def test_an_empty_list_says_where_it_looked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == Exit.DONE
    assert capsys.readouterr().out == f"no caches in {home}\n"


def test_the_list_tells_size_age_and_why_one_does_not_fit(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sealed(home)
    assert main(["list", "--factors", wanted(home, device__index=6)]) == Exit.DONE
    out = capsys.readouterr().out
    assert f"sealed  {identity()[:16]}" in out
    assert "NVIDIA H200" in out
    assert "device.index: sealed `0`, here `6`" in out
    assert main(["list", "--factors", wanted(home), "--json"]) == Exit.DONE
    (row,) = json.loads(capsys.readouterr().out)
    assert row["fits"] is True
    assert main(["list"]) == Exit.DONE
    assert "`--config NAME` also says which fit" in capsys.readouterr().out


def test_a_broken_cache_is_listed_with_its_problem(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home)
    (opened(place) / manifest.NAME).write_text("{")
    assert main(["list"]) == Exit.DONE
    assert "cannot be used: " in capsys.readouterr().out


def test_a_directory_is_sealed_with_what_a_replay_counted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source(home / "source")
    command = ["seal", str(source), "--replay", written(home, REPLAY), "--factors", wanted(home)]
    assert main(command) == Exit.DONE
    assert f"{home}/sealed/{identity()}" in capsys.readouterr().out
    assert main(["verify", f"{home}/sealed/{identity()}"]) == Exit.DONE
    assert "sealed here" in capsys.readouterr().out


def test_a_sealed_cache_is_seeded_and_its_place_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home)
    assert main(["seed", str(place)]) == Exit.DONE
    out = capsys.readouterr()
    assert out.out == f"{home}/seeded/{identity()}\n"
    assert out.err == "sealed here\n"


def test_verify_passes_what_was_kept_and_fails_with_the_reason_what_was_not(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, _ = make_sealed(home)
    assert main(["verify", str(place), "--replay", written(home, REPLAY)]) == Exit.DONE
    assert "FX 2 of 2 hit, 0 missed" in capsys.readouterr().out
    missed = {**REPLAY, "counts": {**REPLAY["counts"], "fx_hit": 1, "fx_miss": 1}}
    command = ["verify", str(place), "--replay", written(home, missed)]
    assert main([*command, "--factors", wanted(home, inductor__max_autotune=True)]) == Exit.CACHE
    err = capsys.readouterr().err
    assert "error: the cache" in err
    assert "inductor.max_autotune: sealed `false`, here `true`" in err


def test_verify_refuses_a_changed_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home)
    (opened(place) / "cache/q1/cq1.py").write_text("def kernel(): evil\n")
    assert main(["verify", str(place)]) == Exit.CACHE
    assert "cq1.py was changed" in capsys.readouterr().err


def test_a_strangers_cache_needs_the_flag_or_to_be_taken_over(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home / "elsewhere")
    assert main(["verify", str(place)]) == Exit.CACHE
    assert "--allow-unsigned" in capsys.readouterr().err
    assert main(["seed", str(place), "--allow-unsigned"]) == Exit.DONE
    assert main(["trust", str(place)]) == Exit.DONE
    assert main(["verify", str(place)]) == Exit.DONE
    assert "sealed here" in capsys.readouterr().out


def test_a_changed_cache_cannot_be_taken_over(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home / "elsewhere")
    (opened(place) / "cache/q1/added.py").write_text("x")
    assert main(["trust", str(place)]) == Exit.CACHE
    assert "it was added" in capsys.readouterr().err


def test_explain_names_the_difference_and_its_exit_code_says_whether_there_is_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, _ = make_sealed(home)
    assert main(["explain", str(place), "--factors", wanted(home)]) == Exit.DONE
    assert "it fits, every factor is equal" in capsys.readouterr().out
    assert main(["explain", "--factors", wanted(home, python__minor="3.12")]) == Exit.CACHE
    assert "python.minor: sealed `3.11`, here `3.12`" in capsys.readouterr().out


def test_a_list_that_leaves_reasons_out_names_the_command_that_tells_them(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sealed(home)
    other = {f"inductor__of_another_torch_{number}": number for number in range(5)}
    assert main(["list", "--factors", wanted(home, **other)]) == Exit.DONE
    (more,) = (line.strip() for line in capsys.readouterr().out.splitlines() if "more: " in line)
    assert more.startswith("and 2 more: `nox -s cache -- explain ")
    assert main(shlex.split(more.strip("`").partition(" -- ")[2])) == Exit.CACHE
    assert "5 factors differ" in capsys.readouterr().out


def test_explain_needs_something_to_compare_with(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == Exit.USAGE
    assert "`--config NAME`" in capsys.readouterr().err
    assert main(["explain", "--factors", wanted(home)]) == Exit.CACHE
    assert "no sealed cache here" in capsys.readouterr().err


def test_prune_frees_only_when_it_is_told_to(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home)
    assert main(["prune"]) == Exit.DONE
    assert "would be freed" in capsys.readouterr().out
    assert place.exists()
    assert main(["prune", "--older-than", "1"]) == Exit.DONE
    assert "nothing to free" in capsys.readouterr().out
    assert main(["prune", "--yes"]) == Exit.DONE
    assert "freed: " in capsys.readouterr().out
    assert not place.exists()


@pytest.mark.parametrize("words", [["--keep", "-1"], ["--keep", "x"], ["--older-than", "nan"], ["--older-than=-5"]])
def test_prune_takes_no_number_that_means_nothing(
    home: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    place, _ = make_sealed(home)
    with pytest.raises(SystemExit) as caught:
        main(["prune", "--yes", *words])
    assert caught.value.code == Exit.USAGE
    assert " is no number of " in capsys.readouterr().err or words[0] == "--keep"
    assert place.exists()


def test_prune_frees_what_killed_processes_left_but_nothing_that_one_may_be_at(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, _ = make_sealed(home)
    removing = place.with_name(f".{place.name}.1.going")  # a prune that was killed
    place.rename(removing)
    sealing = home / "sealed" / ".0123456789abcdef.x"  # a seal that was killed
    baking = home / "baking" / ("ab" * 16)
    busy, stub = home / "baking" / ("cd" * 16), home / "baking" / "stub-0123456789abcdef"
    for folder in (sealing, baking, busy, stub):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    assert main(["prune", "--yes"]) == Exit.DONE
    assert capsys.readouterr().out == "nothing to free\n"  # all was written a moment ago
    for folder in (removing, sealing, baking, busy, stub):
        for each in (folder, *folder.rglob("*")):
            os.utime(each, (0, 0))
    lock = busy.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert main(["prune"]) == Exit.DONE
    assert "left unfinished" in capsys.readouterr().out
    assert main(["prune", "--yes"]) == Exit.DONE
    assert f"kept, a process is using it: {busy}" in capsys.readouterr().out
    assert [folder.exists() for folder in (removing, sealing, baking, busy, stub)] == [False] * 3 + [True] * 2
    lock.close()


def test_what_cannot_be_read_is_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = make_sealed(home)
    assert main(["verify", str(place), "--replay", "/nowhere"]) == Exit.INPUT
    (home / "bad.json").write_text("[1")
    assert main(["verify", str(place), "--replay", f"{home}/bad.json"]) == Exit.INPUT
    assert main(["explain", str(place), "--factors", f"{home}/bad.json"]) == Exit.USAGE
    (home / "bytes").write_bytes(b"\xff" * 10000)
    assert main(["explain", str(place), "--factors", f"{home}/bytes"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said) < 3000
    assert os.environ["DFLASH_CACHE_HOME"] == str(home)


def test_without_a_training_environment_config_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    from env import environment

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else real(name, *more))
    monkeypatch.setattr(environment, "HOME", home / "no environments")
    assert main(["explain", "--config", "tiny", "--device", "cpu"]) == Exit.USAGE
    assert "no training environment yet" in capsys.readouterr().err
    assert main(["factors"]) == Exit.USAGE
    assert "no training environment yet" in capsys.readouterr().err


def test_what_the_training_environment_refuses_is_said_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from env import environment
    from env.cache import cli

    monkeypatch.setattr(cli, "_has_torch", lambda: False)
    monkeypatch.setattr(environment, "python_of", lambda _name: Path(sys.executable))
    with pytest.raises(SystemExit) as caught:
        main(["list", "--config", "none.toml"])
    assert caught.value.code == Exit.USAGE
    assert capfd.readouterr().err == "error: the configuration `none.toml` does not exist\n"


def test_the_factors_of_a_configuration_can_be_printed_and_read_back(
    home: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    pytest.importorskip("torch")
    assert main(["factors", "--config", "tiny", "--device", "cpu"]) == Exit.DONE
    found = store.read_identity(capfdbinary.readouterr().out)
    assert found.gpu_id == "cpu"
    assert found.factors["device.type"] == "cpu"
    assert main(["factors", "--device", "cpu"]) == Exit.DONE
    assert json.loads(capfdbinary.readouterr().out)["device.type"] == "cpu"


def test_the_device_is_the_one_that_a_training_takes_unless_one_is_named(
    home: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    torch = pytest.importorskip("torch")
    assert main(["factors"]) == Exit.DONE
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert json.loads(capfdbinary.readouterr().out)["device.type"] == kind
