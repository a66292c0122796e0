"""Interpreters, stamps, and environments in a sorry state; beside it locks and markers, and what is planted."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tinywheels import ROOT, Workshop, listing, processor_seconds, site

from env import drift
from env.errors import Exit, Failure

DRIFT = ROOT / "env" / "drift.py"
HASH = "--hash=sha256:" + "0" * 64
MINOR = f"3.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def prefix(workshop: Workshop, tmp_path: Path) -> Path:
    return workshop.copy(tmp_path / "environment")


def look(prefix: Path, lock: Path, **how: bool) -> list[drift.Drift]:
    return list(drift.compare(prefix / "bin" / "python", lock, environ={}, **how))


def said(prefix: Path, lock: Path) -> str:
    """What is said of an environment, without its first line and the hint; never a traceback."""
    command = [sys.executable, "-I", "-S", str(DRIFT), "--python", str(prefix / "bin" / "python"), "--lock", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == Exit.DRIFT, done.stdout + done.stderr
    return "\n".join(" ".join(line.split()) for line in done.stderr.splitlines()[1:-1])


# ------------------------------------------------------------------------------------------------------- interpreter


def test_an_interpreter_is_asked_for_its_markers_and_they_are_packagings(prefix: Path) -> None:
    from packaging.markers import default_environment

    who = drift.interpreter(prefix / "bin" / "python")
    assert who.problem == ""
    assert dict(who.markers) == {k: v for k, v in default_environment().items() if k != "extra"}
    assert who.sites == (site(prefix),)
    assert who.abi == f"cp3{sys.version_info.minor}"


def test_no_code_of_an_environment_runs_when_it_is_asked(prefix: Path, tmp_path: Path) -> None:
    for name in ("hook.pth", "sitecustomize.py", "usercustomize.py"):
        (site(prefix) / name).write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    drift.interpreter(prefix / "bin" / "python")
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------- stamps and the cheap way


def test_what_an_installer_did_to_the_same_wheel_again_is_no_drift(workshop: Workshop, prefix: Path) -> None:
    workshop.pip(prefix, "--force-reinstall", next(workshop.wheels.glob("torch-*.whl")))
    assert (site(prefix) / "torch-2.11.0.dist-info/INSTALLER").read_text().strip() == "pip"
    assert look(prefix, workshop.lock) == []


def test_a_touched_file_is_no_drift_and_the_gate_does_not_note_it(workshop: Workshop, prefix: Path) -> None:
    os.utime(site(prefix) / "torch/lib/libtorch_cuda.so")
    before = listing(prefix)
    assert look(prefix, workshop.lock) == []
    assert listing(prefix) == before


def test_time_stamps_that_moved_are_noted_only_when_asked_and_only_when_nothing_drifted(
    workshop: Workshop, prefix: Path
) -> None:
    python, stamp = prefix / "bin" / "python", prefix / drift.STAMP
    for path in (site(prefix) / "torch/lib/libtorch_cuda.so", prefix / "bin" / "transformers"):
        os.utime(path)
    assert drift.restamp(python, workshop.lock) == ()
    noted = stamp.read_bytes()
    moved = json.loads(noted)["files"]["torch"]["torch/lib/libtorch_cuda.so"][1]
    assert moved == (site(prefix) / "torch/lib/libtorch_cuda.so").stat().st_mtime_ns
    (site(prefix) / "torch/version.py").unlink()
    os.utime(site(prefix) / "torch/__init__.py")
    assert [d.name for d in drift.restamp(python, workshop.lock)] == ["torch"]
    assert stamp.read_bytes() == noted


def test_a_stamp_that_is_missing_is_made_only_when_asked_and_only_when_nothing_drifted(
    workshop: Workshop, prefix: Path
) -> None:
    python, stamp = prefix / "bin" / "python", prefix / drift.STAMP
    stamp.unlink()
    (site(prefix) / "stray.py").write_text("")
    assert [d.name for d in drift.restamp(python, workshop.lock)] == ["stray.py"]
    assert not stamp.exists()
    (site(prefix) / "stray.py").unlink()
    assert look(prefix, workshop.lock) == []
    assert not stamp.exists()
    assert drift.restamp(python, workshop.lock) == ()
    assert stamp.exists()


def test_an_edit_that_keeps_size_and_time_stamp_is_found_by_hash_only(workshop: Workshop, prefix: Path) -> None:
    path = site(prefix) / "torch/lib/libtorch_cuda.so"
    stat = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert look(prefix, workshop.lock) == []
    (found,) = look(prefix, workshop.lock, hashes=True)
    assert (found.name, found.why) == ("torch", "torch/lib/libtorch_cuda.so edited")


def test_a_file_and_its_line_in_record_edited_alike_are_found(workshop: Workshop, prefix: Path) -> None:
    path, record = site(prefix) / "torch/__init__.py", site(prefix) / "torch-2.11.0.dist-info/RECORD"
    old = drift._digest(path)
    path.write_bytes(path.read_bytes()[::-1])
    record.write_text(record.read_text().replace(old, drift._digest(path)))
    (found,) = look(prefix, workshop.lock)
    assert found.why == "another build: its RECORD lists other files"


@pytest.mark.parametrize("hashes", [False, True])
def test_a_file_that_takes_the_place_of_an_installers_note_is_found_although_the_count_is_the_same(
    workshop: Workshop, prefix: Path, hashes: bool
) -> None:
    (site(prefix) / "numpy-2.4.6.dist-info/INSTALLER").unlink()
    assert look(prefix, workshop.lock, hashes=hashes) == []
    (site(prefix) / "sitecustomize.py").write_text("")
    (found,) = look(prefix, workshop.lock, hashes=hashes)
    assert (found.name, found.found) == ("sitecustomize.py", "a file of no package")


def test_an_archive_that_kept_whole_seconds_only_costs_no_hashing(
    workshop: Workshop, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in site(prefix).rglob("*"):
        os.utime(path, (path.stat().st_atime_ns // 10**9, path.stat().st_mtime_ns // 10**9))
    monkeypatch.setattr(drift, "_digest", lambda path: pytest.fail(f"{path} was hashed"))
    assert look(prefix, workshop.lock) == []


def test_bytecode_that_python_wrote_is_no_drift_and_bytecode_without_source_is(
    workshop: Workshop, prefix: Path
) -> None:
    subprocess.run([prefix / "bin/python", "-m", "compileall", "-q", site(prefix) / "torch"], check=True)
    cached = next((site(prefix) / "torch/__pycache__").glob("__init__*.pyc"))
    assert look(prefix, workshop.lock) == []
    shutil.copy(cached, site(prefix) / "torch/hidden.pyc")
    (found,) = look(prefix, workshop.lock)
    assert found.why == "torch/hidden.pyc added"


def test_a_console_script_that_was_edited_is_found(workshop: Workshop, prefix: Path) -> None:
    with (prefix / "bin" / "transformers").open("a") as script:
        script.write("# edited\n")
    (found,) = look(prefix, workshop.lock)
    assert (found.name, found.why) == ("transformers", "../../../bin/transformers edited")


def test_an_environment_that_was_moved_is_still_the_locked_one(workshop: Workshop, prefix: Path) -> None:
    moved = prefix.rename(prefix.with_name("moved"))
    assert look(moved, workshop.lock) == []


def test_a_stamp_is_refused_over_files_that_are_not_what_their_wheels_say(workshop: Workshop, prefix: Path) -> None:
    (prefix / drift.STAMP).unlink()
    path = site(prefix) / "torch/lib/libtorch_cuda.so"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(Failure, match="not what its wheels say") as refused:
        drift.stamp(prefix / "bin" / "python", workshop.lock)
    assert refused.value.details == ("torch/lib/libtorch_cuda.so",)
    assert not (prefix / drift.STAMP).exists()


def test_a_lock_that_now_means_other_files_of_the_same_version_is_noticed(
    workshop: Workshop, prefix: Path, tmp_path: Path
) -> None:
    text = workshop.lock.read_text()
    (pin,) = (pin for pin in drift.read_lock(workshop.lock) if pin.name == "torch")
    more = tmp_path / "more.txt"
    more.write_text(text.replace(f"--hash={pin.hashes[0]}", f"--hash={pin.hashes[0]} {HASH}"))
    assert look(prefix, more) == []
    other = tmp_path / "other.txt"
    other.write_text(text.replace(f"--hash={pin.hashes[0]}", HASH))
    (found,) = look(prefix, other)
    assert (found.name, found.why.split(",")[0]) == (
        "torch",
        "the lock now allows other files for this version than when it was installed",
    )


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: making thousands of files takes a busy disk minutes."""
    place = Path("/dev/shm")  # not a predictable name: mkdtemp
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_an_undrifted_environment_of_real_size_costs_less_than_half_a_second(workshop: Workshop, memory: Path) -> None:
    """As many files, folders and lines of RECORD as the cu130 set has, in processor time, Python's start included."""
    prefix = workshop.copy(memory / "environment")
    files = []
    for folder in (f"torch/many{number:03}" for number in range(235)):
        (site(prefix) / folder).mkdir()
        files += [f"{folder}/{number:03}.py" for number in range(100)]
    for path in files:
        (site(prefix) / path).touch()
    with (site(prefix) / "torch-2.11.0.dist-info/RECORD").open("a") as record:
        record.writelines(f"{path},sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n" for path in files)
    drift.stamp(prefix / "bin/python", workshop.lock, hashes=False)
    command = [sys.executable, str(DRIFT), "--python", str(prefix / "bin/python"), "--lock", str(workshop.lock)]
    costs = []
    for _ in range(3):
        before = processor_seconds()
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        costs.append(processor_seconds() - before)
    assert "235" in said
    assert min(costs) < 0.5, costs


# ---------------------------------------------------------------------------------------------------- without a stamp


@pytest.mark.parametrize("stamp", [None, "", "{}", '{"format": 1}', "[]", '{"format": 99, "files": {}}'])
def test_without_a_stamp_that_can_be_read_wheels_records_are_believed_and_torch_is_hashed(
    workshop: Workshop, prefix: Path, stamp: str | None
) -> None:
    (prefix / drift.STAMP).unlink()
    if stamp is not None:
        (prefix / drift.STAMP).write_text(stamp)
    assert look(prefix, workshop.lock) == []
    path = site(prefix) / "torch/lib/libtorch_cuda.so"
    path.write_bytes(path.read_bytes()[::-1])
    (site(prefix) / "stray.py").write_text("")
    assert [(d.name, d.why) for d in look(prefix, workshop.lock)] == [
        ("stray.py", ""),
        ("torch", "torch/lib/libtorch_cuda.so edited"),
    ]


@pytest.mark.parametrize(
    ("wheel", "told"),
    [
        ("mirror/torch-*.whl", "it is built for CUDA 12.8"),
        ("cpu/torch-*.whl", ""),
        ("old/numpy-*.whl", ""),
    ],
)
def test_without_a_stamp_another_build_is_told_by_what_it_says_of_itself(
    workshop: Workshop, prefix: Path, wheel: str, told: str
) -> None:
    (prefix / drift.STAMP).unlink()
    workshop.pip(prefix, "--force-reinstall", next(workshop.others.glob(wheel)))
    (found,) = look(prefix, workshop.lock)
    assert (found.name, found.why) == (wheel.partition("/")[2].partition("-")[0], told)


@pytest.mark.parametrize(
    ("tags", "foreign"),
    [
        (["py3-none-any"], False),
        (["py2.py3-none-any"], False),
        (["cp311-cp311-manylinux_2_28_x86_64"], False),
        (["cp39-abi3-manylinux_2_28_x86_64"], False),
        (["cp312-cp312-manylinux_2_28_x86_64"], True),
        (["cp312-abi3-manylinux_2_28_x86_64"], True),
        ([], False),
    ],
)
def test_a_wheel_for_another_python_is_told_by_its_tags(tags: list[str], foreign: bool) -> None:
    assert bool(drift._foreign(tags, "cp311")) is foreign


# -------------------------------------------------------------------------------------------------- broken environments


def break_metadata(prefix: Path) -> None:
    (site(prefix) / "numpy-2.4.6.dist-info/METADATA").unlink()


def garble_metadata(prefix: Path) -> None:
    (site(prefix) / "numpy-2.4.6.dist-info/METADATA").write_bytes(b"\xff\xfe\x00")


def empty_metadata(prefix: Path) -> None:
    (site(prefix) / "numpy-2.4.6.dist-info/METADATA").write_bytes(b"")


def lose_record(prefix: Path) -> None:
    (site(prefix) / "numpy-2.4.6.dist-info/RECORD").unlink()


def garble_record(prefix: Path) -> None:
    (site(prefix) / "numpy-2.4.6.dist-info/RECORD").write_text('numpy/__init__.py,sha256=a,b,c\n"')


def halve_torch(prefix: Path) -> None:
    shutil.rmtree(site(prefix) / "torch/_dynamo")
    (site(prefix) / "torch/version.py").unlink()


def lose_torchs_metadata(prefix: Path) -> None:
    shutil.rmtree(site(prefix) / "torch-2.11.0.dist-info")


def interrupt_pip(prefix: Path) -> None:
    (site(prefix) / "torch-2.11.0.dist-info").rename(site(prefix) / "~orch-2.11.0.dist-info")


def lose_python(prefix: Path) -> None:
    for path in (prefix / "bin").glob("python*"):
        path.unlink()
    (prefix / "bin/python").symlink_to("/nowhere/python3.11")


def replace_python(prefix: Path) -> None:
    (prefix / "bin/python").unlink()
    (prefix / "bin/python").write_text("#!/bin/sh\necho cannot open shared object >&2\nexit 127\n")
    (prefix / "bin/python").chmod(0o755)


def forbid_python(prefix: Path) -> None:
    (prefix / "bin/python").unlink()
    (prefix / "bin/python").write_text("no program")


def lose_site(prefix: Path) -> None:
    shutil.rmtree(site(prefix))


def exchange_python(prefix: Path) -> None:
    (prefix / "lib" / f"python{MINOR}").rename(prefix / "lib" / "python3.9")


def lose_everything(prefix: Path) -> None:
    shutil.rmtree(prefix)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (
            break_metadata,
            ["numpy locked 2.4.6 found 2.4.6 its METADATA is missing, asked for by name, installed by uv"],
        ),
        (garble_metadata, ["numpy locked 2.4.6 found 2.4.6 its METADATA cannot be read: 'utf-8' codec can't decode"]),
        (empty_metadata, ["numpy locked 2.4.6 found 2.4.6 its METADATA is garbled, "]),
        (lose_record, ["numpy locked 2.4.6 found 2.4.6 its RECORD is missing, "]),
        (garble_record, ["numpy locked 2.4.6 found 2.4.6 its RECORD is garbled, "]),
        (
            halve_torch,
            ["torch locked 2.11.0+cu130 found 2.11.0 2 files missing: torch/_dynamo/eval_frame.py and 1 more"],
        ),
        (lose_torchs_metadata, ["torch locked 2.11.0+cu130 not found its metadata is gone, 5 files of it left"]),
        (
            interrupt_pip,
            ["torch locked 2.11.0+cu130 not found its metadata is gone, ", "orch not locked found 2.11.0 left"],
        ),
        (lose_python, ["points to `/nowhere/python3.11`, which is gone"]),
        (replace_python, ["does not run: cannot open shared object"]),
        (forbid_python, ["does not start: Permission denied"]),
        (lose_site, ["site-packages locked 6 packages not found `", "has no site-packages"]),
        (exchange_python, ["holds packages of python3.9; its Python was exchanged"]),
        (lose_everything, [f"python locked {MINOR} not found `", "does not exist", "has no site-packages"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_environment_gets_a_sentence_and_never_a_traceback(
    workshop: Workshop, prefix: Path, harm: object, told: list[str]
) -> None:
    assert callable(harm)
    harm(prefix)
    sentence = said(prefix, workshop.lock)
    for part in told:
        assert part in sentence
    assert len(sentence.splitlines()) <= 2, sentence
    imported = drift.failure(look(prefix, workshop.lock), "cu130")
    assert "\n".join(" ".join(line.split()) for line in imported.details) == sentence
    if not (prefix / "bin" / "python").exists():
        with pytest.raises(Failure, match=r"does not exist|is gone"):
            drift.stamp(prefix / "bin" / "python", workshop.lock)


# ---------------------------------------------------------------------------------------------------- from the outside


def test_modules_on_pythonpath_that_come_before_locked_ones_are_named(
    workshop: Workshop, prefix: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    for name in ("torch", "numpy", "docs"):
        (folder / name).mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("")
    (folder / "sitecustomize.py").write_text("")
    (folder / "__pycache__").mkdir()  # no module, although the environment's packages have one, too
    (next((prefix / "lib").glob("python3*")) / "site-packages" / "__pycache__").mkdir(exist_ok=True)
    found = drift.compare(prefix / "bin/python", workshop.lock, environ={"PYTHONPATH": f"{tmp_path}:{folder}"})
    assert [(d.name, d.found, d.why) for d in found] == [
        ("PYTHONPATH", str(folder), "sitecustomize.py and torch there come first")
    ]
    refusal = drift.failure(found, "cu130")
    assert refusal.hint == f"take `{folder}` out of PYTHONPATH; `--allow-drift` goes on as it is"


def test_the_users_own_packages_are_named_where_they_come_before_locked_ones(
    workshop: Workshop, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment does not look there; a Python of the system, as in an image, does."""
    (tmp_path / "user" / "numpy").mkdir(parents=True)
    (tmp_path / "user" / "numpy" / "__init__.py").write_text("")
    ask = drift.interpreter
    monkeypatch.setattr(drift, "interpreter", lambda python: replace(ask(python), user_site=tmp_path / "user"))
    (found,) = drift.compare(prefix / "bin/python", workshop.lock, environ={})
    assert (found.name, found.why) == ("user site", "numpy there comes first")
    assert drift.failure([found], "cu130").hint == (
        "`PYTHONNOUSERSITE=1` leaves the user site out; `--allow-drift` goes on as it is"
    )
    assert drift.compare(prefix / "bin/python", workshop.lock, environ={"PYTHONNOUSERSITE": "1"}) == ()


def test_a_python_that_is_no_virtual_environment_is_compared_with_its_own_site_packages(workshop: Workshop) -> None:
    who = drift.interpreter(Path(sys.base_prefix) / "bin" / f"python{MINOR}")
    assert who.problem == ""
    assert not who.system_site
    assert who.user_site is not None
    assert all(str(place).startswith(("/usr", sys.base_prefix)) for place in who.sites)
    names = {d.name for d in drift.compare(who.python, workshop.lock, environ={})}
    assert {"torch", "triton"} <= names


def test_what_was_installed_the_old_way_is_named(workshop: Workshop, prefix: Path) -> None:
    (site(prefix) / "Flash_Attn-2.8-py3.11.egg-info").mkdir()
    (site(prefix) / "apex.egg-link").write_text("/home/me/apex\n")
    found = [(d.name, d.found, d.why) for d in look(prefix, workshop.lock) if not d.files]
    assert found == [("apex", "?", "installed the old way"), ("flash-attn", "2.8", "installed the old way")]


def test_an_extra_of_a_requirement_tells_who_brought_a_package_in(workshop: Workshop, prefix: Path) -> None:
    """Torch asks for `cuda-toolkit[cublas]`, and only with that extra does it ask for `nvidia-cublas`."""
    for name, version, requires in (
        ("engine", "1.0", "toolkit[blas] ; sys_platform != 'win32'"),
        ("toolkit", "13.0", "blas==13.1.* ; extra == 'blas'"),
        ("blas", "13.1.0", "curl ~= 1.0 ; python_version ~= '3.8'"),
    ):
        folder = site(prefix) / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\nRequires-Dist: {requires}\n\n")
        (folder / "RECORD").write_text("")
    assert [(d.name, d.origin) for d in look(prefix, workshop.lock)] == [
        ("engine", ""),
        ("blas", "required by toolkit 13.0, for engine 1.0"),
        ("toolkit", "required by engine 1.0"),
    ]


def test_the_project_itself_on_pythonpath_is_no_drift(workshop: Workshop, prefix: Path) -> None:
    assert drift.compare(prefix / "bin/python", workshop.lock, environ={"PYTHONPATH": str(ROOT)}) == ()


def test_another_cuda_library_that_the_loader_would_find_first_is_named(
    workshop: Workshop, prefix: Path, tmp_path: Path
) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/libcudart.so.13").write_bytes(b"")
    inside = site(prefix) / "nvidia/cu13/lib"
    path = f"/nowhere:{inside}:{tmp_path / 'cuda'}"
    found = drift.compare(
        prefix / "bin/python",
        workshop.lock,
        environ={"LD_LIBRARY_PATH": path, "LD_PRELOAD": f"{tmp_path / 'cuda/libcudart.so.13'} libjemalloc.so"},
    )
    assert [(d.name, d.found, d.outside) for d in found] == [
        ("LD_LIBRARY_PATH", str(tmp_path / "cuda"), True),
        ("LD_PRELOAD", str(tmp_path / "cuda/libcudart.so.13"), True),
    ]


# --------------------------------------------------------------------------------------------------------- what is said


def test_a_long_list_is_cut_with_a_count() -> None:
    drifts = [drift.Drift(f"package-{n:02}", "", "1.0") for n in range(40)]
    lines = str(drift.failure(drifts, "cu130")).splitlines()
    assert lines[-2].strip() == "and 28 more"
    assert len(lines) == 1 + drift.LINES + 1 + 1


def test_the_mending_command_names_a_variant_that_is_not_the_default() -> None:
    refusal = drift.failure([drift.Drift("torch", "2.10.0+cu128", "2.11.0+cu130")], "cu128")
    assert refusal.hint is not None
    assert refusal.hint.startswith("`nox -s train -- --variant cu128 --repair` installs the locked set")
    refusal = drift.failure([drift.Drift("torch", "1", "2")], "cu130", command="nox -s bake", options="--python 3.12")
    assert refusal.hint is not None
    assert refusal.hint.startswith("`nox -s bake -- --python 3.12 --repair` installs the locked set")


def test_credentials_in_an_address_are_not_repeated(workshop: Workshop, prefix: Path) -> None:
    where = {"url": "https://user:secret@index.example/numpy.whl?token=secret", "archive_info": {}}
    (site(prefix) / "numpy-2.4.6.dist-info/direct_url.json").write_text(json.dumps(where))
    (site(prefix) / "numpy-2.4.6.dist-info/METADATA").write_text("Name: numpy\nVersion: 2.5\n")
    (found,) = look(prefix, workshop.lock)
    assert found.origin.endswith("from https://index.example/numpy.whl")


def test_the_file_alone_says_the_same_as_the_package(workshop: Workshop, prefix: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(DRIFT, tmp_path / "alone.py"))
    (site(prefix) / "torch/version.py").unlink()
    options = ["--python", str(prefix / "bin/python"), "--lock", str(workshop.lock), "--variant", "cu128"]
    by_file = subprocess.run([sys.executable, "-I", "-S", alone, *options], capture_output=True, text=True, check=False)
    by_package = subprocess.run(
        [sys.executable, "-m", "env.drift", *options], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert by_file.stderr == by_package.stderr != ""
    assert by_file.returncode == by_package.returncode == Exit.DRIFT


def alone(python: Path, script: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The file, told of an environment and of nothing else."""
    command = [sys.executable, "-I", "-S", str(script), "--python", str(python)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin", **environ})


@pytest.mark.parametrize(
    ("folder", "named", "locks"),
    [
        ("cu128-py3.11", "", ["cu128"]),
        ("cu130-py3.11-dev", "cu128", ["cu130", "dev"]),
        ("py3.11-dev", "", ["dev"]),
        ("mine", "", ["cu132"]),
        ("mine", "cu128", ["cu128"]),
        ("none-py3.11", "", ["cu132"]),
        ("cu130-py3.11.building-7", "", ["cu132"]),
        ("mine", "none", []),
    ],
)
def test_an_environment_that_is_asked_about_alone_is_compared_with_what_its_folder_is_named_after(
    tmp_path: Path, folder: str, named: str, locks: list[str]
) -> None:
    """Each lock pins one package, which bears the lock's own name."""
    (tmp_path / "env").mkdir()
    script = Path(shutil.copy(DRIFT, tmp_path / "env"))
    (tmp_path / "env" / "variants.toml").write_text('default = "cu132"\n')
    (tmp_path / "requirements").mkdir()
    for name in ("cu128", "cu130", "cu132", "dev"):
        (tmp_path / "requirements" / f"{name}.txt").write_text(f"of-{name}==1 {HASH}\n")
    prefix = tmp_path / folder
    site(prefix).mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    (prefix / "pyvenv.cfg").write_text("home = /usr/bin\n")
    done = alone(prefix / "bin" / "python", script, **({"DFLASH_VARIANT": named} if named else {}))
    if not locks:
        assert done.returncode == 2
        assert done.stderr.endswith(f"no lock is known for `{prefix}/bin/python`: name it with --lock\n")
        return
    assert done.returncode == Exit.DRIFT, done.stderr
    lines = [" ".join(line.split()) for line in done.stderr.splitlines()]
    assert lines[0] == f"error: this environment is not the locked one ({locks[0]})"
    assert lines[1:-1] == [f"of-{lock} locked 1 not found" for lock in locks]


def test_a_copy_beside_a_lock_belongs_to_that_lock(workshop: Workshop, prefix: Path, tmp_path: Path) -> None:
    script = Path(shutil.copy(DRIFT, tmp_path))
    assert "no lock is known" in alone(prefix / "bin/python", script).stderr
    shutil.copy(workshop.lock, tmp_path / "lock.txt")
    done = alone(prefix / "bin/python", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this environment is the locked one (lock): 6 packages, ")


def test_a_lock_that_cannot_be_read_has_its_own_exit_code(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(["--python", str(prefix / "bin/python"), "--lock", "/nowhere/cu130.txt"]) == Exit.LOCK
    assert capsys.readouterr().err.startswith("error: the lock `/nowhere/cu130.txt` cannot be read")


def test_an_undrifted_environment_is_said_to_be_one(
    workshop: Workshop, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main(["--python", str(prefix / "bin/python"), "--lock", str(workshop.lock), "--hashes"]) == Exit.DONE
    assert capsys.readouterr().out.startswith("this environment is the locked one (cu130): 6 packages, ")


# ------------------------------------------------------------------------------------------------------ the file itself


def test_the_gate_needs_the_standard_library_alone() -> None:
    tree = ast.parse(DRIFT.read_text(encoding="utf-8"))
    roots = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert roots - {"env"} <= sys.stdlib_module_names


def test_no_module_of_env_hides_one_of_the_standard_library() -> None:
    """`python3 env/drift.py` searches `env/` first."""
    assert not {path.stem for path in DRIFT.parent.glob("[!_]*")} & sys.stdlib_module_names


def test_the_environment_that_runs_the_tests_is_the_locked_one_where_it_was_made_from_locks() -> None:
    if not (Path(sys.prefix) / drift.STAMP).exists():
        pytest.skip("this Python's environment was not made by `nox`")
    locks = [ROOT / "requirements" / f"{name}.txt" for name in (_variant(), "dev")]
    found = drift.compare(Path(sys.executable), locks, environ={})
    assert not found, str(drift.failure(found, _variant()))


def _variant() -> str:
    return "cu" + drift.torch_build(Path(drift.interpreter(Path(sys.executable)).sites[0]))["cuda"].replace(".", "")
