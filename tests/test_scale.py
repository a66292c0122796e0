from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from env import remote, scale
from env.errors import Exit
from env.variants import ROOT

CLUSTER = scale.Cluster(nodes=100, processes=8, registry=10.0, node=25.0, mirror=10)


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main([]) == 0
    assert f"$ python -m env scale\n{capsys.readouterr().out}```" in (ROOT / "docs" / "scale.md").read_text()


def test_a_reader_who_has_seen_enough_ends_it_without_a_word() -> None:
    command = [sys.executable, "-m", "env", "scale"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait()) == ("", 0)


def test_output_that_has_nowhere_to_go_is_one_sentence() -> None:
    command = [sys.executable, "-m", "env", "scale"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == Exit.STORAGE
    assert done.stderr.startswith("error: cannot write to standard output: No space left on device\n")


def test_its_seconds_are_those_that_were_measured() -> None:
    text = (ROOT / "docs" / "compile.md").read_text()
    steps = [float(step) for step in re.findall(r"\| ([0-9.]+) s \|$", text, re.MULTILINE)]
    assert {scale.COLD, scale.SEEDED, scale.WARM} <= set(steps)
    assert f"{scale.SEAL:.1f} MB" in text


def test_a_registry_sends_the_image_to_each_node_to_each_mirror_or_once() -> None:
    sent = [gigabytes for _, gigabytes, _ in scale.pulls(1000.0, CLUSTER)]
    assert sent == [100.0, 10.0, 1.0]


def test_no_way_is_faster_than_the_slowest_link_that_it_needs() -> None:
    direct, mirrors, peers = (least for _, _, least in scale.pulls(1000.0, CLUSTER))
    assert direct == pytest.approx(80.0)  # 100 GB through 10 Gbit/s
    assert mirrors == pytest.approx(8.0 + 3.2)  # ten times to the mirrors, then ten times from each
    assert peers == pytest.approx(0.8)
    lone = scale.Cluster(nodes=1, processes=1, registry=100.0, node=10.0, mirror=1)
    assert scale.pulls(1000.0, lone)[0][2] == pytest.approx(0.8)  # its own link


def test_an_image_s_own_layers_can_be_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        remote, "manifest", lambda image: {"layers": [{"size": 4_000_000}, {"size": 32}, {"size": 2_000_000}]}
    )
    assert scale.main(["--image", "registry.example/x:1", "--nodes", "10", "--mirror", "5"]) == 0
    out = capsys.readouterr().out
    assert "the image, 6 MB" in out
    assert "after an edit, 2.0 MB" in out
    with pytest.raises(SystemExit):
        scale.main(["--nodes", "0"])
