"""The engine of a federation, with nodes in this process: psi, refusals, what is withheld."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nearby import NODES, TABLE, NearbyFederation
from nvflare.collab import CollabCallError
from nvflare.collab.api.context import Context, set_call_context
from safetensors.torch import load, save

from flowdup.checkpoint import load_checkpoint
from flowdup.config import read_config
from flowdup.errors import FederationError
from flowdup.federation.record import NodeRecord, read_rounds
from flowdup.federation.status import federation_status
from flowdup.methods import Params
from flowdup.models import build_network
from flowdup.params import pack
from flowdup.personal_model import PersonalModel
from flowdup.personalize import load as load_federation
from flowdup.personalize import load_model
from flowdup.privacy import Draw, PrivateRounds, epsilon
from flowdup.run.simulation import Simulation
from flowdup.run.training import train_run
from flowdup.server import ServerState


def psi(run: Path) -> Params:
    return load_checkpoint(run / "checkpoint")[1].psi


def simulated(near: NearbyFederation) -> tuple[Params, list[dict[str, Any]]]:
    out = near.root / "simulated"
    rows = list(train_run(near.config, out, population=near.population))
    return psi(out), rows


def apart(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


@pytest.mark.parametrize("encoding", ["plain", "factors"])
def test_psi_is_the_simulators(tmp_path: Path, encoding: str) -> None:
    near = NearbyFederation(tmp_path)
    assert near.train(near.nodes(), encoding=encoding) == "finished"
    mine, rows = simulated(near)
    assert apart(psi(near.run), mine) < 1e-5
    found = (_metrics(near.run), rows)
    accuracies = [[row.get("validation_accuracy") for row in each] for each in found]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize(("encoding", "times"), [("bf16", 1.9), ("int8", 3.3)])
def test_rounded_updates_are_smaller_and_lead_to_the_same_place(
    tmp_path: Path, encoding: str, times: float
) -> None:
    server = TABLE["server"] | {"optimizer": {"name": "sgd", "lr": 1.0}}
    method = {"method": {"name": "fedavg"}, "server": server}
    near = NearbyFederation(tmp_path / "rounded", TABLE | method)
    plain = NearbyFederation(tmp_path / "plain", TABLE | method)
    assert near.train(near.nodes(), encoding=encoding) == "finished"
    assert plain.train(plain.nodes(), encoding="plain") == "finished"
    first = Simulation(plain.config, plain.population).initial_state().psi
    there, wanted, begin = (
        pack({n: found[n] for n in first}) for found in (psi(near.run), psi(plain.run), first)
    )
    error, way = there - wanted, wanted - begin
    assert 0 < float(error.norm() / way.norm()) < 0.02
    sizes = [federation_status(f.folder, f.run, ask=False) for f in (near, plain)]
    assert sizes[1]["bytes_up_per_client"] > times * sizes[0]["bytes_up_per_client"]
    assert sizes[1]["bytes_down_per_client"] == sizes[0]["bytes_down_per_client"]
    row = _metrics(near.run)[-1]
    assert row["bytes_up_per_client"] == pytest.approx(sizes[0]["bytes_up_per_client"], rel=0.01)


def test_stages_run_across_nodes(tmp_path: Path) -> None:
    first = {"method": {"name": "fedavg"}, "server": {"rounds": 2, "optimizer": {"lr": 0.01}}}
    run = TABLE["run"] | {"keep": "best"}
    near = NearbyFederation(tmp_path, TABLE | {"before": [first], "run": run})
    assert near.train(near.nodes()) == "finished"
    mine, rows = simulated(near)
    assert [row["stage"] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert apart(psi(near.run), mine) < 1e-5
    starts = [[row.get("start_accuracy") for row in each] for each in (_metrics(near.run), rows)]
    assert starts[0] == starts[1] and starts[0][2] is not None
    assert starts[0].count(None) == len(rows) - 1


def test_nodes_read_inputs_as_the_start_does(tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    near = NearbyFederation(tmp_path, TABLE | {"start": str(start)})
    theirs = replace(near.population.spec, mean=(0.5,), std=(0.2,))
    network = build_network("mlp", theirs.shape, theirs.classes, theirs.reader())
    weights = {n: p.detach() for n, p in network.module.named_parameters()}
    PersonalModel("mlp", theirs, weights).save(start)
    assert near.train(near.nodes()) == "finished"
    assert load_federation(near.run).spec.inputs.mean == (0.5,)
    assert apart(psi(near.run), simulated(near)[0]) < 1e-5


CORRECTED = TABLE | {"method": TABLE["method"] | {"correction": "em"}}


@pytest.mark.parametrize("name", ["flowdup", "flowdup-plus"])
def test_a_correction_is_fitted_across_nodes(tmp_path: Path, name: str) -> None:
    near = NearbyFederation(tmp_path, CORRECTED | {"method": CORRECTED["method"] | {"name": name}})
    stubs = near.nodes()
    assert near.train(stubs) == "finished"
    _, rows = simulated(near)
    mine, there = (load_checkpoint(p / "checkpoint")[1] for p in (tmp_path / "simulated", near.run))
    assert apart(there.psi, mine.psi) < 1e-5
    assert apart(there.correction, mine.correction) < 1e-3
    assert float(there.correction["bias"].abs().max()) > 0.01  # it was fitted
    accuracies = [
        [row.get("validation_accuracy") for row in each] for each in (_metrics(near.run), rows)
    ]
    assert accuracies[0] == accuracies[1] and accuracies[0][-1]
    asked = [name for name, _, _ in stubs[0].calls if name == "likelihood"]
    assert 10 < len(asked) < 2 * 3 * 70  # two evaluations of three moves
    client = near.population.train[0]
    model = load_model(near.folder.kit("north") / "models" / "client-000.safetensors")
    own = load_federation(tmp_path / "simulated").personalize(client.x)
    assert torch.allclose(model.logits(client.x), own.logits(client.x), atol=1e-3)


def test_a_fit_goes_on_without_a_node_that_leaves_or_lies(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path, CORRECTED)
    stubs, seen = near.nodes(), []

    def leave(name: str, answer: Any) -> Any:
        seen.append(name)
        if seen.count("likelihood") == 5:
            raise CollabCallError("west", name, "killed")
        return answer

    stubs[2].change = leave
    stubs[1].change = lambda name, a: a | {"gradient": [0.0]} if name == "likelihood" else a
    assert near.train(stubs) == "finished"
    assert "for the correction" in NodeRecord(near.folder).refusals("south")[0]["reason"]
    assert all(bool(t.isfinite().all()) for t in state(near).correction.values())


@pytest.mark.parametrize(
    ("about", "lie", "refused"),
    [
        ("likelihood", lambda a: {"gradient": [a["gradient"][0], *([1e300] * 10)]}, True),
        ("likelihood", lambda a: {"points": 0}, True),
        ("likelihood", lambda a: {"points": 10**400}, True),
        ("likelihood", lambda a: {"gradient": [10**400] * 11}, True),
        # which may be so
        ("likelihood", lambda a: {"gradient": [-1.7e308, *a["gradient"][1:]]}, False),
        ("shares", lambda a: {"clients": -1}, True),
        ("shares", lambda a: {"total": [math.nan] * 10}, True),
        ("shares", lambda a: {"total": [2 * share for share in a["total"]]}, True),
        ("shares", lambda a: {"total": a["total"][::-1]}, True),
    ],
)
def test_false_sums_end_no_run_and_nobody_else_is_refused(
    tmp_path: Path, about: str, lie: Callable[[Any], Any], refused: bool
) -> None:
    near = NearbyFederation(tmp_path, CORRECTED)
    near.config = read_config(CORRECTED | {"server": TABLE["server"] | {"rounds": 3}})
    stubs = near.nodes()
    for stub in stubs[1:]:
        stub.change = lambda name, a: a | lie(a) if name == about else a
    assert near.train(stubs) == "finished"
    record = NodeRecord(near.folder)
    assert [bool(record.refusals(node)) for node in NODES] == [False, refused, refused]
    assert all(bool(t.isfinite().all()) for t in state(near).correction.values())


def state(near: NearbyFederation) -> ServerState:
    return load_checkpoint(near.run / "checkpoint")[1]


def test_replies_are_aggregated_as_the_settings_say(tmp_path: Path) -> None:
    server = TABLE["server"] | {"aggregation": {"name": "median", "norm_bound": 0.5}}
    near = NearbyFederation(tmp_path, TABLE | {"server": server})
    assert near.train(near.nodes()) == "finished"
    assert apart(psi(near.run), simulated(near)[0]) < 1e-5


def private(rounds: int) -> dict[str, Any]:
    server = TABLE["server"] | {"rounds": rounds, "cohort": 4, "replacement": False}
    server |= {"aggregation": {"norm_bound": 0.5}, "privacy": {"noise": 2.0, "delta": 1e-3}}
    return TABLE | {"server": server}


def test_epsilon_counts_a_round_with_the_nodes_that_were_there(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path, private(rounds=4))
    stubs = near.nodes()

    def stop(name: str, answer: Any) -> Any:
        if name == "train" and len(_metrics(near.run)) == 1:
            near.folder.stop.touch()  # after the round in hand, the second
        return answer

    stubs[0].change = stop
    assert near.train(stubs) == "stopped"
    near.folder.stop.unlink()
    assert near.train(near.nodes("north", "south")) == "finished"
    all_there = PrivateRounds(2.0, (Draw(2, 4), Draw(2, 5)), 2)
    without_west = PrivateRounds(2.0, (Draw(2, 4), Draw(2, 2)), 2)
    told = [row["epsilon"] for row in _metrics(near.run)]
    assert told[1] == pytest.approx(epsilon([all_there], 1e-3), abs=1e-4)
    assert told[3] == pytest.approx(epsilon([all_there, without_west], 1e-3), abs=1e-4)
    assert told[3] > epsilon([all_there._replace(rounds=4)], 1e-3) + 0.1
    assert f"epsilon {told[3]:.3g}" in near.folder.log.read_text()


@pytest.mark.parametrize("others", [False, True])
def test_a_round_that_was_seen_and_is_done_again_to_another_psi_counts_twice(
    tmp_path: Path, others: bool
) -> None:
    near = NearbyFederation(tmp_path, private(rounds=3))
    stubs = near.nodes()

    def keep_copy(name: str, answer: Any) -> Any:
        if name == "evaluate":  # what a kill would leave now, that nodes have psi of round 3
            shutil.copytree(near.run, tmp_path / "killed")
        return answer

    stubs[0].change = keep_copy
    assert near.train(stubs) == "finished"
    whole = state(near)
    shutil.rmtree(near.run)
    (tmp_path / "killed").rename(near.run)
    assert state(near).round == 2
    assert near.train(near.nodes(*NODES[: 2 if others else 3])) == "finished"
    all_there = PrivateRounds(2.0, (Draw(2, 4), Draw(2, 5)), 3)
    without_west = PrivateRounds(2.0, (Draw(2, 4), Draw(2, 2)), 1)
    if others:
        assert apart(state(near).psi, whole.psi) > 1e-4
        both = epsilon([all_there, without_west], 1e-3)
        assert epsilon(state(near).released, 1e-3) == pytest.approx(both)
    else:
        assert apart(state(near).psi, whole.psi) == 0
        assert state(near).released == whole.released == (all_there,)
    assert near.train(near.nodes()) == "finished"  # the checkpoint can be read


def test_clients_whose_updates_are_too_long_are_named(tmp_path: Path) -> None:
    server = {"rounds": 1, "aggregation": {"norm_bound": 0.05, "beyond": "refuse"}}
    near = NearbyFederation(tmp_path, TABLE | {"server": TABLE["server"] | server})
    assert near.train(near.nodes()) == "finished"
    (row,), (mine,) = _metrics(near.run), simulated(near)[1]
    assert row["refused_clients"] and row["refused_clients"] == mine["refused_clients"]


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_inputs_look_like_is_told_by_nodes_and_is_the_same_as_read_in_one_place(
    tmp_path: Path,
) -> None:
    near = NearbyFederation(tmp_path)
    near.config = read_config(TABLE | {"data": {"source": "folder"}})
    assert near.train(near.nodes()) == "finished"
    together = tmp_path / "together"
    for node in NODES:  # whose names are in the order of the alphabet
        for file in (tmp_path / "data" / node).rglob("*.npz"):
            (together / file.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, together / file.parent.name / f"{node}-{file.name}")
    own = read_config(TABLE | {"data": {"source": "folder", "path": str(together)}})
    for _ in train_run(own, tmp_path / "simulated"):
        pass
    spec, state = load_checkpoint(tmp_path / "simulated" / "checkpoint")
    there = load_checkpoint(near.run / "checkpoint")[0]
    assert there.inputs == spec.inputs and there.inputs.mean
    assert apart(psi(near.run), state.psi) < 1e-5


def test_every_client_has_a_model_in_the_end(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    near.train(near.nodes())
    for node in NODES:
        models = sorted((near.folder.kit(node) / "models").iterdir())
        assert [m.name for m in models] == [f"client-00{i}.safetensors" for i in range(3)]
        assert load_model(models[0]).predict(near.population.train[0].x).shape == (20,)


def test_clients_are_those_of_the_nodes_in_order(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    near.train([near.nodes("south")[0], *near.nodes("north")])  # in whatever order they connect
    found = json.loads((near.run / "nodes.json").read_text())
    assert [(n, own["first"], own["labeled"]) for n, own in found.items()] == [
        ("north", 0, [True, True, True]),
        ("south", 3, [True, False, False]),
    ]
    near.train(near.nodes())  # one that joins later comes last
    assert json.loads((near.run / "nodes.json").read_text())["west"]["first"] == 6


def test_what_is_withheld_is_not_told(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    stubs = [*near.nodes("north"), *near.nodes("south", "west", withhold=("clients", "labels"))]
    assert near.train(stubs) == "finished"
    found = json.loads((near.run / "nodes.json").read_text())
    assert found["north"]["clients"] == 3
    for node in ("south", "west"):
        assert found[node] == {"first": found[node]["first"], "clients": 1, "labeled": None}
    told = {n: a for stub in stubs[1:] for n, _, a in stub.calls if n in ("begin", "evaluate")}
    assert told["begin"].keys() == {"version", "sha256", "clients", "labeled"}
    assert len(told["evaluate"]["accuracies"]) == 1


def test_a_withheld_node_is_one_client_in_the_fit_of_a_correction(tmp_path: Path) -> None:
    six = CORRECTED | {"data": TABLE["data"] | {"validation_clients": 6}}
    near = NearbyFederation(tmp_path, six)
    stubs = [*near.nodes("north"), *near.nodes("south", "west", withhold=("clients",))]
    assert near.train(stubs) == "finished"
    clients = {}
    for stub, node in zip(stubs, NODES, strict=True):
        told = {n: a for n, _, a in stub.calls if n in ("shares", "grid")}
        clients[node] = told["shares"]["clients"], len(told["grid"]["accuracies"][0])
        assert sum(told["shares"]["total"]) == pytest.approx(clients[node][0])
    assert clients == {"north": (2, 2), "south": (1, 1), "west": (1, 1)}


def spoiled(content: bytes, how: str) -> bytes:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    tensors = load(content)
    name = next(n for n in tensors if n.startswith("delta/"))
    if how == "nan":
        tensors[name].view(-1)[0] = torch.nan
    elif how == "huge":
        tensors[name].fill_(1e30)
    elif how == "shape":
        tensors[name] = torch.zeros(3)
    elif how == "names":
        tensors["delta/more"] = torch.zeros(3)
    elif how == "dtype":
        tensors[name] = tensors[name].double()
    elif how == "round":
        about = json.loads(header["flowdup"])
        header = {"flowdup": json.dumps(about | {"round": about["round"] + 1}, sort_keys=True)}
    elif how == "long":
        return content + bytes(10**7)
    elif how == "pickle":
        return b"\x80\x04N."
    return bytes(save(tensors, header))


SENTENCES = {
    "nan": "NaN",
    "huge": "norm",
    "shape": "shape",
    "names": "more",
    "dtype": "type",
    "round": "round",
    "long": "bytes and may have",
    "pickle": "malformed",
}


@pytest.mark.parametrize("how", SENTENCES)
def test_a_spoiled_reply_is_refused_and_named(tmp_path: Path, how: str) -> None:
    near = NearbyFederation(tmp_path)
    stubs = near.nodes()

    def spoil(name: str, answer: Any) -> Any:
        if name != "train":
            return answer
        return {"replies": [spoiled(content, how) for content in answer["replies"]]}

    stubs[1].change = spoil
    assert near.train(stubs) == "finished"
    found = federation_status(near.folder, near.run, ask=False)
    south = found["nodes"][1]
    assert len(south["refusals"]) == 3 and south["suspended"]
    assert all(SENTENCES[how] in refusal["reason"] for refusal in south["refusals"])
    rounds = read_rounds(near.run)
    assert [r["round"] for r in rounds] == [1, 2, 3, 4, 5, 6]
    assert not any("south" in r["answered"] for r in rounds)
    assert not any("south" in r["asked"] for r in rounds[-2:])  # it is asked no more
    log = near.folder.log.read_text()
    assert "refused south" in log and "south is suspended" in log
    assert all(bool(t.isfinite().all()) for t in psi(near.run).values())


@pytest.mark.parametrize("how", ["nan", "huge"])
def test_with_noise_one_clients_numbers_do_not_cost_the_others_of_its_node(
    tmp_path: Path, how: str
) -> None:
    """Or more than one client would leave the sum, and epsilon counts on one."""
    near = NearbyFederation(tmp_path, private(rounds=4))
    stubs = near.nodes()

    def spoil(name: str, answer: Any) -> Any:
        if name != "train":
            return answer
        first, *others = answer["replies"]
        return {"replies": [spoiled(first, how), *others]}

    stubs[0].change = spoil
    assert near.train(stubs) == "finished"
    rounds = read_rounds(near.run)
    assert any("north" in row["asked"] for row in rounds)
    for row in rounds:
        assert row["answered"] == row["asked"] and not row["refused"]
        assert row["clients"] == 4 - (how == "nan" and "north" in row["asked"])
    assert not NodeRecord(near.folder).refusals("north")
    assert ("without a client of north" in near.folder.log.read_text()) == (how == "nan")
    assert all(bool(t.isfinite().all()) for t in psi(near.run).values())


def test_a_node_that_cannot_evaluate_is_not_refused(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    near.config = read_config(TABLE | {"run": TABLE["run"] | {"evaluate_every": 1}})
    stubs = near.nodes()
    stubs[1].change = lambda name, a: {"error": "DataError"} if name == "evaluate" else a
    assert near.train(stubs) == "finished"
    assert not NodeRecord(near.folder).refusals("south")
    assert "south could not evaluate (DataError)" in near.folder.log.read_text()
    assert all("validation_accuracy" in row for row in _metrics(near.run))


def test_a_suspended_node_stays_out_until_it_is_readmitted(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    NodeRecord(near.folder).suspend("south")
    stubs = near.nodes()
    assert near.train(stubs) == "finished"
    assert not stubs[1].calls
    NodeRecord(near.folder).readmit("south")
    stubs = near.nodes()
    near.train(stubs)
    assert [name for name, _, _ in stubs[1].calls if name != "ping"] == ["begin", "keep"]


def test_a_node_answers_the_coordinator_alone(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    stub = near.nodes("north")[0]
    request = json.dumps(TABLE)
    try:
        for caller, told in (("server", "shape"), ("south", "error")):
            set_call_context(Context(None, caller, "north", None))
            assert told in stub.describe(request)
    finally:
        set_call_context(None)


def test_a_node_with_another_expansion_is_refused(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    stubs = near.nodes()
    stubs[2].change = lambda name, a: a | {"sha256": "0" * 64} if name == "begin" else a
    assert near.train(stubs) == "finished"
    assert "another P or theta_0" in NodeRecord(near.folder).refusals("west")[0]["reason"]
    assert not any("west" in r["asked"] for r in read_rounds(near.run))


def test_a_node_that_says_it_has_too_many_clients_is_refused(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    stubs = near.nodes()
    many = {"clients": 101, "labeled": None}
    stubs[2].change = lambda name, a: a | many if name == "begin" else a
    assert near.train(stubs, most_clients=100) == "finished"
    assert "more than 100 clients" in NodeRecord(near.folder).refusals("west")[0]["reason"]
    assert not any("west" in r["asked"] for r in read_rounds(near.run))
    assert "west" not in json.loads((near.run / "nodes.json").read_text())


def test_a_round_with_too_few_nodes_is_not_averaged(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    stubs = near.nodes()

    for stub in stubs[1:]:
        stub.change = lambda name, answer: {"error": "DataError"} if name == "train" else answer
    with pytest.raises(FederationError, match="1 nodes answered"):
        near.train(stubs, minimum=2)
    assert load_checkpoint(near.run / "checkpoint")[1].round == 0
    assert near.train(near.nodes(), minimum=2) == "finished"  # and goes on with all
    assert apart(psi(near.run), simulated(near)[0]) < 1e-5
