"""What a job on GitHub shows and posts of a verdict, and that an artifact stays data."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ci import comment, github
from ci.errors import InputError, UsageError
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.verdict_file import dump

NASTY = "<img src=x onerror=alert(1)>\n::error::planted @everyone"


def row(name: str, verdict: RowVerdict, effect: float | None = None) -> RowOutcome:
    return RowOutcome(RowKey(name), verdict, "because", "other", effect=effect)


def result(*rows: RowOutcome, verdict: RunVerdict = RunVerdict.REGRESSION, code: int = 1) -> GateResult:
    return GateResult(verdict, code, "1 row regressed", "ab", "NVIDIA H200", "a" * 40, "b" * 40, rows)


def test_annotations_tell_the_largest_regression_first_and_start_no_command_of_their_own() -> None:
    lines = github.told(
        result(
            row("small", RowVerdict.REGRESSED, 0.02),
            row(NASTY, RowVerdict.REGRESSED, 0.5),
            row("open", RowVerdict.UNCONFIRMED, 0.1),
            row("fine", RowVerdict.PASS),
        )
    )
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error", "::warning"]
    assert "planted" in lines[0]
    assert "\n" not in lines[0]
    assert "%0A::error::planted" in lines[0]


def test_annotations_that_github_would_drop_are_counted() -> None:
    lines = github.told(result(*(row(f"r{index}", RowVerdict.REGRESSED, 0.1) for index in range(25))))
    assert len(lines) == github.MAX_ANNOTATIONS
    assert "16 more rows" in lines[-1]


def test_a_run_that_fails_for_none_of_its_rows_is_an_error_too() -> None:
    lines = github.told(result(row("fine", RowVerdict.PASS), verdict=RunVerdict.RUNNER_UNFIT, code=5))
    assert lines[0].startswith("::error title=RUNNER UNFIT::")


def test_the_summary_is_appended_to_the_job(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n", encoding="utf-8")
    github.publish(result(row("slow", RowVerdict.REGRESSED, 0.1)), {github.SUMMARY_VARIABLE: str(page)})
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n## REGRESSION")


# The comment ----------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """GitHub as far as the comment needs it."""

    url: str = ""
    pulls: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    comments: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)


def archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(name.replace("__", "/").replace("_json", ".json"), content)
    return buffer.getvalue()


@pytest.fixture
def fake() -> Iterator[Fake]:
    state = Fake()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body: object) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            state.tokens.append(self.headers.get("Authorization"))
            path = self.path.removeprefix("/repos/o/r/")
            if path.startswith("pulls?"):
                self._answer([pull for pull in state.pulls if "head=stranger%3Atopic" in path])
            elif path.startswith("pulls/5/files?"):
                page = int(path.rsplit("=", 1)[1])
                self._answer(state.files[100 * (page - 1) : 100 * page])
            elif path.startswith("pulls/"):
                self._answer(next(pull for pull in state.pulls if pull["number"] == int(path.rsplit("/", 1)[1])))
            elif "/artifacts?" in path:
                listed = [
                    {"id": key, "name": state.names[key], "size_in_bytes": state.sizes.get(key, len(data))}
                    for key, data in state.artifacts.items()
                ]
                self._answer({"artifacts": listed})
            elif path.endswith("/zip"):
                self._answer(state.artifacts[int(path.split("/")[2])])
            else:
                self._answer(state.comments)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = int(self.path.split("/")[5])
            state.comments.append({"id": len(state.comments) + 1, "user": {"type": "Bot"}, "number": number, **body})
            self._answer({})

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = next(item for item in state.comments if item["id"] == int(self.path.rsplit("/", 1)[1]))
            found.update(body)
            self._answer({})

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def job(fake: Fake, tmp_path: Path) -> dict[str, str]:
    """The environment of a job for a finished run of a fork."""
    run = {
        "id": 7,
        "head_sha": "b" * 40,
        "head_branch": "topic",
        "head_repository": {"owner": {"login": "stranger"}},
        "pull_requests": [],
        "html_url": "https://github.com/o/r/actions/runs/7",
    }
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"workflow_run": run}), encoding="utf-8")
    fake.pulls = [{"number": 5, "state": "open", "head": {"sha": "b" * 40}}]
    return {"GITHUB_EVENT_PATH": str(event), "GITHUB_API_URL": fake.url, "GITHUB_REPOSITORY": "o/r", "GITHUB_TOKEN": "t"}


def test_the_comment_is_posted_once_and_rewritten_then(fake: Fake, job: dict[str, str]) -> None:
    fake.artifacts, fake.names = (
        {1: archive(verdict_json=dump(result(row("slow", RowVerdict.REGRESSED, 0.1))).encode())},
        {1: "report-h200"},
    )
    assert comment.comment(job) == ["'report-h200': REGRESSION on pull request 5"]
    assert [item["number"] for item in fake.comments] == [5]
    fake.artifacts = {1: archive(verdict_json=dump(result(verdict=RunVerdict.PASS, code=0)).encode())}
    comment.comment(job)
    (posted,) = fake.comments
    assert "## PASS" in posted["body"]


def test_what_the_artifact_says_is_text_and_names_no_other_pull_request(fake: Fake, job: dict[str, str]) -> None:
    nasty = json.loads(dump(result(row(NASTY, RowVerdict.REGRESSED, 0.1))))
    content = json.dumps(nasty).encode()
    fake.artifacts = {1: archive(verdict_json=content, summary_md=b"# @everyone", pull_json=b"99", __up=b"x")}
    fake.names = {1: "report-<!-- x -->@everyone"}
    comment.comment(job)
    (posted,) = fake.comments
    assert posted["number"] == 5
    assert "<img" not in posted["body"]
    assert "@everyone" not in posted["body"]


def test_other_schemas_large_and_broken_artifacts_are_refused(fake: Fake, job: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake.names = {1: "report-h200"}
    fake.artifacts = {1: archive(verdict_json=b'{"schema": "rapid_llm/verdict/1", "result": {"pull": 99}}')}
    with pytest.raises(InputError, match="does not follow"):
        comment.comment(job)
    fake.artifacts = {1: b"no zip"}
    with pytest.raises(InputError, match="no zip that can be read"):
        comment.comment(job)
    fake.sizes = {1: 200_000_000}
    with pytest.raises(InputError, match="nothing is posted"):
        comment.comment(job)
    fake.sizes = {}
    monkeypatch.setattr(comment, "MAX_VERDICT_BYTES", 1000)
    fake.artifacts = {1: archive(verdict_json=b" " * 100_000)}
    with pytest.raises(InputError, match="100,000 bytes"):
        comment.comment(job)
    assert fake.comments == []


def test_a_newer_commit_or_a_closed_pull_request_gets_no_comment(fake: Fake, job: dict[str, str]) -> None:
    fake.artifacts, fake.names = {1: archive(verdict_json=dump(result()).encode())}, {1: "report-h200"}
    for change in ({"state": "closed"}, {"head": {"sha": "c" * 40}}):
        fake.pulls = [{"number": 5, "state": "open", "head": {"sha": "b" * 40}, **change}]
        assert comment.comment(job) == ["the pull request is closed or has a newer commit: nothing posted"]
    assert fake.comments == []


def test_the_comment_names_what_needs_review_whatever_the_report_of_the_change_says(fake: Fake, job: dict[str, str]) -> None:
    """Issue 8.6: the verdict was made by the change's code, the list of files is GitHub's."""
    fake.artifacts = {1: archive(verdict_json=dump(result(verdict=RunVerdict.PASS, code=0)).encode())}
    fake.names = {1: "report-h200"}
    fake.files = [{"filename": f"docs/{number}.md"} for number in range(100)]
    comment.comment(job)
    assert "Needs review" not in fake.comments[0]["body"]
    fake.files += [{"filename": "docs/rows.py", "previous_filename": "ci/rows.py"}, {"filename": f"baselines/{NASTY}.json"}]
    comment.comment(job)
    (posted,) = fake.comments
    assert "## PASS" in posted["body"]
    assert "Needs review" in posted["body"]
    assert "the gate itself: ci/rows.py" in posted["body"]
    assert "a baseline or its schema" in posted["body"]
    assert "<img" not in posted["body"]
    fake.files = [{"filename": "docs/x.md"}] * 3000
    comment.comment(job)
    assert "what this change touches is not known" in fake.comments[0]["body"]


def test_outside_of_its_job_the_command_is_refused() -> None:
    with pytest.raises(UsageError, match="workflow_run"):
        comment.comment({})
