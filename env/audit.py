"""`nox -s audit`: ask a feed of advisories about every pinned package, and never take silence for good news.

pip-audit asks; what is added here is doubt. A feed that does not answer, that skips packages, or that knows nothing of
a release whose vulnerability is public is one that cannot vouch for anything: exit code 10, and no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env import bootstrap, environment, index
from env.building import say
from env.drift import read_lock
from env.errors import Exit, Failure
from env.variants import ROOT

FEED = "https://api.osv.dev/v1/query"
"""OSV gathers the advisories of GitHub, PyPA and others. pip-audit's other source, the package index itself, calls a
package that an index does not tell about "skipped", and exits 0."""

CANARY = ("pyyaml", "5.3")
"""A release with a published vulnerability (CVE-2020-14343): a feed that does not name it is not believed."""

SECONDS = 15
"""For one answer. pip-audit asks for one package after the other."""

WHOLE_SECONDS = 600.0
"""For all answers together: a feed that trickles must not hold a pipeline for ever."""

Release = tuple[str, str]
"""A package's name and version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advisory:
    """One known vulnerability of one release."""

    package: str
    version: str
    ids: tuple[str, ...]
    """Its names in the databases that know it: CVE-..., GHSA-..., PYSEC-..."""
    fixed_in: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed release is named"
        text = self.text if len(self.text) <= 100 else f"{self.text[:99]}…"
        return f"{self.package} {self.version}: {' = '.join(self.ids)}, {fixed}: {text}"


def main(argv: Sequence[str]) -> int:
    """`nox -s audit -- [--lock cu130] [--ignore ID] [--feed URL]`."""
    locks = [path.stem for path in sorted((ROOT / "requirements").glob("*.txt"))]
    parser = argparse.ArgumentParser(prog="nox -s audit --", description="Look for known vulnerabilities in the locks.")
    parser.add_argument("--lock", action="append", choices=locks, help="only this lock; repeatable")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="an advisory to pass; repeatable")
    parser.add_argument("--feed", default=FEED, metavar="URL", help=f"an OSV query service; {FEED} if left out")
    options = parser.parse_args(argv)
    chosen = options.lock or locks
    wanted = releases([ROOT / "requirements" / f"{name}.txt" for name in chosen])
    say(f"asking {options.feed} about {len(wanted)} packages")
    answers = ask([*wanted, CANARY], options.feed)
    found = judge(wanted, answers, options.feed)
    passed = [each for each in found if not set(each.ids).isdisjoint(options.ignore)]
    for each in passed:
        print(f"ignored: {each}")
    for name in set(options.ignore) - {name for each in passed for name in each.ids}:
        print(f"nothing has the id {name}: `--ignore {name}` can go")
    refuse(wanted, [each for each in found if each not in passed])
    rest = f", but for {len(passed)} ignored" if passed else ""
    print(f"{len(wanted)} packages of {', '.join(chosen)}: {options.feed} knows of no vulnerability{rest}")
    return int(Exit.DONE)


def releases(locks: Sequence[Path]) -> dict[Release, tuple[str, ...]]:
    """Every pinned release with the locks that hold it, for every Python and platform: markers are not asked."""
    found: dict[Release, list[str]] = {}
    for lock in locks:
        for pin in read_lock(lock):
            holders = found.setdefault((pin.name, pin.version), [])
            if lock.stem not in holders:
                holders.append(lock.stem)
    return {release: tuple(found[release]) for release in sorted(found)}


def batches(wanted: Sequence[Release]) -> Iterator[list[Release]]:
    """The releases in as few lists as hold no package twice: pip-audit refuses two versions in one file."""
    rest = list(wanted)
    while rest:
        first = {name: (name, version) for name, version in reversed(rest)}
        yield list(first.values())
        rest = [release for release in rest if release not in first.values()]


def ask(wanted: Sequence[Release], feed: str) -> dict[Release, Mapping[str, Any]]:
    """What the feed says of each release, as pip-audit prints it.

    Raises:
        Failure: Exit.UNREACHABLE, when it does not answer, or not as such a feed does.
    """
    python = environment.ensure(None, ["images"])
    environ = bootstrap.environment(os.environ)
    settings = index.uv_environment(environ, index.pip_settings(bootstrap.ensure_tools()))
    environ = {"REQUESTS_CA_BUNDLE": settings["SSL_CERT_FILE"]} | environ if "SSL_CERT_FILE" in settings else environ
    answers: dict[Release, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="dflash-audit-") as scratch:
        for batch in batches(wanted):
            lines = Path(scratch) / "releases.txt"
            lines.write_text("".join(f"{name}=={version}\n" for name, version in batch), encoding="utf-8")
            command = [str(python), "-m", "pip_audit", "--disable-pip", "--no-deps", "--requirement", str(lines)]
            command += ["--vulnerability-service", "osv", "--osv-url", feed, "--timeout", str(SECONDS)]
            command += ["--format", "json", "--progress-spinner", "off", "--cache-dir", scratch]
            for row in _run(command, environ, feed):
                if "vulns" in row:
                    answers[row["name"], row["version"]] = row
    return answers


def _run(command: Sequence[str], environ: Mapping[str, str], feed: str) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, check=False, timeout=WHOLE_SECONDS
        )
        rows = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired as error:
        raise _silent(feed, f"not done within {WHOLE_SECONDS:g} s") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _silent(feed, *done.stderr.strip().splitlines()[-1:]) from error
    return list(rows)


def _silent(feed: str, *why: str) -> Failure:
    return Failure(
        Exit.UNREACHABLE,
        f"the feed of advisories does not answer ({feed}), so nothing is known about the locks",
        # the reason stands at the end
        details=[line if len(line) <= 200 else f"…{line[-199:]}" for line in why],
        hint="check the network and HTTPS_PROXY, or name a mirror: `nox -s audit -- --feed URL`",
    )


def judge(
    wanted: Mapping[Release, tuple[str, ...]], answers: Mapping[Release, Mapping[str, Any]], feed: str
) -> list[Advisory]:
    """What is known of the releases, from answers that also hold the canary's.

    Raises:
        Failure: Exit.UNREACHABLE, when a release was not answered for, or the feed knows nothing of the canary.
    """
    if not answers.get(CANARY, {}).get("vulns"):
        raise Failure(
            Exit.UNREACHABLE,
            f"{feed} knows of no vulnerability in {' '.join(CANARY)}, which is public: its word counts for nothing",
            hint="it is no feed of advisories, or an empty one: `nox -s audit -- --feed URL` asks another",
        )
    silent = [f"{name} {version}" for name, version in wanted if (name, version) not in answers]
    if silent:
        raise Failure(
            Exit.UNREACHABLE,
            f"{feed} did not answer for {len(silent)} of {len(wanted)} packages",
            details=silent[:12],
        )
    return [
        Advisory(
            package=name,
            version=version,
            ids=(vuln["id"], *vuln.get("aliases", ())),
            fixed_in=tuple(vuln.get("fix_versions", ())),
            text=vuln.get("description", ""),
        )
        for name, version in wanted
        for vuln in answers[name, version]["vulns"]
    ]


def refuse(wanted: Mapping[Release, tuple[str, ...]], found: Sequence[Advisory]) -> None:
    """Raise a `Failure` (Exit.LOCK) that names each advisory, unless there is none."""
    if not found:
        return
    hit = sorted({(each.package, each.version) for each in found})
    first = hit[0][0]
    raise Failure(
        Exit.LOCK,
        f"{len(hit)} of {len(wanted)} pinned packages {'has' if len(hit) == 1 else 'have'} known vulnerabilities",
        details=[f"{each} ({', '.join(wanted[each.package, each.version])})" for each in found],
        hint=f"`nox -s lock -- --upgrade-package {first}` moves one; `nox -s audit -- --ignore ID` passes one by",
    )
