from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from engine import REQUIRED, Engine, engine, give_up, missing

pytestmark = pytest.mark.image


def test_an_image_goes_from_one_engine_through_the_registry_to_another(
    docker_engine: Engine, empty_engine: Engine, loopback_registry: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("content")
    layer = tmp_path / "layer.tar"
    subprocess.run(["tar", "-cf", layer, "-C", tmp_path, "file"], check=True)
    name = f"{loopback_registry}/small"
    docker_engine.docker("import", layer, name)
    docker_engine.docker("push", name)
    assert name not in empty_engine.docker("images", "--format", "{{.Repository}}").stdout
    empty_engine.docker("pull", name)
    assert name in empty_engine.docker("images", "--format", "{{.Repository}}").stdout


def test_an_engine_leaves_nothing_behind_even_if_its_block_fails(tmp_path: Path) -> None:
    if missing():
        give_up(missing())
    with pytest.raises(ZeroDivisionError), engine(Path("/tmp")) as made:  # noqa: PT012  # what else should fail?
        folder = made.folder
        assert (folder / "data").is_dir()
        raise ZeroDivisionError
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mounts").read_text()


def test_what_cannot_be_run_is_skipped_and_a_failure_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no disk"):
        give_up("no disk")
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="no disk"):
        give_up("no disk")
