"""Runs the `run:` steps of a workflow in order in a fresh clone, as a runner would.

    python -m tests.workflows .github/workflows/cpu.yml [--set matrix.shard=1] [--env PYTHON=/path] [--only gate] [--keep FOLDER]

That runs every step whole: the job `test` of cpu.yml takes as long as all tests do. For a look at the steps alone,
`--leave-out "make lint"` names a step and does not run it, and `--args "make test=tests/test_cases.py"` gives a make target ARGS.

Jobs run in the order of their needs, each in a clone of its own and once for each combination of its matrix. Artifacts are copied from
clone to clone; other actions are named and left out. The exit status is 1 if a step failed; as on GitHub, steps after it run only where
they say so.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
_OF_A_MAKE_ABOVE = frozenset({"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS"})
"""`make test ARGS=...` hands its arguments down to each make below it."""


def load(path: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads its key `on` as true."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["on"] = data.pop(True, data.get("on"))
    return dict(data)


def combinations(job: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Each combination of a job's matrix."""
    matrix = (job.get("strategy") or {}).get("matrix") or {}
    axes = [[(name, str(value)) for value in values] for name, values in matrix.items()]
    for chosen in itertools.product(*axes):
        yield {f"matrix.{name}": value for name, value in chosen}


def ordered(jobs: dict[str, Any]) -> list[str]:
    """Names of jobs, each after those that it needs."""
    done: list[str] = []
    while len(done) < len(jobs):
        for name, job in jobs.items():
            needs = job.get("needs", [])
            needs = [needs] if isinstance(needs, str) else needs
            if name not in done and all(need in done for need in needs):
                done.append(name)
    return done


def filled(text: str, values: dict[str, str]) -> str:
    """A text with its expressions; one whose value is not known is empty, as on GitHub."""
    return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda found: values.get(found[1], ""), text)


class Runner:
    """Runs jobs, each in a clone."""

    def __init__(
        self, repository: Path, scratch: Path, env: dict[str, str], *, args: dict[str, str] | None = None, left_out: Collection[str] = ()
    ) -> None:
        """Names the places, the variables of every step, ARGS by command, and the commands that are not run."""
        self.repository, self.scratch, self.env = repository, scratch, env
        self.args, self.left_out = args or {}, left_out
        self.artifacts = scratch / "artifacts"
        self.failed: list[str] = []

    def clone(self, name: str) -> Path:
        target = self.scratch / name
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(self.repository), str(target)], check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=self.repository, check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run(["git", "checkout", "--quiet", "--detach", head], cwd=target, check=True)
        has_main = subprocess.run(["git", "rev-parse", "--verify", "--quiet", "origin/main"], cwd=target, capture_output=True)
        if has_main.returncode:
            print(f"{self.repository} has no branch main: a gate would have no base", file=sys.stderr)
        return target

    def job(self, name: str, job: dict[str, Any], values: dict[str, str]) -> None:
        told = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in values.items() if key.startswith("matrix."))
        print(f"== {name}{f' ({told})' if told else ''}", flush=True)
        place = self.clone(re.sub(r"[^a-z0-9]+", "-", f"{name} {told}".lower()).strip("-"))
        summary = place.with_suffix(".summary.md")
        own = {name: value for name, value in os.environ.items() if name not in _OF_A_MAKE_ABOVE}
        env = {**own, **self.env, "CI": "true", "GITHUB_STEP_SUMMARY": str(summary)}
        env.update({key: filled(str(value), values) for key, value in (job.get("env") or {}).items()})
        broken = False
        for step in job["steps"]:
            condition = str(step.get("if", "success()"))
            if broken and "always()" not in condition and "!cancelled()" not in condition:
                continue
            if "uses" in step:
                self._action(step, place, values)
                continue
            command = filled(step["run"], values).strip()
            if command in self.left_out:
                print(f"-- left out: {command}", flush=True)
                continue
            print(f"$ {command}", flush=True)
            started_s = time.monotonic()
            step_env = {**env, **{key: filled(str(value), values) for key, value in (step.get("env") or {}).items()}}
            if command in self.args:
                step_env["ARGS"] = self.args[command]
            done = subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=place, env=step_env, stdin=subprocess.DEVNULL)
            print(f"-- exit status {done.returncode} after {time.monotonic() - started_s:.0f} s", flush=True)
            if done.returncode:
                broken = True
                self.failed.append(f"{name}: {command}")

    def _action(self, step: dict[str, Any], place: Path, values: dict[str, str]) -> None:
        action = step["uses"].partition("@")[0]
        settings = {key: filled(str(value), values) for key, value in (step.get("with") or {}).items()}
        if action == "actions/upload-artifact":
            source = place / settings["path"]
            if source.exists():
                shutil.copytree(source, self.artifacts / settings["name"], dirs_exist_ok=True)
                print(f"-- artifact {settings['name']}", flush=True)
        elif action == "actions/download-artifact":
            for found in sorted(self.artifacts.glob("*")):
                if fnmatch.fnmatch(found.name, settings["pattern"]):
                    shutil.copytree(found, place / settings["path"] / found.name)
                    print(f"-- fetched {found.name}", flush=True)
        else:
            print(f"-- not run here: {action}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="value of an expression, such as vars.NAME")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of every step")
    parser.add_argument("--only", action="append", default=[], metavar="JOB")
    parser.add_argument("--args", action="append", default=[], metavar="COMMAND=ARGS", help="ARGS of a step's make target")
    parser.add_argument("--leave-out", action="append", default=[], metavar="COMMAND", help="a step that is named and not run")
    parser.add_argument("--repository", type=Path, default=ROOT, help="repository to clone (default: this one)")
    parser.add_argument("--keep", type=Path, help="folder for the clones and artifacts (default: a temporary one)")
    options = parser.parse_args()
    workflow = load(options.workflow)
    given = dict(item.partition("=")[::2] for item in options.set)
    args = dict(item.partition("=")[::2] for item in options.args)
    commands = {step.get("run", "").strip() for job in workflow["jobs"].values() for step in job["steps"]}
    if strange := sorted({*args, *options.leave_out} - commands):
        parser.error(f"{strange[0]!r} is no command of {options.workflow}; there are: {', '.join(sorted(filter(None, commands)))}")
    with tempfile.TemporaryDirectory(prefix="workflow-") as temporary:
        scratch = options.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        runner = Runner(
            options.repository, scratch, dict(item.partition("=")[::2] for item in options.env), args=args, left_out=options.leave_out
        )
        for name in ordered(workflow["jobs"]):
            if options.only and name not in options.only:
                continue
            for values in combinations(workflow["jobs"][name]):
                runner.job(name, workflow["jobs"][name], {**given, **values})
        for line in runner.failed:
            print(f"FAILED {line}")
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
