"""Benchmarks run through and write what they promise; how long anything takes is not tested."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONTENDERS = ["flowdup", "loop", "pfl"]
KEYS = {"work", "contender", "ms_per_round", "ratio_to_pfl", "device", "versions", "commit"}


def test_contenders_do_the_same_work_and_an_absent_one_is_reported(tmp_path: Path) -> None:
    out, plot = tmp_path / "cpu.json", tmp_path / "cpu.png"
    options = ["--works", "flowdup cnn", "--contenders", *CONTENDERS]
    command = [
        sys.executable,
        BENCHMARKS / "cpu.py",
        "--tiny",
        "--out",
        out,
        "--plot",
        plot,
        *options,
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert plot.stat().st_size > 0
    results = json.loads(out.read_bytes())
    assert [row["contender"] for row in results] == CONTENDERS
    here = results if find_spec("pfl") else results[:2]
    for row in here:
        assert row.keys() >= KEYS
        assert row["ms_per_round"] > 0
        assert row["distance"] < 1e-4  # of psi after a round from the first contender's
    for row in results[len(here) :]:
        assert row["ms_per_round"] is None
        assert "pfl" in row["absent"]


def test_a_process_with_a_million_clients_takes_no_more_memory_than_one_with_a_thousand(
    tmp_path: Path,
) -> None:
    out, plot = tmp_path / "population.json", tmp_path / "population.png"
    command = [sys.executable, BENCHMARKS / "population.py", "--tiny", "--out", out, "--plot", plot]
    subprocess.run(command, check=True, capture_output=True)
    assert plot.stat().st_size > 0
    few, many = json.loads(out.read_bytes())
    assert (few["population"], many["population"]) == (1_000, 1_000_000)
    assert many.keys() >= {"cohort", "seconds_per_round", "device", "versions", "commit"}
    assert many["seconds_per_round"] > 0
    assert many["peak_mb"] < few["peak_mb"] + 60  # 64 bytes per client
