"""asv environment "host": the running interpreter, with one source checkout a commit at the front of the path.

Nothing is built or installed, so two commits cost two checkouts. Keys of asv.conf.json: `host_versions` (distributions whose versions name
the environment), `host_keep` (checkouts to keep on disk), `records_dir` (where measuring processes leave their records).
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from asv import util
from asv.console import log
from asv.environment import Environment

_KEEP = 8


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


class HostEnvironment(Environment):  # type: ignore[misc]  # asv has no types
    """The interpreter that runs asv, plus the commit's checkout."""

    tool_name = "host"

    def __init__(self, conf: Any, python: str, requirements: dict[str, str], tagged_env_vars: dict[Any, str]) -> None:
        self._keep = int(getattr(conf, "host_keep", _KEEP))
        self._records_dir = os.path.abspath(getattr(conf, "records_dir", ".asv/records"))
        self._python = "{}.{}".format(*sys.version_info)
        # These only name the environment and label the results.
        self._requirements = {name: _version(name) for name in getattr(conf, "host_versions", ())}
        super().__init__(conf, self._python, self._requirements, tagged_env_vars)

    def check_presence(self) -> bool:
        return os.path.isdir(self._path)

    def _setup(self) -> None:
        os.makedirs(self._path, exist_ok=True)

    def find_executable(self, executable: str) -> str:
        return sys.executable if executable == "python" else str(util.which(executable))

    @property
    def installed_commit_hash(self) -> None:
        """None, so that asv always comes to `install_project`, whose check is cheap."""
        return None

    def checkout_of(self, commit_hash: str) -> Path:
        return Path(self._path, "src", commit_hash)

    def install_project(self, conf: Any, repo: Any, commit_hash: str) -> None:
        """Checks the commit out once; a checkout that was interrupted is made again."""
        source = self.checkout_of(commit_hash)
        stamp = source.with_suffix(".ok")
        if not (stamp.exists() and source.is_dir()):
            log.info(f"Checking out {commit_hash[:8]} for {self.name}")
            shutil.rmtree(source, ignore_errors=True)
            repo.checkout(str(source), commit_hash)
            stamp.touch()
        os.utime(stamp)
        self._set_commit_hash(commit_hash)
        stamps = sorted(source.parent.glob("*.ok"), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in stamps[self._keep :]:
            old.unlink()
            shutil.rmtree(old.with_suffix(""), ignore_errors=True)

    def run(self, args: list[str], **kwargs: Any) -> Any:
        source = self.checkout_of(self._global_env_vars["ASV_COMMIT"])
        if not source.is_dir():
            raise util.UserError(f"There is no checkout at {source}; remove {self._path} and run again.")
        env = dict(kwargs.pop("env", None) or os.environ, **self._global_env_vars)
        # asv's benchmark script puts ASV_PYTHONPATH in front and drops PYTHONPATH; its children need both, and a host may reach torch
        # or asv_runner through the PYTHONPATH that was there.
        path = os.pathsep.join([str(source), *filter(None, [env.get("PYTHONPATH")])])
        env.update(ASV_BUILD_DIR=str(source), ASV_PYTHONPATH=path, PYTHONPATH=path, RAPID_LLM_RECORDS_DIR=self._records_dir)
        if kwargs.get("timeout") is None:
            kwargs["timeout"] = self._install_timeout
        return util.check_output([sys.executable, *args], env=env, **kwargs)
