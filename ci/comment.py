"""Posts a verdict on its pull request, from the artifact of a run that the change itself controlled.

The artifact is untrusted: its zip is read in memory, of it one member of a bounded size, as strict JSON of the verdict's schema; nothing is
unpacked or executed. The comment is written anew from that, so that only what `render_summary` escapes is posted, and on the pull request
that GitHub, not the artifact, names.
"""

from __future__ import annotations

import io
import json
import os
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.errors import InputError, UsageError
from ci.model import GateResult
from ci.repo import review_lines
from ci.summary import markdown_text, render_summary
from ci.verdict_file import load

MAX_ARTIFACT_BYTES = 64 << 20
MAX_VERDICT_BYTES = 16 << 20
_TIMEOUT_S = 60
_MAX_FILE_PAGES = 30
"""GitHub lists 3,000 files of a pull request, 100 a page."""
_PREFIX = "report-"
_MEMBER = "verdict.json"


@dataclass(frozen=True)
class Api:
    """GitHub's API for one repository."""

    url: str
    repository: str
    token: str

    def call(self, method: str, path: str, body: object | None = None) -> Any:
        """Calls the API and returns its JSON.

        Raises:
            InputError: GitHub refused or could not be reached.
        """
        return json.loads(self._open(method, f"{self.url}/repos/{self.repository}/{path}", body, 8 << 20) or b"null")

    def download(self, path: str, limit: int) -> bytes:
        """The content of a file, at most `limit` bytes."""
        return self._open("GET", f"{self.url}/repos/{self.repository}/{path}", None, limit)

    def _open(self, method: str, url: str, body: object | None, limit: int) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, method=method)
        # Not sent on to the store that GitHub redirects a download to.
        request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        request.add_header("Accept", "application/vnd.github+json")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                content: bytes = answer.read(limit + 1)
        except (urllib.error.URLError, TimeoutError) as error:
            raise InputError(f"GitHub did not answer {method} {url}: {error}; run the job again.") from error
        if len(content) > limit:
            raise InputError(f"{url} is over {limit:,} bytes and is not read.")
        return content


def verdict_in(archive: bytes, *, name: str) -> GateResult | None:
    """The verdict in an artifact's zip, None where it has none.

    Raises:
        InputError: The zip or the verdict cannot be read, or is too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            found = [info for info in members.infolist() if info.filename == _MEMBER]
            if not found:
                return None
            if len(found) > 1 or found[0].file_size > MAX_VERDICT_BYTES:
                raise InputError(
                    f"{name} has {len(found)} {_MEMBER} of {found[0].file_size:,} bytes: one of at most {MAX_VERDICT_BYTES:,} is read."
                )
            with members.open(found[0]) as stream:
                content = stream.read(MAX_VERDICT_BYTES + 1)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{name} is no zip that can be read ({error}).") from error
    if len(content) > MAX_VERDICT_BYTES:
        raise InputError(f"{_MEMBER} in {name} is larger than it says.")
    return load(content, name=f"{_MEMBER} in {name}")


def pull_of(api: Api, run: Mapping[str, Any]) -> int | None:
    """The open pull request whose head is the run's commit; None where there is none any more.

    The event names none for a change from a fork; GitHub is then asked by the fork's owner and branch.
    """
    sha = str(run["head_sha"])
    numbers = [int(pull["number"]) for pull in run.get("pull_requests") or []]
    if not numbers:
        owner = run["head_repository"]["owner"]["login"]
        query = urllib.parse.urlencode({"state": "open", "head": f"{owner}:{run['head_branch']}"})
        numbers = [int(pull["number"]) for pull in api.call("GET", f"pulls?{query}")]
    for number in numbers:
        pull = api.call("GET", f"pulls/{number}")
        if pull["state"] == "open" and pull["head"]["sha"] == sha:
            return number
    return None


def marker_of(artifact: str) -> str:
    """An invisible line by which the comment of an artifact is found again."""
    plain = "".join(letter for letter in artifact if letter.isascii() and (letter.isalnum() or letter in "._")) or "report"
    return f"<!-- rapid_llm gate {plain[:80]} -->"


def to_review(api: Api, number: int) -> str:
    """What the change touches that could move its own verdict, by GitHub's list of its files and not by its own report."""
    changed: list[str] = []
    for page in range(1, _MAX_FILE_PAGES + 1):
        files = api.call("GET", f"pulls/{number}/files?per_page=100&page={page}")
        changed += [str(file[name]) for file in files for name in ("filename", "previous_filename") if file.get(name)]
        if len(files) < 100:
            break
    else:
        return "\n**Needs review:** GitHub lists no more than 3,000 changed files, so what this change touches is not known.\n"
    lines = "".join(f"- {markdown_text(line, 400)}\n" for line in review_lines(changed))
    return f"\n**Needs review,** by GitHub's list of files: this change could move its own verdict.\n\n{lines}" if lines else ""


def post(api: Api, number: int, artifact: str, result: GateResult, run_url: str, review: str = "") -> None:
    """Writes the comment of an artifact, or rewrites the one that is there."""
    marker = marker_of(artifact)
    body = f"{marker}\n{render_summary(result)}\n{review}\n[Run and artifacts]({run_url})\n"
    page = 1
    while True:
        comments = api.call("GET", f"issues/{number}/comments?per_page=100&page={page}")
        for comment in comments:
            if comment["user"]["type"] == "Bot" and str(comment["body"]).startswith(marker):
                api.call("PATCH", f"issues/comments/{int(comment['id'])}", {"body": body})
                return
        if len(comments) < 100:
            break
        page += 1
    api.call("POST", f"issues/{number}/comments", {"body": body})


def comment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Posts every verdict of the finished run that the event names.

    Returns:
        One line for each thing done or left.
    Raises:
        UsageError: This is no job of a `workflow_run` event.
        InputError: GitHub cannot be used, or an artifact cannot be read.
    """
    try:
        event = json.loads(Path(environment["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
        run = event["workflow_run"]
        api = Api(
            environment.get("GITHUB_API_URL", "https://api.github.com"), environment["GITHUB_REPOSITORY"], environment["GITHUB_TOKEN"]
        )
    except (KeyError, OSError, ValueError) as error:
        raise UsageError(
            f"comment runs in a job of a workflow_run event only ({error!r} is missing): leave it to report-pr.yml."
        ) from error
    number = pull_of(api, run)
    if number is None:
        return ["the pull request is closed or has a newer commit: nothing posted"]
    told = []
    for artifact in api.call("GET", f"actions/runs/{int(run['id'])}/artifacts?per_page=100")["artifacts"]:
        name = str(artifact["name"])
        if not name.startswith(_PREFIX):
            continue
        if int(artifact["size_in_bytes"]) > MAX_ARTIFACT_BYTES:
            raise InputError(
                f"The artifact {name!r} has {int(artifact['size_in_bytes']):,} bytes, over {MAX_ARTIFACT_BYTES:,}: nothing is posted."
            )
        result = verdict_in(api.download(f"actions/artifacts/{int(artifact['id'])}/zip", MAX_ARTIFACT_BYTES), name=repr(name))
        if result is None:
            told.append(f"{name!r} holds no verdict")
            continue
        post(api, number, name, result, str(run["html_url"]), to_review(api, number))
        told.append(f"{name!r}: {result.verdict.value} on pull request {number}")
    return told or ["the run left no report: nothing posted"]
