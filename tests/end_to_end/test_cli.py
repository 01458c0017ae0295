"""Every command as a person runs it: real processes, real files."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from commands.here import flowdup as here
from forked import flowdup
from safetensors.torch import load_file

from flowdup.cli import main

SMALL = [
    "--set=server.rounds=6",
    "--set=server.cohort=4",
    "--set=server.lr_decay_fraction=0.0",
    "--set=client.clip=0.1",
    "--set=data.train_clients=20",
    "--set=data.validation_clients=40",
    "--set=data.test_clients=6",
    "--set=run.evaluate_every=3",
    "--set=run.checkpoint_every=2",
]


def good(*arguments: str | Path, cwd: Path | None = None) -> str:
    done = flowdup(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Exit code 2 and one sentence, no traceback."""
    done = flowdup(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def refused_here(*arguments: str | Path) -> str:
    """The same in this process: the many ways to be refused need no Python of their own each."""
    words, error = ["flowdup", *map(str, arguments)], io.StringIO()
    with patch.object(sys, "argv", words), redirect_stderr(error), pytest.raises(SystemExit) as end:
        main()
    sentence = error.getvalue()
    assert end.value.code == 2 and sentence.startswith("error: ") and sentence.count("\n") == 1
    return sentence


def done_here(*arguments: str | Path) -> str:
    """What a command prints, run in this process."""
    ended = here(*arguments)
    assert ended.code == 0, ended.error
    return ended.out


def last(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def tensors(folder: Path) -> dict[str, bytes]:
    (path,) = (folder / "checkpoint").glob("*.safetensors")
    return {name: t.numpy().tobytes() for name, t in load_file(path).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    good("train", "digits", *SMALL, "--out", out)
    return out


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(5 * 64, dtype=np.uint8).reshape(5, 1, 8, 8))
    return path


def test_train_leaves_a_complete_run_folder(run: Path) -> None:
    names = {p.name for p in run.iterdir()}
    files = {"config.toml", "clients.json", "metrics.jsonl", "report.html"}
    assert names == files | {"best", "checkpoint", "lock"}
    listed = json.loads((run / "clients.json").read_text())
    assert [len(listed[group]) for group in ("train", "validation", "test")] == [20, 40, 6]
    assert all(len(c["images"]) == c["points"] == 40 and c["labeled"] for c in listed["train"])
    assert all(
        "labeled" not in c and c["traits"]["rotation"] in (0, 90, 180, 270) for c in listed["test"]
    )
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["round"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["round"] for m in metrics if "validation_accuracy" in m] == [3, 6]
    assert all(
        m["validation_worst_decile"] <= m["validation_accuracy"]
        for m in metrics
        if "validation_accuracy" in m
    )
    assert len(list((run / "checkpoint").iterdir())) == 2


def test_json_is_the_metrics_file(tmp_path: Path, run: Path) -> None:
    printed = good("train", "digits", *SMALL, "--out", tmp_path / "a", "--json")
    stored = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert printed == stored
    assert tensors(tmp_path / "a") == tensors(run)  # the same seed, the same bits


def test_evaluate_scores_both_readings_of_every_test_client(run: Path) -> None:
    found = last(good("evaluate", run, "--json"))
    assert len(found["clients"]) == 6
    assert set(found["metrics"]) == {"transductive", "held_out"}
    for reading, table in found["metrics"].items():
        assert list(table) == ["accuracy", "nll", "calibration_error", "macro_f1"]
        own = [c["metrics"][reading]["accuracy"] for c in found["clients"]]
        assert table["accuracy"]["mean"] == pytest.approx(sum(own) / 6)
        assert table["accuracy"]["worst_decile"] == table["accuracy"]["worst"] == min(own)
        nlls = [c["metrics"][reading]["nll"] for c in found["clients"]]
        assert table["nll"]["worst"] == max(nlls)
    assert json.loads((run / "evaluation.json").read_text()) == found
    printed = good("evaluate", run)
    assert "6 test clients" in printed and "worst decile" in printed
    assert f"{found['metrics']['held_out']['accuracy']['worst_decile']:.1f}" in printed


def test_evaluate_scores_models_made_from_few_points(run: Path) -> None:
    found = last(good("evaluate", run, "--set-sizes", "1,5,20", "--json"))
    assert [(row["points"], row["clients"]) for row in found["support"]] == [
        (1, 6),
        (5, 6),
        (20, 6),
    ]
    assert found["support"][2]["metrics"] == found["metrics"]["held_out"]
    assert json.loads((run / "evaluation.json").read_text()) == found
    printed = done_here("evaluate", run, "--set-sizes", "1,5")
    assert "from 1" in printed and "from 5" in printed
    assert "ask for 20 at most" in refused_here("evaluate", run, "--set-sizes", "21")
    assert "whole numbers" in refused_here("evaluate", run, "--set-sizes", "1;5")


def test_a_stranger_personalizes_and_predicts(run: Path, images: Path, tmp_path: Path) -> None:
    model, answer = tmp_path / "me.safetensors", tmp_path / "classes.npy"
    told = last(good("personalize", run, "--input", images, "--out", model, "--json"))
    assert (told["model"], told["points"], told["made"]) == (str(model), 5, "personal")
    assert told["familiarity"]["foreign"]  # five pictures of counting
    found = last(good("predict", model, "--input", images, "--out", answer, "--json"))
    assert np.load(answer).tolist() == found["classes"]
    assert len(found["classes"]) == 5 and set(found["classes"]) <= set(range(10))
    assert found["names"] == [str(c) for c in found["classes"]]  # of digits, which have no others
    pairs = zip(found["probabilities"], found["names"], strict=True)
    lines = good("predict", model, "--input", images).splitlines()
    assert lines == [f"{p:.3f} {name}" for p, name in pairs]


def test_embed_draws_clients_by_rotation(run: Path) -> None:
    told = last(good("embed", run, "--group", "train", "--json"))
    assert told["by"] == "rotation" and "silhouette" in told
    assert [Path(f).name for f in told["files"]] == ["embedding.png", "embedding.svg"]
    assert all(Path(f).stat().st_size > 1000 for f in told["files"])
    others = good("embed", run, "--set=data.classes_per_client=0", "--out", run.parent / "others")
    assert (run.parent / "others.svg").exists() and "others.png" in others
    assert "trained already" in refused_here("embed", run, "--set=server.rounds=2")


def test_compare_gives_mean_and_spread_and_keeps_what_is_done(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(
        'model = "mlp"\n'
        "data = {points = 20, overlap = true, train_clients = 20, test_clients = 5}\n"
        "server = {rounds = 2, cohort = 3}\n"
        "[compare]\nseeds = [0, 1]\n"
        '[compare.variants.one]\nmethod = {name = "fedavg"}\n'
        '[compare.variants.two]\nmethod = {name = "ld-fedavg"}\n'
        '[compare.variants.two.grid]\n"method.subspace.k" = [50]\n'
    )
    out = tmp_path / "out"
    table = good("compare", study, "--out", out)
    assert "one" in table and "±" in table and "decile" in table
    assert "two" in table and "subspace" not in table  # nothing differs between variants of it
    page = (out / "comparison.html").read_text()
    assert "Difference to one at the same clients" in page and "over 10 pairs" in page
    summary = json.loads((out / "summary.json").read_text())
    for row in (summary[name] for name in ("one", "two/method.subspace.k=50")):
        assert row["mean"] == pytest.approx(sum(row["seeds"]) / 2)
        assert len(row["seeds"]) == 2 and row["std"] >= 0
        assert row["worst_decile"]["mean"] <= row["mean"] and row["nll"]["mean"] > 0
        assert f"{row['worst_decile']['mean']:.1f}" in table
    results = json.loads((out / "results.json").read_text())
    assert {"accuracy", "worst_decile", "held_out", "held_out_nll", "validation"} <= set(results[0])
    before = (out / "one" / "seed-0" / "metrics.jsonl").read_text()
    assert last(done_here("compare", study, "--out", out, "--json")) == summary
    assert (out / "one" / "seed-0" / "metrics.jsonl").read_text() == before
    told = done_here("compare", study, "--out", out, "--only", "two", "--json")
    assert "one/seed-0" not in told and "two" in told
    assert last(told) == summary  # what was done before stays
    assert "one, two/" in refused_here("compare", study, "--out", out, "--only", "three")


def test_methods_are_listed_with_one_line_each() -> None:
    lines = good("methods").splitlines()
    found = last(good("methods", "--json"))
    assert [line.split()[0] for line in lines] == [row["name"] for row in found]
    assert {"flowdup", "fedavg", "fedprox", "ld-fedavg", "fedtta"} <= {row["name"] for row in found}
    assert all(row["summary"] in line for row, line in zip(found, lines, strict=True))
    able = {row["name"] for row in found if row["learns_unlabeled"]}
    assert able == {"flowdup", "flowdup-plus", "fedavg-pseudo"}


def test_data_commands_list_and_verify_and_say_how_to_fetch(tmp_path: Path) -> None:
    listed = good("data", "list")
    assert all(text in listed for text in ("fashion-mnist", "femnist", "1x28x28", "62"))
    assert last(good("data", "list", "--json"))["digits"]
    assert "is checked and right" in good("data", "verify", "digits")
    os.environ["FLOWDUP_DATA"] = str(tmp_path)
    try:
        assert "flowdup data fetch mnist" in refused_here("data", "verify", "mnist")
        assert "choose one of digits" in refused_here("data", "fetch", "imagenet")
        for command in ("fetch", "verify"):
            assert "github.com/TalwalkarLab/leaf" in refused_here("data", command, "femnist")
        assert "flowdup data fetch mnist" in refused_here(
            "train", "digits", "--set=data.source=mnist", "--out", tmp_path / "r"
        )
        assert not (tmp_path / "r").exists()
    finally:
        del os.environ["FLOWDUP_DATA"]


@pytest.mark.parametrize("rounds_before", [2, 5])
def test_a_killed_run_resumes_to_the_same_bits(
    tmp_path: Path, run: Path, rounds_before: int
) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "flowdup", "train", "digits", *SMALL, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for _ in range(rounds_before):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"round": 7, "lo')  # what a kill in the middle of a line leaves
    continued = good("train", "--resume", "--out", out, "--json").splitlines()
    first = json.loads(continued[0])["round"] if continued else 7  # the last round was saved
    assert rounds_before // 2 * 2 + 1 <= first <= 7
    assert tensors(out) == tensors(run)
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["round"] for m in told] == [1, 2, 3, 4, 5, 6]
    straight = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["loss"] for m in told] == [m["loss"] for m in straight]


def test_a_run_killed_again_and_again_loses_nothing(tmp_path: Path, run: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "flowdup", "train", "digits", *SMALL, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    metrics = out / "metrics.jsonl"
    for lines in (0, 1, 4):
        process = subprocess.Popen(
            [*command, "--resume"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        while process.poll() is None and not (
            metrics.exists() and len(metrics.read_bytes().splitlines()) > lines
        ):
            time.sleep(0.002)
        process.kill()
        _, errors = process.communicate()
        assert errors == b""
    good("train", "digits", *SMALL, "--out", out, "--resume")
    assert tensors(out) == tensors(run)


def test_a_million_clients_are_trained_on(tmp_path: Path) -> None:
    out = tmp_path / "million"
    settings = ("train_clients=1_000_000", "lazy=true", "labeled_fraction=0.1")
    good("train", "digits", *SMALL, *(f"--set=data.{text}" for text in settings), "--out", out)
    listed = json.loads((out / "clients.json").read_text())
    assert (listed["train"]["clients"], listed["train"]["labeled"]) == (1_000_000, 100_000)
    assert (out / "clients.json").stat().st_size < 50_000
    assert len(last(good("evaluate", out, "--json"))["clients"]) == 6


def test_a_run_is_not_overwritten_and_not_continued_as_another(run: Path) -> None:
    before = tensors(run)
    assert "add --resume" in refused_here("train", "digits", *SMALL, "--out", run)
    told = refused_here("train", "digits", *SMALL, "--set=seed=3", "--out", run, "--resume")
    assert "seed is 3 in the settings given and 0 in the checkpoint" in told
    told = refused_here(
        "train", "digits", *SMALL, "--set=server.lr_decay_fraction=0.5", "--out", run, "--resume"
    )
    assert "server.lr_decay_fraction is 0.5 in the settings given and 0.0 in" in told
    assert "trained for 6 rounds and server.rounds is 5" in refused_here(
        "train", "--set=server.rounds=5", "--out", run, "--resume"
    )
    assert tensors(run) == before


def test_bad_input_is_answered_in_one_sentence_and_leaves_nothing(
    run: Path, images: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "me.safetensors", tmp_path / "r"
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, x=np.zeros((5, 3, 8, 8), np.uint8))
    assert "(3, 8, 8)" in refused_here("personalize", run, "--input", wrong, "--out", model)
    np.savez(wrong, x=np.zeros((0, 1, 8, 8), np.uint8))
    assert "is empty" in refused_here("personalize", run, "--input", wrong, "--out", model)
    np.savez(wrong, x=np.full((5, 1, 8, 8), np.nan))
    assert "uint8" in refused_here("personalize", run, "--input", wrong, "--out", model)
    refused_here("personalize", run, "--input", tmp_path / "nowhere.npz", "--out", model)
    assert "train first" in refused_here("personalize", tmp_path, "--input", images, "--out", model)
    assert not model.exists()
    assert "personalize again" in refused_here("predict", wrong, "--input", images)
    assert "did you mean 'server.rounds'" in refused_here(
        "train", "digits", "--set=server.round=1", "--out", out
    )
    assert "use one of flowdup, flowdup-plus, fedavg" in refused_here(
        "train", "digits", "--set=method.name=sorcery", "--out", out
    )
    assert "use one of digits, mnist" in refused_here(
        "train", "digits", "--set=data.source=imagenet", "--out", out
    )
    assert "k = 99999" in refused_here(
        "train", "digits", "--set=method.subspace.k=99999", "--out", out
    )
    assert "no training client has a label" in refused_here(
        "train", "digits", "--set=data.labeled_fraction=0.0", "--out", out
    )
    assert "not a run folder" in refused_here("evaluate", tmp_path)
    assert "did you mean 'digits'" in refused_here("train", "digitz", "--out", out)
    assert "no trait 'color'" in refused_here("embed", run, "--by", "color")
    assert "no group 'all'" in refused_here("embed", run, "--group", "all")
    assert "give a preset" in refused_here("train", "--out", out)
    assert "reads images [channels, height, width]" in refused_here(
        "train", "digits", "--set=model=cnn", "--set=data.source=folder", "--out", out,
        f"--set=data.path={_floats(tmp_path / 'clients')}", "--set=data.validation_clients=1",
        "--set=data.test_clients=1", "--set=data.train_clients=0", "--set=data.overlap=false",
        "--set=data.classes_per_client=0", "--set=data.rotations=[]",
    )  # fmt: skip
    assert not out.exists()
    assert "[/foo]" in refused_here("train", "digits", "--set=[/foo]", "--out", out)
    assert "could not write" in refused_here("train", "digits", *SMALL, "--out", images)
    assert "folder" in refused_here("personalize", run, "--input", images, "--out", "/")
    assert images.exists()
    assert "importing nothing failed" in refused("--import", "nothing", "data", "list")


def _floats(folder: Path) -> Path:
    folder.mkdir()
    for i in range(4):
        np.savez(folder / f"{i}.npz", x=np.zeros((3, 4), np.float32), y=[0, 1, 1])
    return folder


def test_a_flipped_byte_in_a_checkpoint_stops_every_command(
    run: Path, images: Path, tmp_path: Path
) -> None:
    """Models are made of the best round, and training goes on from the last."""
    contents = {p: p.read_bytes() for p in run.glob("*/*.safetensors")}
    assert len(contents) == 2
    for path, whole in contents.items():
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        commands: list[list[str | Path]] = [
            ["evaluate", run],
            ["personalize", run, "--input", images, "--out", tmp_path / "m"],
            ["train", "--resume", "--out", run],
        ]
        for command in commands:
            assert "truncated or was changed" in refused_here(*command)
    finally:
        for path, whole in contents.items():
            path.write_bytes(whole)


def test_ones_own_clients_and_model_take_part(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for i in range(12):
        labels: dict[str, Any] = {"y": draw.integers(0, 3, 10)} if i % 2 else {}
        x = draw.normal(size=(10, 4)).astype(np.float32)
        np.savez(folder / f"site-{i}.npz", x=x, region=["north", "south"][i % 2], **labels)
    (tmp_path / "mynets.py").write_text(
        "import flowdup\nfrom torch import nn\n"
        "flowdup.register_model('tiny', lambda shape, outputs: nn.Linear(shape[0], outputs))\n"
        "flowdup.register_metric('width', lambda logits, y: logits.shape[1])\n"
    )
    (tmp_path / "mine.toml").write_text(
        'model = "tiny"\n'
        f'data = {{source = "folder", path = "{folder}", classes = 3, '
        "validation_clients = 2, test_clients = 4}\n"
        'method = {subspace = {k = 5}, hypernetwork = {backbone = "mlp"}}\n'
        "server = {rounds = 2, cohort = 3}\n"
    )
    out = tmp_path / "run"
    assert "--import" in refused("train", "mine.toml", "--out", out, cwd=tmp_path)
    good("--import", "mynets", "train", "mine.toml", "--out", out, cwd=tmp_path)
    assert "width" in good("--import", "mynets", "evaluate", out, cwd=tmp_path)
    told = last(
        good("--import", "mynets", "embed", out, "--group", "train", "--json", cwd=tmp_path)
    )
    assert told["by"] == "region"
    study = tmp_path / "study.toml"
    study.write_text(
        (tmp_path / "mine.toml").read_text() + "[compare]\nseeds = [0]\n"
        "[compare.variants.one.grid]\n'server.cohort' = [2, 3]\n"
    )
    summary = last(
        good("--import", "mynets", "compare", study, "--out", "two", "--json", cwd=tmp_path)
    )
    assert set(summary) == {"one/server.cohort=2", "one/server.cohort=3"}
    assert summary["one/server.cohort=2"]["width"]["mean"] == 3.0  # classes
    assert "no validation clients" in refused(
        "--import", "mynets", "embed", out, "--set=data.validation_clients=0", cwd=tmp_path
    )
    np.savez(folder / "site-1.npz", x=np.full((10, 4), np.inf, np.float32))
    told = refused("--import", "mynets", "train", "mine.toml", "--out", "r2", cwd=tmp_path)
    assert "client 'site-1' has NaN or infinite" in told
    assert not (tmp_path / "r2").exists()


def test_a_full_disk_stops_a_run_with_one_sentence_and_what_was_saved_stays(
    tmp_path: Path, run: Path
) -> None:
    out = tmp_path / "full"
    good("train", "digits", *SMALL, "--set=server.rounds=2", "--out", out)
    before = tensors(out)
    train = f"{sys.executable} -m flowdup train digits {' '.join(SMALL)} --out {out} --resume"
    script = f"ulimit -f 64; {train}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: could not write") and "intact" in done.stderr
    assert "Traceback" not in done.stderr
    assert tensors(out) == before
    good("train", "digits", *SMALL, "--out", out, "--resume")
    assert tensors(out) == tensors(run)


def test_help_and_misuse() -> None:
    assert "personalize" in good("--help")
    done = flowdup("train", "--no-such-option")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_folder_with_the_name_of_a_library_is_not_executed(tmp_path: Path) -> None:
    """The installed command, in a folder where somebody else has put one."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("raise SystemExit('executed')")
    flowdup = str(Path(sys.executable).with_name("flowdup"))
    command = [flowdup, "train", "digits", *SMALL, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "executed" not in done.stderr, done.stderr
