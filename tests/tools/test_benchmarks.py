"""Benchmarks run through and write what they promise; how long anything takes is not tested."""

import argparse
import json
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowdup.data import ClientData
from flowdup.run.certify_routes import Answers

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
CONTENDERS = ["flowdup", "pfl", "loop"]
KEYS = {"work", "contender", "ms_per_round", "ratio_to_pfl", "device", "versions", "commit"}


def test_contenders_do_the_same_work_and_an_absent_one_is_reported(tmp_path: Path) -> None:
    results = run("cpu.py", tmp_path, "--works", "flowdup cnn", "--contenders", *CONTENDERS)
    check(results)
    chart = tmp_path / "chart.png"
    call("chart.py", tmp_path / "results.json", chart)
    assert chart.stat().st_size > 0


def test_the_benchmark_of_a_gpu_times_blocks_of_rounds_and_a_whole_run(tmp_path: Path) -> None:
    works = ["--works", "fedavg cnn", "whole run cifar10 cnn", "--contenders", "flowdup"]
    results = run("gpu.py", tmp_path, "--device", "cpu", *works)
    names = ["flowdup", "flowdup, cold", "flowdup, warm"]
    assert [row["contender"] for row in results] == names
    for row in results:
        assert row.keys() >= KEYS
        assert (row["ms_per_round"] or row["seconds"]) > 0


def test_personalising_is_timed_against_a_forward_pass_of_h1(tmp_path: Path) -> None:
    ways = ["h1 forward", "personalizer"]
    works = ["--works", "personalize cnn", "--processes", "2", "--contenders", *ways]
    results = run("gpu.py", tmp_path, "--device", "cpu", *works)
    assert {row["contender"] for row in results} == {*ways}
    assert all(row["ratio_to_h1"] > 0 for row in results)
    assert {row["rounds"] for row in results} == {2 * 2 * 2}  # processes, blocks, rounds


def test_another_checkout_runs_beside_this_one_and_each_says_which_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWDUP_COMMIT", "this")
    other = tmp_path / "other"
    for folder in ("src", "benchmarks"):
        shutil.copytree(ROOT / folder, other / folder)
    names = ["--works", "fedavg cnn", "--contenders", "flowdup", "loop"]
    ours, theirs, loop = run("cpu.py", tmp_path, *names, "--against", str(other))
    assert [row["contender"] for row in (ours, theirs)] == ["flowdup", "flowdup, before"]
    assert [ours["commit"], theirs["commit"], loop["commit"]] == ["this", "unknown", "this"]
    assert ours["ratio_to_before"] > 0
    assert theirs["distance"] == 0


def test_a_checkout_whose_code_would_not_be_run_is_refused(tmp_path: Path) -> None:
    words = ["--works", "fedavg cnn", "--contenders", "flowdup", "--against", str(tmp_path)]
    with pytest.raises(subprocess.CalledProcessError) as none:
        run("cpu.py", tmp_path, *words)
    assert b"is no checkout of flowdup" in none.value.stderr
    (tmp_path / "src/flowdup").mkdir(parents=True)  # no package: the installed one is found instead
    shutil.copytree(BENCHMARKS / "contenders", tmp_path / "benchmarks/contenders")
    with pytest.raises(subprocess.CalledProcessError) as other:
        run("cpu.py", tmp_path, *words)
    assert f"not in {tmp_path}".encode() in other.value.stderr


def run(script: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    out = folder / "results.json"
    call(script, "--tiny", "--out", out, *options)
    results: list[dict[str, Any]] = json.loads(out.read_bytes())
    return results


def call(script: str, *options: str | Path) -> None:
    subprocess.run([sys.executable, BENCHMARKS / script, *options], check=True, capture_output=True)


def check(results: list[dict[str, Any]]) -> None:
    assert [row["contender"] for row in results] == CONTENDERS
    for row in results:
        assert row.keys() >= KEYS
        if row["contender"] == "pfl" and not find_spec("pfl"):
            assert row["ms_per_round"] is None
            assert "pfl" in row["absent"]
            continue
        assert min(row["ms_per_round"], row["first_round_s"]) > 0
        assert row["distance"] < 1e-3  # of psi after a round from the first contender's


def test_a_process_with_a_million_clients_takes_no_more_memory_than_one_with_a_thousand(
    tmp_path: Path,
) -> None:
    out, plot = tmp_path / "population.json", tmp_path / "population.png"
    call("population.py", "--tiny", "--out", out, "--plot", plot)
    assert plot.stat().st_size > 0
    few, many = json.loads(out.read_bytes())
    assert (few["population"], many["population"]) == (1_000, 1_000_000)
    assert many.keys() >= {"cohort", "seconds_per_round", "device", "versions", "commit"}
    assert many["seconds_per_round"] > 0
    assert many["peak_mb"] < few["peak_mb"] + 60  # 64 bytes per client


def test_answers_of_certified_runs_keep_what_prediction_sets_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float16, with the likeliest classes of many; every case of the benchmark has settings."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    certificate, sets = map(import_module, ("certificate", "certificate_sets"))
    draw = torch.Generator().manual_seed(1)
    logits = [3 * torch.randn(n, 30, generator=draw) for n in (40, 7, 60)]
    y = [torch.randint(-1, 30, (len(own),), generator=draw) for own in logits]
    clients = [ClientData(torch.zeros(len(own), 1), own) for own in y]
    stored = {f"a/test-{n}": v for n, v in certificate.compact(logits, clients).items()}
    found, right = sets.read_answers(stored, "a", "test"), Answers(logits, clients)
    assert found.errors == right.errors
    for a, b in zip(found.label_scores(), right.label_scores(), strict=True):
        assert np.abs(a - b).max() < 2e-3
    assert sum(own.size for own in stored.values()) < 40 * sum(map(len, y))

    cases = [*certificate.cases()]
    assert len({case.name for case in cases}) == len(cases) == 18
    given = argparse.Namespace(
        runs=Path("runs"), device="cpu", precision="tf32", small=False, tiny=True
    )
    assert all(case.config(given).rounds <= 3 for case in cases)
