"""Models that users bring train, are evaluated and personalised, whatever torch can do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import user_models
from processes import tensors
from small import METHODS, STREAM, client, method, population
from torch import nn
from typer.testing import CliRunner

import flowdup
from flowdup.cli import app
from flowdup.client import ClientConfig
from flowdup.data import Population
from flowdup.engines import EngineConfig, SupportQuery, build_engine
from flowdup.engines.batched import BatchedEngine
from flowdup.engines.sequential import SequentialEngine
from flowdup.errors import ConfigError

SLOW = ["user-gru", "user-branch"]  # that `vmap` cannot run
FAST = ["user-pretrained", "user-dropout"]
CPU = EngineConfig(device="cpu")
LOCAL = ClientConfig(1, 10)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch's vmap cannot run this model"),
    pytest.mark.filterwarnings("ignore:dropout is off"),
    pytest.mark.filterwarnings("ignore:flowdup does without make_fx"),
]


def config(model: str, method: str, rounds: int = 2, **engine: Any) -> flowdup.Config:
    return flowdup.read_config(
        {
            "model": model,
            "method": METHODS[method],
            "client": {"batch_size": 10, "optimizer": {"lr": 0.05}},
            "server": {"rounds": rounds, "cohort": 3},
            "run": {"evaluate_every": 1, "checkpoint_every": 1},
            "engine": {"device": "cpu", **engine},
        }
    )


def few() -> Population:
    return Population(
        population().spec, *([client(i, 12) for i in range(a, a + 3)] for a in (0, 3, 6))
    )


@pytest.mark.parametrize("model", [*SLOW, *FAST])
@pytest.mark.parametrize("name", ["fedavg", "flowdup"])
def test_a_users_model_trains_and_is_evaluated_and_personalised(
    tmp_path: Path, model: str, name: str
) -> None:
    rounds = list(flowdup.train_run(config(model, name), tmp_path, population=few()))
    assert all(r["validation_accuracy"] >= 0 for r in rounds)
    assert len(flowdup.evaluate_run(tmp_path, few())["clients"]) == 3
    federation, x = flowdup.load(tmp_path), client(30, 7).x
    own = federation.personalize(x)
    assert own.predict(x).shape == (7,)
    again = federation.personalizer(x)(x)  # traced, where it can be
    assert all(torch.allclose(again[n], w, atol=1e-6) for n, w in own.module.named_parameters())


@pytest.mark.parametrize("model", SLOW)
@pytest.mark.parametrize("compiled", [True, False])
def test_what_vmap_cannot_run_goes_to_the_sequential_engine_in_one_sentence(
    model: str, compiled: bool
) -> None:
    with pytest.warns(RuntimeWarning) as seen:
        runner = build_engine(
            EngineConfig(device="cpu", compile=compiled),
            method("flowdup", model=model),
            LOCAL,
            [client(0, 12)],
            STREAM,
        )
    assert isinstance(runner, SequentialEngine) and not runner.most_steps  # untraced
    assert len(seen) == 1
    assert "vmap cannot run this model" in str(seen[0].message)


@pytest.mark.parametrize("model", FAST)
def test_what_vmap_can_run_is_batched(model: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "torch's vmap")
        runner = build_engine(CPU, method("flowdup", model=model), LOCAL, [], STREAM)
    assert isinstance(runner, BatchedEngine)


def test_the_batched_engine_by_name_refuses_what_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"engine\.name = 'auto' or 'sequential'"):
        build_engine(
            EngineConfig("batched", "cpu"), method("fedavg", model="user-gru"), LOCAL, [], STREAM
        )


@pytest.mark.parametrize("model", SLOW)
def test_a_run_resumed_on_the_sequential_engine_gives_the_bits_of_an_unbroken_one(
    tmp_path: Path, model: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    list(flowdup.train_run(config(model, "flowdup", 3), whole, population=few()))
    rounds = iter(flowdup.train_run(config(model, "flowdup", 3), broken, population=few()))
    next(rounds)
    rounds.close()
    list(flowdup.train_run(config(model, "flowdup", 3), broken, resume=True, population=few()))
    assert tensors(whole) == tensors(broken)


def test_a_branch_is_taken_by_the_values_of_each_client() -> None:
    """A trace, or one program for all, would take the same for everyone."""
    m = method("fedavg", torch.float64, "user-branch")
    psi = {n: p.double() for n, p in m.init(STREAM).items()}
    psi["first.bias"] = psi["first.bias"] + 0.1
    above, below = (torch.full((3, 1, 8, 8), v, dtype=torch.uint8) for v in (255, 0))
    means = [
        float((m.f.read(x).double().flatten(1) @ psi["first.weight"].T).mean())
        for x in (above, below)
    ]
    assert (means[0] + 0.1 > 0) != (means[1] + 0.1 > 0)
    runner = build_engine(EngineConfig(device="cpu", dtype="float64"), m, LOCAL, [], STREAM)
    found = runner.logits(psi, [SupportQuery(above, above), SupportQuery(below, below)])
    for x, logits in zip((above, below), found, strict=True):
        assert torch.allclose(logits, m.f(psi, x))


def test_a_model_that_draws_random_numbers_is_refused_and_moves_no_generator() -> None:
    m, before = method("fedavg", model="user-functional-dropout"), torch.get_rng_state()
    for name in ("auto", "sequential"):
        with pytest.raises(ConfigError, match="draws random numbers"):
            build_engine(EngineConfig(name, "cpu"), m, LOCAL, [], STREAM)
    assert torch.equal(before, torch.get_rng_state())


def test_a_users_recurrent_model_trains_from_the_command_line(tmp_path: Path) -> None:
    settings = (
        'model = "user-gru"\nmethod = {name = "fedavg"}\nengine = {device = "cpu"}\n'
        "data = {points = 12, overlap = true, train_clients = 4, test_clients = 2, "
        "validation_clients = 2}\nserver = {rounds = 2, cohort = 2}\n"
    )
    (tmp_path / "mine.toml").write_text(settings)
    command = ["--import", user_models.__file__, "train", str(tmp_path / "mine.toml")]
    with pytest.warns(RuntimeWarning, match="vmap cannot run this model"):
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.exception
    assert len(flowdup.evaluate_run(tmp_path / "run")["clients"]) == 2


def made(model: str) -> flowdup.PersonalModel:
    m = method("fedavg", model=model)
    return flowdup.PersonalModel(model, population().spec, m.f.init(STREAM))


def test_statistics_of_a_pretrained_backbone_stay_while_its_weights_train(tmp_path: Path) -> None:
    list(flowdup.train_run(config("user-pretrained", "fedavg"), tmp_path, population=few()))
    own, first = flowdup.load(tmp_path).personalize(client(9, 5).x), made("user-pretrained")
    for name, buffer in first.module.named_buffers():
        assert torch.equal(own.module.get_buffer(name), buffer)
    assert not torch.equal(own.module[0][0].weight, first.module[0][0].weight)  # type: ignore[index]


@pytest.mark.parametrize("model", ["cnn-small", *SLOW, *FAST])
def test_a_personal_model_is_fine_tuned_and_saved(tmp_path: Path, model: str) -> None:
    own, data = made(model), client(0, 12)
    assert not own.training
    before = {n: b.clone() for n, b in own.module.named_buffers()}
    losses, optimizer = [], torch.optim.SGD(own.train().requires_grad_().parameters(), 0.05)
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(own(data.x), data.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(before[n], b) for n, b in own.module.named_buffers())
    own.eval().save(tmp_path / "mine.safetensors")
    assert torch.equal(flowdup.load_model(tmp_path / "mine.safetensors")(data.x), own(data.x))


def test_dropout_of_a_personal_model_is_on_in_train_mode_only() -> None:
    own, x = made("user-dropout"), client(0, 12).x
    assert torch.equal(own(x), own(x))
    assert not torch.equal(own.train()(x), own(x))
    assert torch.equal(own.eval()(x), own(x))


@pytest.mark.parametrize("model", ["cnn-small", "user-pretrained"])
def test_a_personal_model_is_exported_by_torch(model: str) -> None:
    own, x = made(model), client(0, 12).x
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(own, (x,), dynamic_shapes=(rows,)).module()
    assert torch.allclose(program(x[:5]), own(x[:5]), atol=1e-6)
