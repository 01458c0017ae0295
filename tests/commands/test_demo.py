"""`flowdup demo` compares methods and draws a figure, in whatever folder it is run."""

import json
import re
from pathlib import Path

import pytest
from commands.here import flowdup

from flowdup import progress


def test_the_demo_makes_a_table_a_page_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    small = ("server.rounds=1", "data.train_clients=20", "data.validation_clients=5")
    words = [f"--set={setting}" for setting in (*small, "data.test_clients=12")]
    ended = flowdup("demo", "--only", "[fl]*d*[agp]", "--jobs", "2", *words)  # not flowdup-plus
    assert ended.code == 0, ended.error
    first, *lines = ended.error.splitlines()
    assert first == "five methods on digits, three seeds, into runs/demo: some minutes on two cores"
    assert lines and all(re.fullmatch(r"[0-9] of 9 runs, [0-9] of 9 rounds", n) for n in lines)
    out = tmp_path / "runs" / "demo"
    rows = json.loads((out / "results.json").read_text())
    assert {row["method"] for row in rows} == {"flowdup", "fedavg", "ld-fedavg"} and len(rows) == 9
    assert (out / "comparison.html").is_file() and "ld-fedavg" in ended.out
    assert (out / "flowdup" / "seed-0" / "embedding.png").is_file()
    assert "coloured by their rotation" in ended.out
