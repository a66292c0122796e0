"""What an operator copies is checked by its own tool, or by its published schema where the tool cannot be had."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operators import check, checkers

from env import entry, variants
from env.errors import Exit
from env.variants import ROOT

__all__ = ["checkers"]

DOCKER = ROOT / "docker"
PIN = "registry.example/team/dflash@sha256:" + "a" * 64
WORKFLOW = ROOT / ".github" / "workflows" / "images.yml"


def scripts() -> Iterator[Path]:
    """Everything that a shell runs."""
    for place in (DOCKER, ROOT / ".ci"):
        for path in sorted(place.rglob("*")):
            if path.is_file() and re.match(rb"#!.*\b(ba)?sh\b", path.read_bytes()[:40]):
                yield path


def yaml(checkers: Path, path: Path) -> list[Any]:
    """The documents of a YAML file, read where there is a reader of YAML."""
    program = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1]))), default=str))"
    done = subprocess.run([checkers / "python", "-c", program, path], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("script", [*scripts()], ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_hold_against_shellcheck(checkers: Path, script: Path) -> None:
    if not (checkers / "shellcheck").exists():
        pytest.skip("there is no shellcheck for this machine")
    # options that a variable lists are meant to be split (SC2086, an "info")
    check(checkers / "shellcheck", "--severity=warning", "--exclude", "SC2164", script)


def test_the_dockerfile_holds_against_hadolint(checkers: Path) -> None:
    file = DOCKER / "Dockerfile"
    if not file.exists():
        pytest.skip("there is no Dockerfile yet")
    # the base decides which versions of Debian's packages there are; its digest is pinned (DL3006, DL3008)
    check(checkers / "hadolint", "--ignore", "DL3006", "--ignore", "DL3008", file)


# ------------------------------------------------------------------------------------------------------------- compose


def test_the_compose_file_holds_against_its_specification(checkers: Path) -> None:
    check(checkers / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")


def test_compose_itself_reads_the_file_and_asks_for_the_image() -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("Docker Compose is not installed")
    command = ["docker", "compose", "-f", str(DOCKER / "compose.yaml"), "config", "--format", "json"]
    bare = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH_")}
    done = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "name it by digest" in done.stderr
    done = subprocess.run(command, env={**bare, "DFLASH_IMAGE": PIN}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["services"]["train"]["image"] == PIN


def test_compose_runs_without_root_network_capabilities_or_a_writable_image(checkers: Path) -> None:
    (file,) = yaml(checkers, DOCKER / "compose.yaml")
    assert set(file["services"]) == {"train", "gpus"}
    for service in file["services"].values():
        assert service["read_only"] is True
        assert service["network_mode"] == "none"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"] == "${DFLASH_UID:-10001}:${DFLASH_GID:-10001}"
        assert service["pull_policy"] == "never"
        assert {volume["target"] for volume in service["volumes"]} == {"/opt/dflash/runs", "/cache"}
    assert file["services"]["train"]["shm_size"] == "64m"


def test_bake_itself_takes_the_base_and_the_packing_that_the_documentation_tells_it() -> None:
    if subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("buildx is not installed")
    text = (ROOT / "docs" / "images.md").read_text()
    found = re.search(r"^\$ (docker buildx bake (?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None
    done = subprocess.run(["bash", "-c", f"{found[1]} --print"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (target,) = json.loads(done.stdout)["target"].values()
    assert target["contexts"] == {"base": "oci-layout://…@sha256:…"}
    assert "compression=zstd" in json.dumps(target["output"])


# ---------------------------------------------------------------------------------------------------------- kubernetes


def test_the_kubernetes_job_holds_against_the_published_schema(checkers: Path) -> None:
    check(checkers / "kubernetes-validate", "--strict", DOCKER / "kubernetes" / "job.yaml")


def test_a_kubernetes_job_with_a_misspelt_field_is_seen(checkers: Path, tmp_path: Path) -> None:
    text = (DOCKER / "kubernetes" / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("readOnlyRootFilesystem", "readonlyRootFilesystem"))
    with pytest.raises(AssertionError, match="readonlyRootFilesystem"):
        check(checkers / "kubernetes-validate", "--strict", tmp_path / "job.yaml")


def test_the_kubernetes_job_is_unprivileged_and_its_counts_agree(checkers: Path) -> None:
    service, job = yaml(checkers, DOCKER / "kubernetes" / "job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(values["PET_NNODES"])
    assert values["PET_RDZV_ENDPOINT"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


def test_the_kubernetes_job_gives_up_at_once_on_what_another_try_would_not_mend(checkers: Path) -> None:
    _, job = yaml(checkers, DOCKER / "kubernetes" / "job.yaml")
    final = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    mended_by_waiting = {Exit.DONE, Exit.BUG, Exit.STORAGE, Exit.UNREACHABLE, Exit.INTERRUPTED, Exit.TERMINATED}
    assert {*final} == {int(code) for code in Exit} - mended_by_waiting


# --------------------------------------------------------------------------------------------------------------- slurm


# Each task gets its number; what runs on every node runs once here. In a container, the image's programs are stand-ins,
# too; with the image's entrypoint, which begins with tini, pyxis would wait for ever.
SRUN = """\
echo "srun $*" >>"$CALLS"
options=" "
while [[ $1 == -* ]]; do options+="$1 "; shift; done
if [[ $options == *" --container-image="* ]]; then
    [[ $options == *" --no-container-entrypoint "* && $options != *" --container-entrypoint "* ]] || exit 9
    set -- "${@//\\/opt\\/dflash\\/docker\\/}"
fi
SLURM_NODEID=1 exec "$@\""""

# What enroot's importer takes as an engine's image, and no image that the engine was not told of by this name.
ENROOT = """\
echo "enroot $*" >>"$CALLS"
[[ ${!#} =~ ^dockerd://([[:alnum:]/._:-]+)$ ]] || { echo "Invalid image reference: ${!#}" >&2; exit 1; }
grep -q "^docker tag .* ${BASH_REMATCH[1]}$" "$CALLS"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Slurm's programs and a container's, as scripts that write down how they were called."""
    made = tmp_path / "bin"
    made.mkdir()
    programs = {
        "scontrol": "seq -f node%g 7 20000",  # more than a pipe holds: who stops reading after the first would end it
        "srun": SRUN,
        "apptainer": 'echo "apptainer $*" >>"$CALLS"',
        "entrypoint": 'echo "entrypoint $*" >>"$CALLS"; exec "$@"',
        "nox": 'echo "nox $*; ${PET_NNODES-} ${PET_NODE_RANK-} ${PET_RDZV_ENDPOINT-} ${PET_RDZV_ID-}" >>"$CALLS"',
        "docker": 'echo "docker $*" >>"$CALLS"',
        "enroot": ENROOT,
        "sbatch": 'echo "sbatch $DFLASH_IMAGE $*" >>"$CALLS"',
    }
    for name, text in programs.items():
        (made / name).write_text(f"#!/bin/bash\nset -eu\n{text}\n")
        (made / name).chmod(0o755)
    return {
        "PATH": f"{made}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "DFLASH_IMAGE": "/shared/dflash",
        "DFLASH_RUNS": str(tmp_path / "runs"),
        "DFLASH_CACHE": str(tmp_path / "cache"),
    }


def submit(script: str, cluster: dict[str, str]) -> list[str]:
    """Run a batch script as Slurm does, on its first node; the calls that it made."""
    command = ["bash", str(DOCKER / "slurm" / script), "--config", "qwen3-8b", "--topology", "10:6"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(cluster["CALLS"]).read_text().splitlines()


def test_the_pyxis_script_starts_one_task_a_node_with_torchrun_s_variables(cluster: dict[str, str]) -> None:
    calls = submit("pyxis.sbatch", cluster)
    (start,) = [call for call in calls if "--container-image" in call]
    assert "--container-image=/shared/dflash " in start
    assert f"--container-mounts={cluster['DFLASH_RUNS']}:/opt/dflash/runs,{cluster['DFLASH_CACHE']}:/cache" in start
    assert "nox -s train -- --config qwen3-8b --topology 10:6; 2 1 node7:29400 4711" in calls
    (entered,) = [call.split()[1:] for call in calls if call.startswith("entrypoint ")]
    assert entry.guarded(entered)  # so that a host that does not fit is refused
    assert os.access(DOCKER / "entrypoint", os.X_OK)
    assert not Path(cluster["DFLASH_CACHE"]).exists()


def test_the_apptainer_script_starts_one_task_a_node_with_torchrun_s_variables(cluster: dict[str, str]) -> None:
    calls = submit("apptainer.sbatch", cluster)
    (run,) = [call for call in calls if call.startswith("apptainer run")]
    assert "--env PET_NNODES=2,PET_RDZV_ID=4711,PET_RDZV_ENDPOINT=node7:29400,HF_HUB_OFFLINE=1,PET_NODE_RANK=1" in run
    assert run.endswith("/shared/dflash nox -s train -- --config qwen3-8b --topology 10:6")
    assert "--containall" in run


@pytest.mark.parametrize("script", ["pyxis.sbatch", "apptainer.sbatch"])
def test_what_a_batch_script_says_to_do_before_goes_through(script: str, cluster: dict[str, str]) -> None:
    lines = (DOCKER / "slurm" / script).read_text().splitlines()
    told = "\n".join(line[4:] for line in lines if line.startswith("#   "))
    done = subprocess.run(["bash", "-euc", told], env=cluster, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = Path(cluster["CALLS"]).read_text().splitlines()
    assert calls[0].startswith("nox -s pull -- registry.example/team/dflash@sha256:... --key cosign.pub;")
    made = "dflash.sqsh" if script.startswith("pyxis") else "dflash.sif"
    assert made in calls[-2]
    assert calls[-1].startswith(f"sbatch /shared/{made} --nodes 2 docker/slurm/{script} --config ")


@pytest.mark.parametrize("script", ["pyxis.sbatch", "apptainer.sbatch"])
def test_a_batch_script_without_an_image_says_so_before_anything_is_started(
    script: str, cluster: dict[str, str]
) -> None:
    del cluster["DFLASH_IMAGE"]
    done = subprocess.run(["bash", DOCKER / "slurm" / script], env=cluster, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DFLASH_IMAGE" in done.stderr
    assert not Path(cluster["CALLS"]).exists()


@pytest.mark.parametrize("script", ["pyxis.sbatch", "apptainer.sbatch"])
def test_slurm_reads_every_option_of_a_batch_script(script: str) -> None:
    """Options end where the first command stands, and Slurm passes over later ones in silence."""
    lines = (DOCKER / "slurm" / script).read_text().splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(options) < min(commands)
    for number in options:
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number])
    if shutil.which("sbatch"):
        check(Path(str(shutil.which("sbatch"))), "--test-only", DOCKER / "slurm" / script)


# ------------------------------------------------------------------------------------------------------------ workflow


def test_the_workflow_holds_against_the_published_schema(checkers: Path) -> None:
    check(checkers / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW)


def test_every_action_is_pinned_by_commit_with_its_version_beside() -> None:
    used = [line.strip() for line in WORKFLOW.read_text().splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.fullmatch(r"(- )?uses: [a-z-]+/[a-z-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+", line)


def test_the_workflow_s_shell_holds_against_shellcheck(checkers: Path, tmp_path: Path) -> None:
    (file,) = yaml(checkers, WORKFLOW)
    runs = [step["run"] for job in file["jobs"].values() for step in job["steps"] if "run" in step]
    assert not any("${{" in run for run in runs), "what an event says must come through a variable, never into a script"
    for number, run in enumerate(runs):
        (tmp_path / f"{number}").write_text(f"#!/bin/bash\nset -eo pipefail\n{run}")
        check(checkers / "shellcheck", "--exclude", "SC2086", tmp_path / f"{number}")


def test_the_workflow_serves_every_variant_and_calls_sessions_that_there_are(checkers: Path) -> None:
    (file,) = yaml(checkers, WORKFLOW)
    assert file["permissions"] == {"contents": "read"}
    assert file["jobs"]["image"]["strategy"]["matrix"]["variant"] == sorted(variants.load().variants)
    sessions = set(re.findall(r"noxfile\.py -s ([a-z]+)", WORKFLOW.read_text()))
    there = set(re.findall(r"^def ([a-z]+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    assert sessions <= there


def test_secrets_reach_the_steps_that_talk_to_the_registry_and_the_key_the_one_that_signs(checkers: Path) -> None:
    (file,) = yaml(checkers, WORKFLOW)
    steps = {step["name"]: json.dumps(step) for step in file["jobs"]["image"]["steps"] if "name" in step}
    talking = [name for name, text in steps.items() if re.search(r"-s (push|pull) |--inspect ", text)]
    assert talking == ["Push and sign", "Pull it as a node would"]
    assert [name for name, text in steps.items() if "secrets." in text] == talking
    assert [name for name, text in steps.items() if "secrets.COSIGN" in text] == talking[:1]
    for name in talking:  # where reading needs a login, too
        assert steps[name].index("docker logout") < steps[name].index("docker login") < steps[name].index("noxfile.py")
