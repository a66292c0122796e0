from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from env import audit
from env.errors import Exit, Failure
from env.variants import ROOT

KNOWN = {
    ("pyyaml", "5.3"): ("GHSA-8q59-q68h-6hv4", "CVE-2020-14343", "5.4"),
    ("rich", "15.0.0"): ("GHSA-made-up", "CVE-2099-1", "15.0.1"),
}


class Feed:
    """An OSV query service on loopback, with advisories of ours."""

    def __init__(self) -> None:
        self.known = dict(KNOWN)
        self.asked: list[tuple[str, str]] = []
        self.body: bytes | None = None
        """What every query is answered, instead of what is known."""
        self.status = 200
        self.address = ""

    def answer(self, query: dict[str, Any]) -> bytes:
        release = (query["package"]["name"], query["version"])
        self.asked.append(release)
        if self.body is not None:
            return self.body
        if release not in self.known:
            return b"{}"
        number, alias, fixed = self.known[release]
        package = {"name": release[0], "ecosystem": query["package"]["ecosystem"]}
        ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": fixed}]}]
        affected = [{"package": package, "ranges": ranges}]
        return json.dumps(
            {"vulns": [{"id": number, "aliases": [alias], "summary": "it can be made to", "affected": affected}]}
        ).encode()


@pytest.fixture
def feed() -> Iterator[Feed]:
    feed = Feed()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = feed.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(feed.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Keep the tests' output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        feed.address = f"http://127.0.0.1:{server.server_port}/v1/query"
        try:
            yield feed
        finally:
            server.shutdown()
            thread.join()


def refused(*argv: str) -> Failure:
    with pytest.raises(Failure) as caught:
        audit.main(argv)
    return caught.value


def test_a_vulnerable_pin_is_named_with_its_advisory_its_lock_and_the_way_out(feed: Feed) -> None:
    failure = refused("--lock", "tools", "--feed", feed.address)
    assert failure.code == Exit.LOCK
    total = len(audit.releases([ROOT / "requirements" / "tools.txt"]))
    assert failure.message == f"1 of {total} pinned packages has known vulnerabilities"
    assert failure.details == ("rich 15.0.0: CVE-2099-1 = GHSA-made-up, fixed in 15.0.1: it can be made to (tools)",)
    assert "`nox -s lock -- --upgrade-package rich`" in str(failure.hint)


def test_an_ignored_advisory_is_passed_and_said_and_one_that_ignores_nothing_is_said_too(
    feed: Feed, capsys: pytest.CaptureFixture[str]
) -> None:
    done = audit.main(["--lock", "tools", "--feed", feed.address, "--ignore", "CVE-2099-1", "--ignore", "CVE-1"])
    said = capsys.readouterr().out.splitlines()
    assert done == 0
    assert said[0].startswith("ignored: rich 15.0.0: CVE-2099-1 = GHSA-made-up")
    assert said[1] == "nothing has the id CVE-1: `--ignore CVE-1` can go"
    assert said[2].endswith(f"of tools: {feed.address} knows of no vulnerability, but for 1 ignored")


def test_every_pin_of_every_lock_is_asked_about_also_two_versions_of_one_package(
    feed: Feed, capsys: pytest.CaptureFixture[str]
) -> None:
    del feed.known["rich", "15.0.0"]
    assert audit.main(["--feed", feed.address]) == 0
    wanted = audit.releases(sorted((ROOT / "requirements").glob("*.txt")))
    assert sorted(feed.asked) == sorted([*wanted, audit.CANARY])
    assert len({version for name, version in feed.asked if name == "torch"}) == 3
    assert f"{len(wanted)} packages of cu128, cu130, cu132, dev, images, tools: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 503, "the feed of advisories does not answer"),
        (b"<html>please log in</html>", 200, "the feed of advisories does not answer"),
        (b"{}", 200, "knows of no vulnerability in pyyaml 5.3, which is public"),
    ],
    ids=["an error", "a page of a proxy", "one that knows nothing"],
)
def test_a_feed_that_cannot_vouch_for_anything_is_not_taken_for_good_news(
    feed: Feed, body: bytes, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    feed.body, feed.status = body, status
    failure = refused("--lock", "tools", "--feed", feed.address)
    assert failure.code == Exit.UNREACHABLE
    assert sentence in failure.message
    assert "no vulnerability" not in capsys.readouterr().out


def test_no_network_is_one_sentence_and_exit_code_10() -> None:
    failure = refused("--lock", "tools", "--feed", "http://127.0.0.1:9/v1/query")
    assert failure.code == Exit.UNREACHABLE
    assert failure.message.endswith("(http://127.0.0.1:9/v1/query), so nothing is known about the locks")
    assert "Connection refused" in failure.details[0]


def test_a_package_that_was_not_answered_for_leaves_no_verdict() -> None:
    wanted = {("torch", "2.11.0"): ("cu130",), ("rich", "15.0.0"): ("tools",)}
    answers: dict[audit.Release, dict[str, Any]] = {
        audit.CANARY: {"vulns": [{"id": "X"}]},
        ("rich", "15.0.0"): {"vulns": []},
    }
    with pytest.raises(Failure, match="did not answer for 1 of 2 packages") as caught:
        audit.judge(wanted, answers, "feed")
    assert caught.value.code == Exit.UNREACHABLE
    assert caught.value.details == ("torch 2.11.0",)


def test_a_lock_that_is_not_there_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        audit.main(["--lock", "cu129"])
    assert caught.value.code == Exit.USAGE
