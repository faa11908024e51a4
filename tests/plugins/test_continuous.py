"""`asv continuous` with the plugins: direction, failures, new rows, rounds (R96)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable

import pytest

from tests.plugins.conftest import Toy

pytestmark = pytest.mark.slow

Compare = Callable[..., subprocess.CompletedProcess[str]]


def test_r96_a_throughput_drop_is_a_regression(compared: Compare) -> None:
    done = compared({}, {"large": 140.0})
    assert done.returncode == 1, done.stdout
    table = [line for line in done.stdout.splitlines() if line.startswith("| +")]
    assert len(table) == 2  # the rate that fell and the latency that rose with it
    assert all("'large'" in line for line in table)
    assert "PERFORMANCE DECREASED" in done.stdout


def test_r96_a_throughput_rise_is_none(compared: Compare) -> None:
    done = compared({}, {"large": 280.0})
    assert done.returncode == 0, done.stdout
    assert "PERFORMANCE INCREASED" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("| +")]


def test_r96_flat_is_flat(compared: Compare) -> None:
    done = compared({}, {})
    assert done.returncode == 0, done.stdout
    assert "NOT SIGNIFICANTLY CHANGED" in done.stdout


@pytest.mark.parametrize(("spills", "status", "mark"), [(1001, 1, "+"), (999, 0, "-"), (1000, 0, "")])
def test_a_figure_without_noise_counts_however_small_the_change(compared: Compare, spills: int, status: int, mark: str) -> None:
    done = compared({}, {"spills": spills})
    assert done.returncode == status, done.stdout
    marked = [line for line in done.stdout.splitlines() if "track_spills" in line and line.startswith(f"| {mark} ")]
    assert bool(marked) == bool(mark)


def test_a_row_that_fails_on_the_tested_commit_gives_2_and_the_table(compared: Compare) -> None:
    done = compared({}, {"small": 50.0, "without": "large"})
    assert done.returncode == 2, done.stdout
    assert "FAILED OR NEWLY SKIPPED ON THE TESTED COMMIT: bench_toy.Copy.track_latency, bench_toy.Copy.track_rate" in done.stdout
    assert any(line.startswith("| +") and "'small'" in line for line in done.stdout.splitlines())


def test_a_row_that_is_newly_skipped_gives_2(compared: Compare) -> None:
    done = compared({}, {"skipped": ("small",)})
    assert done.returncode == 2, done.stdout
    assert "FAILED OR NEWLY SKIPPED" in done.stdout


def test_a_row_that_only_the_tested_commit_has_is_new_and_passes(compared: Compare) -> None:
    done = compared({"without": "large"}, {})
    assert done.returncode == 0, done.stdout
    assert "NEW ON THE TESTED COMMIT: bench_toy.Copy.track_latency, bench_toy.Copy.track_rate" in done.stdout


def test_a_row_that_is_skipped_on_both_is_no_failure(compared: Compare) -> None:
    assert compared({"skipped": ("small",)}, {"skipped": ("small",)}).returncode == 0


def test_each_round_is_a_fresh_process_even_without_interleaving(toy: Toy) -> None:
    commit = toy.commit()
    done = toy.asv("run", f"{commit}^!", "-a", "rounds=3", "--record-samples", "--no-interleave-rounds")
    assert done.returncode == 0, done.stdout
    (result,) = [p for p in (toy.path / ".asv" / "results").glob("*/*.json") if p.name != "machine.json"]
    data = json.loads(result.read_text(encoding="utf-8"))
    columns = dict(zip(data["result_columns"], data["results"]["bench_toy.Copy.track_rate"], strict=False))
    assert [len(samples) for samples in columns["samples"]] == [3, 3]
    assert len(set(columns["samples"][0])) > 1, "one process' reading was stored three times"


def test_the_device_names_the_machine_without_a_question(toy: Toy) -> None:
    toy.commit()
    done = toy.asv("run", "HEAD^!", "-a", "rounds=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (machine,) = (toy.path / ".asv" / "results").glob("*/machine.json")
    assert machine.parent.name.startswith("CPU_")
    unknown = toy.asv("run", "HEAD^!", "--machine", "elsewhere")
    assert unknown.returncode != 0
    assert "No results are known of a machine 'elsewhere'" in unknown.stdout + unknown.stderr


def test_numbers_of_throughputs_are_readable(compared: Compare) -> None:
    # The toy's process number adds at most 0.1 % to a rate, so that four digits may be any of these.
    done = compared({"small": 120.0456789}, {"small": 60.0456789})
    row = next(line for line in done.stdout.splitlines() if line.startswith("| +") and "track_rate" in line)
    before, after = (re.sub("±.*|GB/s", "", cell.strip()) for cell in row.split("|")[2:4])
    assert re.fullmatch(r"120(\.[12])?", before), row
    assert re.fullmatch(r"60\.(0[5-9]|11?)", after), row
