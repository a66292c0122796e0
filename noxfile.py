"""Train DFlash drafters in a locked, warm environment.

python3 noxfile.py -s SESSION [-- OPTIONS]    run a session; nothing need be installed but Python 3.11 to 3.13
python3 noxfile.py -l                         list the sessions
python3 noxfile.py -s SESSION -- --help       what a session's program can do

With nox installed, `nox` does the same as `python3 noxfile.py`. What stands after `--` goes to the session's program,
whose exit code is what the shell sees. `--variant cu128|cu130|cu132` after `--` chooses the CUDA set.
"""

# Everything up to the version check must be readable by older Pythons, which are to get a sentence, not a traceback.
import os
import sys

if sys.version_info < (3, 11):
    sys.stderr.write("error: dflash needs Python 3.11 to 3.13; this is %s\n" % sys.version.split()[0])
    sys.stderr.write("hint: run it with a newer one, as in `python3.11 noxfile.py`\n")
    sys.exit(5)

ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, ROOT)  # the `nox` command leaves the noxfile's own folder out

from env import bootstrap  # noqa: E402
from env.errors import Failure, report  # noqa: E402

if __name__ == "__main__":
    sys.exit(bootstrap.main(__file__, __doc__))

import nox  # noqa: E402

nox.options.sessions = ["lint", "typecheck", "tests"]


@nox.session(venv_backend="none")
def train(session: nox.Session) -> None:
    """Train a drafter, evaluate it and export it, in the locked environment: -- --help"""
    run(session, "launch", "dflash", "train", *session.posargs, alone=True)


@nox.session(venv_backend="none")
def data(session: nox.Session) -> None:
    """Prepare chats, rewrite their responses, keep features of them: -- prepare | regenerate | features | prune"""
    run(session, "launch", "dflash", "data", *session.posargs, alone=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests in a variant's environment: -- [--variant V | --all-variants] [pytest's options]"""
    run(session, "tests", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and format with ruff: -- --fix mends what can be mended"""
    run(session, "lint", *session.posargs)


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check types with mypy --strict"""
    run(session, "typecheck", *session.posargs)


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Resolve requirements/*.in into hashed locks: -- [--check | --cross-check | --upgrade | --upgrade-package NAME]"""
    run(session, "lock", *session.posargs)


@nox.session(venv_backend="none")
def bake(session: nox.Session) -> None:
    """Compile a configuration's kernels for GPUs that need not be here: -- --config qwen3-8b --gpu h200"""
    run(session, "bake", *session.posargs)


@nox.session(venv_backend="none")
def base(session: nox.Session) -> None:
    """Make the images' operating system from Debian's packages, the same bytes from the same packages"""
    run(session, "base", *session.posargs)


@nox.session(venv_backend="none")
def image(session: nox.Session) -> None:
    """Build an image of the locked set and compiled kernels: -- [--gpu CARD] [--output WHERE] [--inspect REF]"""
    run(session, "image", *session.posargs)


@nox.session(venv_backend="none")
def verify(session: nox.Session) -> None:
    """Replay one training step from the baked cache, and count every hit and miss: -- [--config NAME] [--harvest]"""
    run(session, "launch", "dflash", "verify", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure against what this machine can do at most, and against peers: -- [NAME...] [--config NAME | --list]"""
    run(session, "launch", "dflash", "bench", *session.posargs)


@nox.session(venv_backend="none")
def cache(session: nox.Session) -> None:
    """Look at compile caches, check them, free them: -- list | verify | explain | prune | trust"""
    run(session, "cache", *session.posargs)


@nox.session(venv_backend="none")
def push(session: nox.Session) -> None:
    """Push an image, sign it, attach its papers, and print its reference by digest: -- REF:TAG --key cosign.key"""
    run(session, "push", *session.posargs, alone=True)


@nox.session(venv_backend="none")
def pull(session: nox.Session) -> None:
    """Verify an image by signature and labels, then pull it by digest: -- REF@sha256:... --key cosign.pub"""
    run(session, "pull", *session.posargs, alone=True)


@nox.session(venv_backend="none")
def rootfs(session: nox.Session) -> None:
    """Make an LXC container's root file system archive from an image: -- IMAGE OUT.tar.zst"""
    run(session, "rootfs", *session.posargs, alone=True)


@nox.session(venv_backend="none")
def audit(session: nox.Session) -> None:
    """Look for known vulnerabilities in the locks, where a feed of them answers: -- [--lock NAME] [--ignore ID]"""
    run(session, "audit", *session.posargs)


@nox.session(venv_backend="none")
def doctor(session: nox.Session) -> None:
    """Say what this machine lacks, and what mends it: -- [--json] [--compare RUN_A RUN_B | --compile | --gpu-row]"""
    run(session, "doctor", *session.posargs)


def run(session: nox.Session, *arguments: str, alone: bool = False) -> None:
    """Run `python -m env ARGUMENTS` with the tools' Python.

    A session that is the only one becomes that program: nox would turn its exit code into 1, kill it 0.8 s after Ctrl-C
    and leave it running on SIGTERM. Among several, it runs as nox's child, so that none is dropped and no failure lost;
    one that must see signals (`alone`) then refuses.
    """
    queued = len(session._runner.manifest)  # noqa: SLF001  # nox has no public word for it
    if queued > 1 and alone:
        session.error(f"`{session.name}` replaces nox, so it must be the only session; run the others by themselves")
    try:
        python = str(bootstrap.ensure_tools())
    except Failure as failure:
        os._exit(report(failure)) if queued == 1 else session.error(str(failure))
    command = [python, "-m", "env", *arguments]
    environ = bootstrap.environment(os.environ)
    if queued == 1:
        os.chdir(session.invoked_from)  # relative paths in the arguments are the user's
        bootstrap.become(command, environ)
    session.run(*command, env=environ, external=True, interrupt_timeout=30.0, terminate_timeout=10.0)
