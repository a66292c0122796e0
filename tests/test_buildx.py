"""What a build failed of, in one sentence, out of what BuildKit prints; and that one which is told to stop stops."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from env import buildx
from env.errors import Exit, Failure


def broken(status: int, *said: str) -> list[str]:
    """BuildKit's words for a step that ends so, beside another one that goes on about something else."""
    return [
        "#19 [tools 2/2] RUN --mount=type=secret,id=index /tools/tools /layer\n",
        *(f"#20 1.40{number} {line}\n" for number, line in enumerate(said)),
        "#21 1.502 Unpacking gcc, 503 files; error: in another step: unauthorized\n",
        f'#20 ERROR: process "/bin/sh -c /bake/bake /caches" did not complete successfully: exit code: {status}\n',
        "------\n",
        " > [bake 3/3] RUN --network=none /bake/bake /caches:\n",
        *(f"1.40{number} {line}\n" for number, line in enumerate(said)),
        "------\n",
        f'ERROR: failed to solve: process "/bin/sh -c /bake/bake /caches" did not complete: exit code: {status}\n',
    ]


@pytest.mark.parametrize(
    ("output", "code", "sentence", "detail"),
    [
        (
            broken(1, "Unpacking gcc", "sh: 1: nothing: not found"),
            Exit.BUG,
            "a step of the build failed with exit code 1",
            "sh: 1: nothing: not found",
        ),
        (broken(137), Exit.BUG, "a step of the build failed with exit code 137", None),
        (
            broken(2, "error: no configuration is called `x`", "  presets are y", "hint: `z`"),
            Exit.USAGE,
            "the build stopped: no configuration is called `x`",
            "presets are y",
        ),
        (
            broken(5, "trying: timed out", "error: there is no compiler", "hint: install one"),
            Exit.HOST,
            "the build stopped: there is no compiler",
            None,
        ),
        (
            broken(2, "error: Failed to fetch: `https://index.example/simple/torch/`"),
            Exit.UNREACHABLE,
            "no package index answers",
            "error: Failed to fetch: `https://index.example/simple/torch/`",
        ),
        (
            broken(1, "  x No solution found", "  Because torch was not found in the package registry, …"),
            Exit.LOCK,
            "the requirements cannot be met",
            "x No solution found",
        ),
        (
            broken(1, "OSError: [Errno 28] No space left on device"),
            Exit.STORAGE,
            "the disk is full",
            "OSError: [Errno 28] No space left on device",
        ),
        (broken(99, "error: what nobody knows"), Exit.BUG, "the build stopped: what nobody knows", None),
        (
            [
                "#20 1.403 Unpacking gcc: no such host, unauthorized\n",
                '#22 ERROR: failed to push 127.0.0.1:9/x:1: Head "https://127.0.0.1:9/v2/": connection refused\n',
            ],
            Exit.UNREACHABLE,
            "the registry does not answer",
            '#22 ERROR: failed to push 127.0.0.1:9/x:1: Head "https://127.0.0.1:9/v2/": connection refused',
        ),
        (
            ["#20 1.403 denied\n", "ERROR: failed to solve: what nobody has seen\n"],
            Exit.BUG,
            "`docker buildx build …` failed with exit code 1",
            "ERROR: failed to solve: what nobody has seen",
        ),
        (
            ["ERROR: Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?\n"],
            Exit.HOST,
            "the container engine does not answer",
            "ERROR: Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
        ),
        (["unknown flag: --x\n"], Exit.BUG, "`docker buildx build …` failed with exit code 1", "unknown flag: --x"),
    ],
)
def test_a_build_s_failure_is_told_by_the_step_that_broke_or_else_by_buildx(
    output: list[str], code: Exit, sentence: str, detail: str | None
) -> None:
    failure = buildx.explain(["docker", "buildx", "build", "."], 1, output)
    assert (failure.code, failure.message) == (code, sentence)
    if detail is not None:
        assert any(line.startswith(detail.rstrip("…")) for line in failure.details), failure.details


def test_what_a_step_of_ours_says_keeps_its_way_out() -> None:
    output = broken(5, "error: there is no compiler", "hint: install one", "compilation goes on")
    assert buildx.explain(["docker"], 1, output).hint == "install one"


class Gone(io.StringIO):
    """A standard error whose reader goes away."""

    def write(self, text: str) -> int:
        if text == "said\n":
            raise BrokenPipeError
        return super().write(text)


def test_a_build_that_does_not_heed_a_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buildx, "PATIENCE", 0.2)
    monkeypatch.setattr(sys, "stderr", Gone())
    words = ["sh", "-c", f"trap '' TERM; echo $$ >{tmp_path}/pid; echo said; while :; do sleep 0.05; done"]
    with pytest.raises(BrokenPipeError):
        buildx.run(words)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_build_s_words_are_shown_and_its_failure_is_raised(capfd: pytest.CaptureFixture[str]) -> None:
    buildx.run(["sh", "-c", "echo one; echo two >&2"])
    assert capfd.readouterr().err.splitlines()[1:] == ["one", "two"]
    with pytest.raises(Failure, match="the registry does not answer"):
        buildx.run(["sh", "-c", "echo 'ERROR: no such host'; exit 3"])
