"""A run of several stages: each begins where the one before it ended, in one folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import change_tensors
from processes import tensors
from small import METHODS, population
from staged import FIRST, SECOND, TABLE, shaky, staged, train

from flowdup import Config, evaluate_run, load, load_config, read_config, train_run
from flowdup.checkpoint import load_checkpoint
from flowdup.errors import CheckpointError, ConfigError
from flowdup.evaluation import transductive_accuracy
from flowdup.models import Weights
from flowdup.run import RunFolder, Simulation
from flowdup.run.comparison import collect, read_comparison
from flowdup.run.round_metrics import validated
from flowdup.server import ServerState

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three stages, trained by one call."""
    out = tmp_path_factory.mktemp("stages")
    train(staged(), out)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(whole, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_the_rounds_of_all_stages_are_counted_together(whole: Path) -> None:
    rows = RunFolder(whole).read_metrics()
    assert [row["round"] for row in rows] == list(range(1, staged().rounds + 1))
    assert [row["stage"] for row in rows] == [0] * 3 + [1] * 3 + [2] * 4
    state = load_checkpoint(whole / "checkpoint")[1]
    assert (state.stage, state.began, state.round) == (2, 6, 10)
    assert load(whole).spec.method["name"] == "flowdup"


def test_every_stage_is_scored_after_its_last_round(whole: Path) -> None:
    rows = RunFolder(whole).read_metrics()
    assert [row["round"] for row in rows if "validation_accuracy" in row] == [2, 3, 4, 6, 8, 10]


def two_stages(**run: Any) -> Config:
    """A first stage whose best round is not its last."""
    first = {"method": {"name": "fedavg"}, "server": {"rounds": 4}}
    last = {"method": METHODS["flowdup"], "before": [first]}
    return shaky(1, run={"evaluate_every": 1} | run, **last)


def states_of_first_stage(config: Config) -> tuple[Simulation, list[ServerState]]:
    simulation = Simulation(config, population(), stage=0)
    return simulation, [s for s, _ in simulation.rounds(simulation.initial_state())]


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], w) for n, w in b.items())


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_stage_begins_from_the_round_that_the_one_before_it_kept(
    keep: str, tmp_path: Path
) -> None:
    config = two_stages(keep=keep)
    _, states = states_of_first_stage(config)
    assert states[-1].best and states[-1].best.round < 4
    wanted = states[states[-1].best.round - 1 if keep == "best" else -1].psi
    train(config, tmp_path)
    start = load_checkpoint(tmp_path / "checkpoint")[1].start
    assert equal(start, wanted)
    method: Any = load(tmp_path).method
    theta_0 = torch.cat([wanted[n].flatten() for n in method.f.shapes])
    assert torch.equal(method.subspace.theta_0, theta_0)


def test_h1s_trunk_begins_with_what_the_stage_before_learned(whole: Path) -> None:
    start = load_checkpoint(whole / "checkpoint")[1].start
    psi = Simulation(staged(), population(), 2, start).initial_state().psi
    assert torch.equal(psi["h1.1.weight"], start["1.weight"])


def test_a_stage_passes_on_its_average_and_its_calibration() -> None:
    first = FIRST | {"server": {"rounds": 3, "averaging": 0.9}}
    config = read_config(TABLE | {"before": [first]})
    simulation, states = states_of_first_stage(config)
    last = states[-1]
    start = simulation.next_stage(config, last).start
    scale, bias = last.correction["scale"], last.correction["bias"]
    names = list(start)
    weight_name, bias_name = names[-2:]
    assert torch.equal(start[weight_name], scale * last.average[weight_name])
    assert torch.equal(start[bias_name], scale * last.average[bias_name] + bias)
    assert all(torch.equal(start[n], last.average[n]) for n in names[:-2])
    assert not torch.equal(last.average[names[0]], last.psi[names[0]])


def test_the_expansions_fingerprint_covers_what_a_stage_began_from(run: RunFolder) -> None:
    assert load_checkpoint(run.checkpoint)[0].expansion_sha256 != _fingerprint_by_seed()
    change_tensors(run.kept, lambda t: t["start/1.weight"].view(-1)[:1].add_(1e-6))
    with pytest.raises(CheckpointError, match="another expansion"):
        load(run.path)
    with pytest.raises(CheckpointError, match="another expansion"):
        evaluate_run(run.path, population())


def _fingerprint_by_seed() -> str:
    return Simulation(staged(before=[]), population()).federation.expansion_sha256


def test_what_a_stage_begins_from_is_sent_once(run: RunFolder, tmp_path: Path) -> None:
    d = load(run.path).method.f.size
    assert evaluate_run(run.path, population())["cost"]["bytes_once"] == 4 * d
    train(shaky(1), tmp_path / "alone")
    assert evaluate_run(tmp_path / "alone", population())["cost"]["bytes_once"] == 0


def test_what_is_sent_in_a_round_is_the_mean_over_all_stages(
    run: RunFolder, tmp_path: Path
) -> None:
    alone = [staged(before=[]), shaky(1)]  # the last stage, and what a stage of FedAvg sends
    for number, config in enumerate(alone):
        train(config, tmp_path / str(number))
    last, first = (evaluate_run(tmp_path / name, population())["cost"] for name in ("0", "1"))
    found = evaluate_run(run.path, population())["cost"]
    for key in ("bytes_up", "bytes_down"):
        assert first[key] != last[key]
        assert found[key] == round((6 * first[key] + 4 * last[key]) / 10)
    assert found["parameters"] == last["parameters"]
    assert found["train_flops"] < last["train_flops"]


def test_costs_are_told_where_a_stage_before_needs_one_before_it(tmp_path: Path) -> None:
    plus = METHODS["flowdup-plus"] | {"train_theta": False, "pseudo_labels": True}
    config = staged(before=[FIRST, {"method": plus, "server": {"rounds": 2}}])
    train(config, tmp_path)
    assert evaluate_run(tmp_path, population())["cost"]["bytes_up"] > 0


@pytest.mark.parametrize("resumed", [False, True])
def test_a_last_stage_that_makes_it_worse_leaves_what_it_began_from(
    resumed: bool, tmp_path: Path
) -> None:
    calm = FIRST | {"client": {"batch_size": 10, "optimizer": {"lr": 0.01}}}
    config = shaky(4, before=[calm])
    rows = train(config, tmp_path)
    assert rows[3]["start_accuracy"] > max(row["validation_accuracy"] for row in rows[3:])
    if resumed:
        train(shaky(5, before=[calm]), tmp_path, resume=True)
    start = load_checkpoint(tmp_path / "checkpoint")[1].start
    best, told = load(tmp_path), evaluate_run(tmp_path, population())
    assert best.round == told["round"] == 3 and equal(best.psi, start)
    simulation, state = Simulation.resume(config, tmp_path / "best", population())
    found = transductive_accuracy(simulation.engine, state.deployed, population().validation)
    assert found.mean == rows[3]["start_accuracy"]


def test_the_start_is_not_kept_where_the_last_round_is_asked_for(tmp_path: Path) -> None:
    rows = train(two_stages(keep="last"), tmp_path)
    assert "start_accuracy" in rows[4] and load(tmp_path).round == 5
    assert not (tmp_path / "best").exists()


def test_a_stage_that_gets_no_better_makes_room_for_the_next(tmp_path: Path) -> None:
    config = two_stages(patience=1)
    rows = train(config, tmp_path)
    assert [row["stage"] for row in rows] == [0, 0, 1] and rows[-1]["round"] == 3
    assert train(config, tmp_path, resume=True) == []


@pytest.mark.parametrize("rounds", [2, 3, 5, 6])  # inside a stage, and at its border
def test_a_run_that_is_stopped_goes_on_in_the_same_stage(
    rounds: int, whole: Path, tmp_path: Path
) -> None:
    asked = iter(range(100))
    config = staged()
    done = list(train_run(config, tmp_path, False, population(), lambda: next(asked) == rounds))
    assert len(done) == rounds == load_checkpoint(tmp_path / "checkpoint")[1].round
    rest = train(config, tmp_path, resume=True)
    assert [row["round"] for row in rest] == list(range(rounds + 1, 11))
    assert tensors(tmp_path) == tensors(whole) and tensors(tmp_path, "best") == tensors(
        whole, "best"
    )


@pytest.mark.parametrize("name", ["flowdup", "flowdup-plus"])
def test_a_run_that_ends_when_a_stage_has_just_begun_goes_on_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    """Of sizes that are no multiples of anything: where factors begin in memory decides bits."""
    config = staged(
        before=[FIRST],
        model="cnn-small",
        method={
            "name": name,
            "correction": "em",
            "subspace": {"kind": "hashed", "k": 51},
            "hypernetwork": {"hidden": 11, "embedding": 13},
        },
        run={"checkpoint_every": 50, "evaluate_every": 2},
    )
    train(config, tmp_path / "whole")
    rows = train_run(config, tmp_path / "ended", population=population())
    while next(rows)["round"] < 4:
        pass
    rows.close()  # nothing is saved but the start of the stage
    assert load_checkpoint(tmp_path / "ended" / "checkpoint")[1].round == 3
    train(config, tmp_path / "ended", resume=True)
    for where in ("checkpoint", "best"):
        assert tensors(tmp_path / "ended", where) == tensors(tmp_path / "whole", where)


KILLS = """
import os, signal, sys
from pathlib import Path
from small import population
from staged import staged
from torture.runs import fork, train, undisturbed, wait_for
from flowdup import train_run

home, found = Path(sys.argv[1]), []
work = undisturbed("stages", staged(), home / "whole")

def killed(prepare, folder):
    def life():
        prepare()
        for row in train_run(work.config, folder, population=population()):
            if str(row["round"]) == folder.name:
                os.kill(os.getpid(), signal.SIGKILL)
    assert wait_for(*fork(life))[0] == -signal.SIGKILL, folder
    found.extend(work.resumed(folder))

def before_replacing_best(number):
    replace, seen = os.replace, []
    def watched(source, target):
        if Path(target).parent.name == "best":
            seen.append(target)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = watched

for rounds in (1, 3, 5, 6, 7, 9):  # inside of every stage and at both borders
    killed(lambda: None, home / str(rounds))
best, saves = {}, 0
for row in work.rows:
    for found_here in (row.get("start_accuracy", -1), row.get("validation_accuracy", -1)):
        if found_here > best.get(row["stage"], -1):
            best[row["stage"]], saves = found_here, saves + 1
for number in (1, 4, 2 * saves - 1, 2 * saves):  # before the tensors or the header of a best round
    killed(lambda: before_replacing_best(number), home / f"best-{number}")
print(found)
"""


def test_a_run_killed_in_any_stage_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Real processes: psi, averages, corrections, the best round and the metrics are compared."""
    path = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("method", ["pefll", "flux", "odpfl-hn"])
def test_a_stage_that_nothing_can_follow_is_refused_before_it_is_trained(
    method: str, tmp_path: Path
) -> None:
    config = staged(before=[FIRST, {"method": {"name": method}}])
    with pytest.raises(ConfigError, match=rf"number 2: method '{method}' learns no model for"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_clients_too_few_for_a_later_stage_are_refused_before_the_first(tmp_path: Path) -> None:
    config = staged(server={"rounds": 1, "cohort": 9, "replacement": False}, before=[FIRST])
    few = staged(before=[{"server": {"cohort": 2}}], server={"cohort": 9, "replacement": False})
    for refused in (config, few):
        with pytest.raises(ConfigError, match=r"a cohort needs \d labeled clients"):
            train(refused, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_last_stage_that_cannot_be_built_is_refused_before_the_first(tmp_path: Path) -> None:
    large = {"name": "flowdup", "subspace": {"k": 10**6}}
    with pytest.raises(ConfigError, match="the subspace dimension k = 1000000 must lie between"):
        train(staged(method=large), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_other_stages(run: RunFolder) -> None:
    changed = staged(before=[FIRST, SECOND | {"client": {"epochs": 7}}])
    with pytest.raises(ConfigError, match=r"before\.2\.client\.epochs is 7 in .* and 1 in the"):
        train(changed, run.path, resume=True)
    with pytest.raises(ConfigError, match=r"before\.2\.\S+ is not given in the settings given"):
        train(staged(before=[FIRST]), run.path, resume=True)
    longer = staged(before=[FIRST | {"server": {"rounds": 4}}, SECOND])
    with pytest.raises(ConfigError, match=r"before\.1\.server\.rounds is 4"):
        train(longer, run.path, resume=True)


def test_the_last_stage_may_go_on_for_longer(run: RunFolder) -> None:
    last = {"rounds": 5, "cohort": 3, "averaging": 0.9}
    before = [FIRST | {"server": {"rounds": 3}}, SECOND]
    rows = train(staged(server=last, before=before), run.path, resume=True)
    assert [row["round"] for row in rows] == [11]


def test_the_page_of_a_run_with_stages_can_be_read(run: RunFolder) -> None:
    found = evaluate_run(run.path, population())
    page = run.report.read_text()
    assert "Not readable" not in page and "[[before]]" in page
    assert found["round"] == load(run.path).round


STUDY = """
model = "mlp"
data = {points = 20, overlap = true, train_clients = 10, validation_clients = 4, test_clients = 2}
engine = {name = "batched", device = "cpu"}
server = {rounds = 2, cohort = 3, optimizer = {eps = 1e-4}}
run = {evaluate_every = 1}
method = {name = "flowdup", subspace = {k = 50}, hypernetwork = {embedding = 12, hidden = 10}}
"""
BEFORE = """
[[BEFORE]]
method = {name = "fedavg"}
client = {optimizer = {lr = 0.3}}
server = {rounds = 3}
"""


def test_a_comparison_may_have_variants_with_stages(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    tables = "[compare]\nseeds = [0]\n[compare.variants.cold]\nclient = {epochs = 2}\n"
    warm = BEFORE.replace("BEFORE", "compare.variants.warm.before")
    study.write_text(STUDY + tables + warm)
    cold, warm_job = jobs = read_comparison(str(study), tmp_path)
    assert (cold.config.rounds, warm_job.config.rounds) == (2, 5)
    for job in jobs:
        list(train_run(job.config, job.run.path))
        evaluate_run(job.run.path)
    rows = collect(jobs, tmp_path)
    assert [row["method"] for row in rows] == ["flowdup", "flowdup"]
    told = {v.round: v for v in validated(warm_job.run.read_metrics(), stage=1)}
    assert {*told} == {3, 4, 5}
    kept = told[rows[1]["rounds"]]
    assert rows[1]["validation"] == kept.accuracy == max(v.accuracy for v in told.values())
    assert rows[1]["validation_worst_decile"] == kept.worst_decile


def test_several_processes_go_on_from_the_command_line_as_one_would(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY + BEFORE.replace("BEFORE", "before"))
    config = load_config(str(study))
    list(train_run(config, tmp_path / "one"))
    begun = train_run(config, tmp_path / "two")
    assert [next(begun)["round"] for _ in range(2)] == [1, 2]
    begun.close()
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "flowdup"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "train", "--resume", "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "150"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder") == 1  # one process speaks
    for checkpoint in ("checkpoint", "best"):
        one, two = (load_checkpoint(tmp_path / n / checkpoint)[1] for n in ("one", "two"))
        assert (two.stage, two.round, two.began) == (one.stage, one.round, one.began)
        for a, b in ((one.psi, two.psi), (one.start, two.start)):
            # sums are in another order, of which Adam would make whole steps if its eps were small
            assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-6
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == [0, 0, 0, 1, 1]
