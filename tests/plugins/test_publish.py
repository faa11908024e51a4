"""`asv publish` with the plugin builds this project's site."""

from __future__ import annotations

import json

from tests.plugins.conftest import Toy


def test_asv_publish_shows_what_asv_measured(toy: Toy) -> None:
    commit = toy.commit()
    assert toy.asv("run", f"{commit}^!", "-a", "rounds=1").returncode == 0
    elsewhere = toy.git("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "on no branch")
    (result,) = [path for path in (toy.path / ".asv" / "results").glob("*/*.json") if path.name != "machine.json"]
    other = result.with_name(result.name.replace(commit[:8], elsewhere[:8]))
    other.write_text(result.read_text(encoding="utf-8").replace(commit, elsewhere), encoding="utf-8")

    done = toy.asv("publish")
    assert done.returncode == 0, done.stdout + done.stderr
    html = toy.path / ".asv" / "html"
    page = (html / "index.html").read_text(encoding="utf-8")
    assert "series over 1 commit," in page
    assert f"1 commits are not on the branch and are not shown: {elsewhere[:8]}" in page
    index = json.loads((html / "index.json").read_text(encoding="utf-8"))
    assert list(index["revision_to_hash"].values()) == [commit]
    assert index["benchmarks"]["bench_toy.Copy.track_rate"]["higher_is_better"] is True
    assert index["benchmarks"]["bench_toy.Copy.track_latency"]["higher_is_better"] is False
    assert "https://" not in (html / "graphs.html").read_text(encoding="utf-8").replace("https://github.com/airspeed-velocity/asv/", "")
