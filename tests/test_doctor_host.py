"""A host as facts: gathered from this machine, recorded, read back, and judged whatever is missing of it."""

from __future__ import annotations

import dataclasses
import json
import os
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hosts import everywhere, host, plan, recorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env.doctor import CHECKS, Severity, examine
from env.doctor.facts import environment
from env.doctor.facts.environment import Environment
from env.doctor.host import Host, decode, encode, gather
from env.errors import Exit, Failure
from env.variants import Variant, load


@pytest.fixture(scope="module")
def this() -> Host:
    """This machine; its environment is not hashed, which has tests of its own and takes seconds."""
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(environment, "find", lambda variant: Environment())
        patched.setenv("CXX", "/nowhere/g++")
        return gather(load().variant())


def test_this_machine_gives_every_group_of_facts_and_no_trouble(this: Host) -> None:
    assert this.trouble == {}
    for field in dataclasses.fields(Host):
        if field.name not in ("trouble", "origin"):
            assert getattr(this, field.name) is not None, field.name
    assert {folder.role for folder in this.folders} >= {"kernels", "temporary", "project", "runs", "shm"}


def test_the_compiler_that_is_judged_is_the_one_that_a_launch_leaves(this: Host) -> None:
    assert this.compilers is not None
    assert (this.compilers.cxx.command, this.compilers.cxx.named_by) == ("g++", None), "not CXX, which it takes away"


def test_facts_survive_being_recorded(this: Host) -> None:
    assert decode(json.loads(json.dumps(encode(this)))) == this


@pytest.mark.parametrize("name", everywhere())
def test_every_recorded_host_is_judged_without_a_traceback(name: str) -> None:
    for variant in load().variants:
        findings = examine(recorded(name), plan(variant, "qwen3-8b", containers=True))
        assert findings


@pytest.mark.parametrize(
    ("facts", "place"),
    [
        ([], "host: \\[\\] is not"),
        ({"nonsense": 1}, "host.nonsense: unknown"),
        ({"user": {"uid": "zero"}}, "host.user.uid: 'zero'"),
        ({"user": {"uid": True}}, "host.user.uid: True"),
        ({"user": {}}, "host.user: .*uid"),
        ({"folders": {}}, "host.folders"),
        ({"folders": [{"role": "home", "path": 1}]}, "host.folders\\[0\\].path: 1"),
        ({"trouble": {"x": 1}}, "host.trouble.x"),
    ],
)
def test_facts_that_no_host_has_are_refused_by_their_place(facts: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        decode(facts)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a record's field can hold, however absurd."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return st.none() | values(arguments[0])
    if get_origin(kind) is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.fixed_dictionaries({name: values(hint) for name, hint in hints.items()}).map(lambda has: kind(**has))  # type: ignore[operator]
    plausible = {
        str: st.sampled_from(["580.1", "9.0", "home", "kernels", "runs", "shm", "/", "nfs", "noexec", "", "\x1b[31m"]),
        int: st.integers(-1, 2**62),
        float: st.floats(),
        bool: st.booleans(),
    }
    return plausible[kind] | st.text(max_size=8) if kind is str else plausible[kind]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values(Host), st.sampled_from(["tiny", "qwen3-8b"]), st.booleans())
def test_no_host_however_absurd_makes_a_check_raise(seen: Host, config: str, containers: bool) -> None:
    for _, finding in examine(seen, plan(config=config, containers=containers)):
        assert finding.message
        assert finding.severity in Severity


def test_a_host_of_which_nothing_is_known_has_no_error_and_no_ok() -> None:
    findings = examine(Host(), plan(config="tiny"))
    assert findings
    assert {finding.severity for _, finding in findings} == {Severity.UNKNOWN}


def test_a_healthy_host_has_nothing_worse_than_a_note() -> None:
    findings = examine(host(), plan(config="tiny"))
    assert max(finding.severity for _, finding in findings) is Severity.NOTE
    assert len(findings) == len(CHECKS) - 4  # capability, cuda, card-memory and containers have nothing to judge


def test_checks_have_names_of_their_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


# The environment's gate.


def test_an_environment_that_is_not_made_is_a_note_that_says_what_makes_it() -> None:
    (name, finding) = examine(host(environment=Environment()), plan("cu132"))[-1]
    assert (name, finding.severity) == ("environment", Severity.NOTE)
    assert finding.remedy == "`nox -s train -- --variant cu132` makes it"


def test_a_drifted_environment_is_an_error_with_the_gates_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr(environment, "find", lambda variant: Environment(python=str(python), version="3.11.2"))
    words = Failure(Exit.DRIFT, "this environment is not the locked one (cu130)", details=["torch  a  b"], hint="mend")

    def drifted(variant: Variant, python: Path) -> Failure:
        return words

    monkeypatch.setattr(environment, "compare", drifted)
    seen = gather(load().variant())
    (_, finding) = examine(seen, plan())[-1]
    assert finding.severity is Severity.ERROR
    assert finding.code is Exit.DRIFT
    assert (finding.message, finding.details, finding.remedy) == (words.message, words.details, words.hint)


def test_a_gate_that_cannot_judge_is_unknown_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "find", lambda variant: Environment(python=str(tmp_path / "python")))

    def refuses(variant: Variant, python: Path) -> None:
        raise Failure(Exit.LOCK, "the lock is cut short")

    monkeypatch.setattr(environment, "compare", refuses)
    (_, finding) = examine(gather(load().variant()), plan())[-1]
    assert finding.severity is Severity.UNKNOWN
    assert finding.details == ("Failure: error: the lock is cut short",)


def test_a_made_environment_is_found_and_its_interpreter_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from env import environment as made

    python = tmp_path / "python"
    monkeypatch.setattr(made, "python_of", lambda variant: python)
    assert environment.find(load().variant()) == Environment()
    python.symlink_to(sys.executable)
    seen = environment.find(load().variant())
    assert seen.version == ".".join(map(str, sys.version_info[:3]))
    assert environment.include_of(seen) == Path(str(seen.include))
    python.unlink()
    python.write_text("#!/bin/sh\necho broken; exit 1\n", encoding="utf-8")
    python.chmod(0o755)
    assert environment.find(load().variant()).version is None
    python.write_text("#!/bin/sh\necho no json\n", encoding="utf-8")
    assert environment.find(load().variant()).version is None


def test_a_really_drifted_environment_ends_with_exit_code_3_and_a_mended_one_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinywheels import Workshop, site

    from env import environment as made
    from env.doctor import main

    workshop = Workshop(tmp_path)
    prefix = workshop.make(tmp_path / "cu130")
    monkeypatch.setattr(made, "python_of", lambda *_: prefix / "bin" / "python")
    monkeypatch.setattr(Variant, "lock", property(lambda variant: workshop.lock))
    asked = ["--only", "environment", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["severity"] == "ok"

    # Same size, same time stamp: only a hash tells, which a launch does not compute and the doctor does.
    library = site(prefix) / "torch/lib/libtorch_cuda.so"
    stat = library.stat()
    library.write_bytes(b"\xff" + library.read_bytes()[1:])
    os.utime(library, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert main(asked) == Exit.DRIFT
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["exit_code"] == Exit.DRIFT
    assert "torch" in finding["details"][0]
    assert "--repair" in finding["remedy"]

    workshop.make(prefix)
    assert main(asked) == 0
