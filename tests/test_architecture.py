"""The tree and who may import whom (R1, R68, R91, R92), held against the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP_LEVEL = {"asv_bench", "baselines", "ci", "rapid_llm", "tests", "asv.conf.json", "pyproject.toml", "README.md", "Makefile"}

MAY_IMPORT = {
    "rapid_llm.modules": {"rapid_llm.modules", "rapid_llm.kv_cache", "rapid_llm.kernels.ops", "rapid_llm.errors"},
    "rapid_llm.device_state_cache": {"rapid_llm.kv_cache", "rapid_llm.row_checks"},
    "rapid_llm.kv_cache": {
        "rapid_llm.free_runs", "rapid_llm.row_checks", "rapid_llm.row_search", "rapid_llm.staged_rows", "rapid_llm.errors",
    },
    "rapid_llm.row_search": {"rapid_llm.free_runs", "rapid_llm.staged_rows"},
    "rapid_llm.staged_rows": {"rapid_llm.free_runs", "rapid_llm.errors"},
    "rapid_llm.row_checks": {"rapid_llm.errors"},
    "rapid_llm.free_runs": set(),
    "rapid_llm.kernels.ops": {
        "rapid_llm.kernels.backends", "rapid_llm.kernels.autotune", "rapid_llm.kernels.ops", "rapid_llm.errors", "rapid_llm.strict_json",
    },
    "rapid_llm.kernels.autotune": {"rapid_llm.kernels.autotune", "rapid_llm.errors", "rapid_llm.strict_json"},
    "rapid_llm.strict_json": set(),
    "rapid_llm.kernels.backends": {"rapid_llm.kernels", "rapid_llm.kernels.backends", "rapid_llm.kernels.ops.spec", "rapid_llm.errors"},
    "rapid_llm.kernels": {"rapid_llm.kernels", "rapid_llm.errors"},
    "rapid_llm": {"rapid_llm"},
}  # fmt: skip
"""First prefix that fits a module counts; a module may import what starts with one of its values."""

FORBIDDEN = {
    "rapid_llm": {"asv_bench", "ci", "asv", "asv_runner", "git", "jinja2", "msgspec"},
    "ci": {"torch", "triton", "rapid_llm", "asv_bench"},
    "asv_bench": {"ci"},
}


def _modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((root / package).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def test_r92_top_level(root: Path) -> None:
    assert {path.name for path in root.iterdir()} >= TOP_LEVEL


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_packages_do_not_import_what_they_must_not(root: Path, package: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in _modules(root, package)
        for name in _imports(path)
        if any(_within(name, prefix) for prefix in FORBIDDEN[package])
    ]
    assert wrong == []


def test_r1_tiers_import_downwards(root: Path) -> None:
    wrong = []
    for module, path in _modules(root, "rapid_llm"):
        allowed = next(allowed for prefix, allowed in MAY_IMPORT.items() if _within(module, prefix))
        for name in _imports(path):
            if _within(name, "rapid_llm") and not any(_within(name, prefix) for prefix in allowed):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_kernels_do_not_know_the_tiers_above_them(root: Path) -> None:
    wrong = []
    for module, path in _modules(root, "rapid_llm.kernels".replace(".", "/")):
        if _within(module, "rapid_llm.kernels.ops") or _within(module, "rapid_llm.kernels.backends"):
            continue
        wrong += [
            f"{module} imports {name}"
            for name in _imports(path)
            if _within(name, "rapid_llm.kernels.ops") or _within(name, "rapid_llm.modules")
        ]
    assert wrong == []


def test_the_gate_runs_where_torch_is_not_installed(root: Path) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'rapid_llm', 'asv_bench'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import ci.__main__\n"
        "print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


def test_importing_the_distribution_imports_no_torch(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, rapid_llm; print('torch' in sys.modules)"], cwd=root, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


def test_r91_packages_are_declared_and_used(root: Path) -> None:
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    declared = " ".join([*data["project"]["dependencies"], *data["project"]["optional-dependencies"]["gate"]]).lower()
    used = {
        name.partition(".")[0]
        for package in ("rapid_llm", "asv_bench", "ci")
        for _, path in _modules(root, package)
        for name in _imports(path)
    }
    for distribution, module in (("torch", "torch"), ("triton", "triton"), ("asv", "asv"), ("gitpython", "git"), ("jinja2", "jinja2")):
        assert distribution in declared
        assert module in used


def test_only_the_library_is_distributed(root: Path) -> None:
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert data["project"]["name"] == "rapid-llm"
    assert data["tool"]["setuptools"]["packages"]["find"]["include"] == ["rapid_llm*"]


def test_modules_stay_readable(root: Path) -> None:
    long = {
        module: lines
        for p in ("rapid_llm", "asv_bench", "ci")
        for module, path in _modules(root, p)
        if (lines := len(path.read_text("utf-8").splitlines())) > 400
    }
    assert long == {}


def test_the_architecture_page_draws_every_module(root: Path) -> None:
    page = (root / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = [
        path
        for package in ("rapid_llm", "asv_bench", "ci")
        for _, path in _modules(root, package)
        if path.parent.name not in ("templates", "plugins")
    ]
    assert [path.name for path in paths if path.name != "__init__.py" and path.name not in page] == []


def test_the_files_speak_of_the_project_alone(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    here = Path(__file__).relative_to(root).as_posix()
    wrong = []
    for name in listed:
        if name.endswith((".py", ".md", ".toml", ".yml", ".j2", "Makefile", "run")) and name != here:
            text = (root / name).read_text(encoding="utf-8")
            wrong += [f"{name}: {word}" for word in ("/work/", "$OUT", "helper session") if word in text]
    assert wrong == []
