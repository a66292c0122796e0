from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wheelhouse import Wheelhouse, only

from env import lock, variants
from env.drift import read_lock
from env.errors import Exit, Failure

MATRIX = variants.load()
ON_LINUX = "platform_system == 'Linux'"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, tools: Path) -> Path:
    """An index of a few made-up packages that bear the real names, and a folder like ours that was locked from it."""
    place = tmp_path_factory.mktemp("template")
    house = Wheelhouse(place / "index")
    house.add("torch", "2.10.0", [f"triton==3.6.0; {ON_LINUX}", f"nvidia-cublas-cu12==12.8.4.1; {ON_LINUX}"])
    for version, triton, toolkit in (("2.11.0", "3.6.0", "13.0.2"), ("2.15.0", "3.9.0", "13.2.2")):
        needs = [f"triton=={triton}; {ON_LINUX}", f"cuda-toolkit[cublas]=={toolkit}; {ON_LINUX}", "numpy"]
        house.add("torch", version, needs)
        house.add("triton", triton)
    for version, cublas in (("13.0.2", "13.1.0.*"), ("13.2.2", "13.4.*")):
        house.add("cuda-toolkit", version, [f"nvidia-cublas=={cublas}; extra == 'cublas'\nProvides-Extra: cublas"])
    house.add("nvidia-cublas-cu12", "12.8.4.1")
    for version in ("13.1.0.3", "13.4.1.3"):
        house.add("nvidia-cublas", version)
    for name in ("numpy", "rich", "pytest", "nox"):
        house.add(name, "1.0")
    folder = place / "requirements"
    folder.mkdir()
    (folder / "train.in").write_text("numpy\nrich  # colours\n")
    (folder / "dev.in").write_text("-c cu128.txt\n-c cu130.txt\n-c cu132.txt\npytest\nnumpy\n")
    (folder / "tools.in").write_text("nox\n")
    (folder / "images.in").write_text("rich\n")
    with pytest.MonkeyPatch.context() as patch, house.served() as address:
        only(address, place, patch)
        assert lock.write(folder) == 0
    return place


@pytest.fixture
def locked(tmp_path: Path, template: Path, package_index: Wheelhouse) -> Path:
    """The locked folder, to be changed at will; so is the index."""
    shutil.copytree(template / "index", package_index.folder, dirs_exist_ok=True)
    return Path(shutil.copytree(template / "requirements", tmp_path / "requirements"))


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def refusal(folder: Path) -> Failure:
    with pytest.raises(Failure) as caught:
        lock.check(folder)
    assert caught.value.code == Exit.LOCK
    assert "`nox -s lock`" in str(caught.value.hint)
    return caught.value


@pytest.fixture
def no_network(package_index: Wheelhouse, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be asked of any index while the test runs."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    package_index.asked.clear()
    yield
    assert package_index.asked == []


def test_the_committed_locks_are_what_nox_s_lock_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.check(lock.FOLDER) == 0
    assert "as locked, and right for Python 3.11, 3.12, 3.13" in capsys.readouterr().out


def test_the_committed_inputs_of_variants_derive_from_the_matrix() -> None:
    for variant in MATRIX.variants.values():
        assert (lock.FOLDER / f"{variant.name}.in").read_text() == lock.variant_input(variant)


def test_locks_name_no_index_and_no_folder_of_the_machine_that_made_them(locked: Path) -> None:
    for folder in (locked, lock.FOLDER):
        for name, text in contents(folder).items():
            assert "://" not in text, name
            assert "/home" not in text, name
            assert str(locked.parent) not in text, name


def test_the_same_inputs_give_the_same_bytes(locked: Path) -> None:
    before = contents(locked)
    assert lock.write(locked) == 0
    assert contents(locked) == before


def test_a_newer_version_on_the_index_moves_nothing_by_itself(locked: Path, package_index: Wheelhouse) -> None:
    before = contents(locked)
    package_index.add("numpy", "1.1")
    assert lock.write(locked) == 0
    assert contents(locked) == before


def test_upgrade_package_moves_that_package_alone_and_prints_what_moved(
    locked: Path, package_index: Wheelhouse, capsys: pytest.CaptureFixture[str]
) -> None:
    package_index.add("numpy", "1.1")
    package_index.add("rich", "1.1")
    capsys.readouterr()
    assert lock.write(locked, packages=["Numpy"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: numpy 1.0 -> 1.1" for name in ("cu130", "cu128", "cu132", "dev")
    ]
    assert {pin.version for pin in read_lock(locked / "cu130.txt") if pin.name == "rich"} == {"1.0"}
    assert lock.check(locked) == 0


def test_upgrade_moves_all(locked: Path, package_index: Wheelhouse, capsys: pytest.CaptureFixture[str]) -> None:
    package_index.add("numpy", "1.1")
    package_index.add("rich", "1.1")
    capsys.readouterr()
    assert lock.write(locked, upgrade=True) == 0
    moved = capsys.readouterr().out
    assert "cu128: numpy 1.0 -> 1.1\ncu128: rich 1.0 -> 1.1\n" in moved


def test_a_package_that_no_lock_holds_cannot_be_upgraded(locked: Path) -> None:
    with pytest.raises(Failure, match="no lock holds `nunpy`") as caught:
        lock.write(locked, packages=["nunpy"])
    assert caught.value.code == Exit.USAGE


def test_checking_needs_no_network(locked: Path, no_network: None) -> None:
    assert lock.check(locked) == 0


def test_a_stale_lock_is_refused_with_what_was_asked_for_since(locked: Path) -> None:
    edit(locked / "train.in", "rich", "einops")
    details = refusal(locked).details
    assert "cu130: stale: `einops` is asked for since it was locked" in details
    assert "cu128: stale: `rich` is no longer asked for" in details


def test_a_comment_in_the_inputs_makes_no_lock_stale(locked: Path) -> None:
    edit(locked / "train.in", "# colours", "# tables and progress")
    assert lock.check(locked) == 0


def test_an_input_that_is_not_the_matrix_s_is_refused(locked: Path) -> None:
    edit(locked / "cu130.in", "torch==2.11.0", "torch==2.12.0")
    assert "cu130: cu130.in is not what env/variants.toml says (torch==2.11.0)" in refusal(locked).details


def test_a_lock_made_for_another_matrix_is_stale(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = variants.MATRIX.read_text().replace('"2.11.0"', '"2.12.0"').replace('"3.13"]', '"3.13", "3.14"]')
    monkeypatch.setattr(variants, "load", lambda: variants.parse(text))
    details = refusal(locked).details
    assert "cu130: stale: `torch==2.12.0` is asked for since it was locked" in details
    assert "tools: stale: `Python 3.14` is asked for since it was locked" in details


def test_an_edit_to_an_older_version_that_would_resolve_is_refused_and_undone(
    locked: Path, package_index: Wheelhouse
) -> None:
    """uv by itself takes the edited pin for the one to keep: it resolves to the same bytes."""
    before = contents(locked)
    older = package_index.add("rich", "0.9")
    lines = (locked / "cu130.txt").read_text().splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith("rich=="))
    lines[start] = lines[start].replace("1.0", "0.9")
    lines[start + 1] = f"    --hash={older}\n"
    (locked / "cu130.txt").write_text("".join(lines))
    details = refusal(locked).details
    assert any(line.startswith("cu130: edited: `rich==1.0 ; ") and "was locked and is gone" in line for line in details)
    assert any(line.startswith("cu130: edited: `rich==0.9 ; ") and "was never locked" in line for line in details)
    assert lock.write(locked) == 0
    assert contents(locked) == before


def test_an_edited_hash_is_refused_and_undone(locked: Path) -> None:
    before = contents(locked)
    digest = next(pin.hashes[0] for pin in read_lock(locked / "dev.txt") if pin.name == "pytest")
    edit(locked / "dev.txt", digest, "sha256:" + "0" * 64)
    assert [line.partition(" ;")[0] for line in refusal(locked).details] == ["dev: edited: hashes of `pytest==1.0"]
    assert lock.write(locked) == 0
    assert contents(locked) == before


def test_a_missing_lock_and_a_record_that_cannot_be_read_are_refused(locked: Path) -> None:
    (locked / "cu132.txt").unlink()
    assert "cu132: never locked" in refusal(locked).details
    (locked / lock.RECORD).write_text('{"cu130": {"pins": 1}}')
    with pytest.raises(Failure, match=r"locks.json is not what `nox -s lock` wrote"):
        lock.check(locked)


def test_what_is_asked_for_and_is_not_there_is_a_sentence(locked: Path) -> None:
    (locked / "cu130.in").unlink()
    assert "cu130: cu130.in is not what env/variants.toml says (torch==2.11.0)" in refusal(locked).details
    (locked / "tools.in").unlink()
    for act in (lock.check, lock.write):
        with pytest.raises(Failure, match=r"tools\.in cannot be read: No such file or directory") as caught:
            act(locked)
        assert caught.value.code == Exit.LOCK
        assert caught.value.hint == "`git checkout -- requirements/tools.in` brings it back"


@pytest.mark.parametrize(
    "text", ["<<<<<<< ours\n", "[]", '{"cu130": {"inputs": [], "pins": 1, "requires": {}}}', "\xff"]
)
def test_a_record_that_cannot_be_read_is_refused(locked: Path, text: str) -> None:
    (locked / lock.RECORD).write_text(text, encoding="latin-1")
    with pytest.raises(Failure, match=r"locks.json is not what `nox -s lock` wrote") as caught:
        lock.check(locked)
    assert caught.value.hint == "`nox -s lock`"


def conflict(text: str) -> str:
    return f"<<<<<<< ours\n{text}=======\n>>>>>>> theirs\n"


def without_a_hash(text: str) -> str:
    return text.partition("    --hash=")[0].rstrip(" \\\n") + "\n"


def twice(text: str) -> str:
    return text + text


@pytest.mark.parametrize("damage", [conflict, without_a_hash, twice, lambda _: "\xff"])
def test_a_damaged_lock_is_made_anew_as_it_was_although_the_index_has_moved_on(
    locked: Path, package_index: Wheelhouse, capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]
) -> None:
    before = contents(locked)
    package_index.add("rich", "1.1")
    (locked / "cu130.txt").write_text(damage(before["cu130.txt"]), encoding="latin-1")
    with pytest.raises(Failure) as caught:
        lock.check(locked)
    assert "`nox -s lock`" in str(caught.value.hint)
    capsys.readouterr()
    assert lock.write(locked) == 0
    assert contents(locked) == before
    told = capsys.readouterr()
    assert told.out == ""
    assert ("; cu130 is made anew from the record\n" in told.err) == (damage is not twice)


def test_a_damaged_record_is_made_anew_and_that_versions_may_move_is_said(
    locked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(locked)
    (locked / lock.RECORD).write_text(conflict(before[lock.RECORD]))
    assert lock.write(locked) == 0
    assert contents(locked) == before
    told = capsys.readouterr().err
    assert "locks.json is not what `nox -s lock` wrote" in told
    assert "without it no version counts as locked, and each may move" in told


@pytest.mark.parametrize("line", ["--extra-index-url http://evil.example/simple", "  -f /wheels", "--pre"])
def test_an_option_in_a_lock_is_refused_and_taken_out(locked: Path, line: str) -> None:
    before = contents(locked)
    (locked / "cu130.txt").write_text(f"{line}\n{before['cu130.txt']}")
    assert refusal(locked).details == ("cu130: edited: line 1 is an option, and a lock has pins only",)
    assert lock.write(locked) == 0
    assert contents(locked) == before


def test_a_further_index_that_uv_is_told_of_has_no_say_and_that_is_said(
    locked: Path, package_index: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    before = contents(locked)
    other = Wheelhouse(tmp_path / "other")
    other.add("rich", "1.2")
    with other.served() as address:
        monkeypatch.setenv("UV_EXTRA_INDEX_URL", address)
        assert lock.write(locked, upgrade=True) == 0
    assert contents(locked) == before
    assert "UV_EXTRA_INDEX_URL has no say here: locks are made from the main index alone" in capsys.readouterr().err


def test_the_variants_agree_wherever_torch_lets_them(locked: Path, package_index: Wheelhouse) -> None:
    package_index.add("numpy", "1.1")
    shutil.copy(locked / "cu130.txt", locked / "kept.txt")
    (locked / "cu128.txt").unlink()
    assert lock.write(locked) == 0
    assert {pin.version for pin in read_lock(locked / "cu128.txt") if pin.name == "numpy"} == {"1.0"}


def test_a_set_that_brings_a_second_cuda_is_not_written(locked: Path, package_index: Wheelhouse) -> None:
    before = contents(locked)
    package_index.add("flashinfer", "0.6.1", ["nvidia-cublas-cu12"])
    (locked / "train.in").write_text("numpy\nrich\nflashinfer\n")
    with pytest.raises(Failure, match="uv's set for cu130 is not one that we can use") as caught:
        lock.write(locked)
    assert "Python 3.11 on x86_64: nvidia-cublas-cu12 is for CUDA 12; cu130 is CUDA 13.0" in caught.value.details
    assert contents(locked) == before | {"train.in": "numpy\nrich\nflashinfer\n"}


def test_what_cannot_be_resolved_is_refused_and_nothing_is_written(locked: Path) -> None:
    (locked / "train.in").write_text("numpy>=7\nrich\n")
    before = contents(locked)
    with pytest.raises(Failure, match="the requirements cannot be met") as caught:
        lock.write(locked)
    assert caught.value.code == Exit.LOCK
    assert contents(locked) == before


def test_an_index_that_does_not_answer_is_named_as_the_reason(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with pytest.raises(Failure, match="no package index answers") as caught:
        lock.write(locked)
    assert caught.value.code == Exit.UNREACHABLE


def test_pip_tools_accepts_the_set_that_uv_chose(locked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert lock.cross_check(locked) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cu128: pip-tools accepts the same 5 packages",
        "cu130: pip-tools accepts the same 6 packages",
        "cu132: pip-tools accepts the same 6 packages",
    ]


def test_a_package_that_only_one_resolver_installs_is_a_disagreement(locked: Path) -> None:
    text = (locked / "cu128.txt").read_text()
    start = text.index("triton==")
    (locked / "cu128.txt").write_text(text[:start])
    with pytest.raises(Failure, match="uv and pip-tools disagree about cu128") as caught:
        lock.cross_check(locked)
    assert caught.value.details == ("triton: uv leaves it out, pip-tools 3.6.0",)


def test_a_set_that_pip_tools_cannot_resolve_is_refused_with_its_words(locked: Path) -> None:
    edit(locked / "cu128.txt", "triton==3.6.0", "triton==3.9.0")
    with pytest.raises(Failure, match="pip-tools does not accept the set of cu128") as caught:
        lock.cross_check(locked)
    assert caught.value.code == Exit.LOCK
    assert any("triton" in line or "ResolutionImpossible" in line for line in caught.value.details)


def test_the_command_line_chooses_what_is_done(
    locked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "FOLDER", locked)
    assert lock.main(["--check"]) == Exit.DONE
    edit(locked / "tools.in", "nox", "tox")
    assert lock.main(["--check"]) == Exit.LOCK
    assert "error: tools is not what `nox -s lock` writes\n  tools: stale: `nox`" in capsys.readouterr().err.replace(
        "stale: `tox` is asked for since it was locked\n  tools: ", ""
    )
    assert lock.main(["--upgrade-package", "left-pad"]) == Exit.USAGE
    with pytest.raises(SystemExit, match="2"):
        lock.main(["--check", "--upgrade"])
