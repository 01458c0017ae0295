"""What stands in examples/ runs as it says."""

import json
import runpy
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
FEW = [
    "--set=data.train_clients=20",
    "--set=data.validation_clients=5",
    "--set=data.test_clients=5",
]
SHORT = ["--set=server.rounds=2", "--set=server.cohort=5"]


def flowdup(*words: object, code: int = 0) -> str:
    done = forked.flowdup(*words, cwd=ROOT)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_fedavg_from_its_pieces() -> None:
    main = runpy.run_path(str(ROOT / "examples" / "fedavg.py"))["main"]
    assert main(rounds=20) > 50  # ten classes


def test_a_model_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    own = ("--import", "examples/own_model.py")
    flowdup(
        *own, "train", "digits", "--out", tmp_path / "run", "--set=model=two-layers", *FEW, *SHORT
    )
    assert "two-layers" in (tmp_path / "run" / "config.toml").read_text()
    flowdup("--import", "examples/own_metric.py", *own, "evaluate", tmp_path / "run")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    found = evaluation["metrics"]["transductive"]
    assert found["top_two"]["mean"] >= found["accuracy"]["mean"]
    assert "unknown model 'two-layers'" in flowdup("evaluate", tmp_path / "run", code=2)


def test_clients_of_ones_own(tmp_path: Path) -> None:
    own = ("--import", "examples/own_data.py")
    flowdup(*own, "train", "examples/own_data.toml", "--out", tmp_path / "run", *SHORT)
    groups = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert [len(groups[name]) for name in ("train", "validation", "test")] == [80, 20, 20]
    assert sum(client["labeled"] for client in groups["train"]) == 40
    flowdup(*own, "evaluate", tmp_path / "run")


def test_a_method_of_ones_own_is_listed_trained_and_compared(tmp_path: Path) -> None:
    own = ("--import", "examples/my_method.py")
    assert "mean-bias" in flowdup(*own, "methods")
    named = "--set=method.name=mean-bias"
    flowdup(*own, "train", "digits", "--out", tmp_path / "run", named, *FEW, *SHORT)
    study = tmp_path / "study.toml"
    variants = '[compare]\nseeds = [0]\n[compare.variants]\nfedavg = {method = {name = "fedavg"}}\n'
    mine = 'mine = {method = {name = "mean-bias", scale = 0.2}}\n'
    study.write_text(f'model = "mlp"\n[data]\nsource = "digits"\noverlap = true\n{variants}{mine}')
    flowdup(*own, "compare", study, "--out", tmp_path / "all", "--jobs", 1, *FEW, *SHORT)
    assert json.loads((tmp_path / "all" / "summary.json").read_text()).keys() == {"fedavg", "mine"}


def test_a_method_of_ones_own_keeps_the_laws() -> None:
    told = flowdup("check", "examples/my_method.py")
    assert "mean-bias" in told and "broken" not in told


BROKEN = {
    "order": ("present @ self.f.read(x)", "present @ self.f.read(x).cumsum(0)"),
    "gradient": ('params["A"] @ mean', 'params["A"].detach() @ mean + 0 * params["A"].sum()'),
    "unlabeled": ("batch)\n\n\nflowdup", 'batch) + params["A"].square().sum()\n\n\nflowdup'),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_method_with_a_bug_is_told_the_law_that_it_breaks(law: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "my_method.py").read_text()
    right, wrong = BROKEN[law]
    assert right in text
    (tmp_path / "bug.py").write_text(text.replace(right, wrong))
    told = flowdup("check", tmp_path / "bug.py", code=1)
    assert f"broken {law}: " in told
    verdicts = json.loads(flowdup("check", tmp_path / "bug.py", "--json", code=1))["mean-bias"]
    assert next(v["broken"] for v in verdicts if v["law"] == law)


def test_what_cannot_be_checked_is_answered_with_a_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert "registers no method" in flowdup("check", empty, code=2)
    assert "there is no file" in flowdup("check", tmp_path / "none.py", code=2)
    assert "only settings of the method" in flowdup("check", "fedavg", "--set=seed=1", code=2)
