"""A method that wears the correction: the last layer alone changes, training not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small import METHODS, SPEC, STREAM, broadcast, client, engine, method, population
from test_baselines import build
from test_methods import batch, doubles, noisy
from torch import Tensor, nn
from torch.func import grad

from flowdup.client import ClientConfig
from flowdup.config import read_config
from flowdup.engines import SupportQuery
from flowdup.errors import ConfigError
from flowdup.methods import METHODS as ALL
from flowdup.methods import Deployed, Method, MethodConfig, MethodContext, Params
from flowdup.models import register_model
from flowdup.params import prefixed
from flowdup.personalize import load, load_model
from flowdup.prior import log_prior
from flowdup.random import Stream
from flowdup.run import train_run

EXACT = torch.float64
NUMBERS = {
    "move": torch.tensor(1.0, dtype=EXACT),
    "scale": torch.tensor(1.7, dtype=EXACT),
    "bias": torch.tensor([0.3, -0.5, 0.1, 0.4], dtype=EXACT),
    "sparsity": torch.tensor(0.02, dtype=EXACT),
    "strength": torch.tensor(0.8, dtype=EXACT),
    "typical": torch.tensor(0.4, dtype=EXACT),
    "profile": torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=EXACT),
}


def both(table: dict[str, Any], context: MethodContext | None = None) -> tuple[Method, Method]:
    """A method without and with the correction."""
    context = context or MethodContext("cnn-small", SPEC, STREAM, "cpu", EXACT)
    plain, worn = (
        MethodConfig.from_table(table | {"correction": c}).build(context) for c in ("none", "em")
    )
    return plain, worn


def numbers(**changed: float) -> Params:
    other = {n: torch.tensor(v, dtype=EXACT) for n, v in changed.items()}
    return prefixed("correction.", NUMBERS | other)


WEARERS = ("flowdup", "flowdup-plus", "flowdup-fixed", "fedavg", "fedavg-tent", "atp", "arm-cml")


@pytest.mark.parametrize("name", WEARERS)
def test_logits_are_those_of_the_method_scaled_and_shifted(name: str) -> None:
    plain, worn = both(METHODS[name])
    psi, x = noisy(doubles(plain)), client(0, 17).x
    present = torch.ones(17, dtype=EXACT)
    before = plain.f(plain.personalize(psi, x, present), x)
    calibrated = 1.7 * before + NUMBERS["bias"]
    wanted = calibrated + log_prior(calibrated, present, 0.02, 0.8, 0.4, NUMBERS["profile"])
    own = worn.personalize(psi | numbers(), x, present)
    assert torch.allclose(worn.f(own, x), wanted, atol=1e-10)
    assert torch.allclose(worn.logits(psi | numbers(), x, present, x[:3]), wanted[:3], atol=1e-10)


@pytest.mark.parametrize("name", ["flowdup", "fedavg", "arm-cml"])
def test_only_the_last_layer_of_a_model_changes(name: str) -> None:
    plain, worn = both(METHODS[name])
    psi, x, present = noisy(doubles(plain)), client(0, 17).x, torch.ones(17, dtype=EXACT)
    before = plain.personalize(psi, x, present)
    after = worn.personalize(psi | numbers(), x, present)
    assert list(before) == list(after)
    changed = {n for n in before if not torch.allclose(before[n], after[n], rtol=0, atol=1e-14)}
    *_, weight, bias = (n for n in before if n != "context")
    assert changed == {weight, bias}
    assert after[bias].shape == (4,)


def test_without_numbers_of_its_own_the_prior_counts_in_full() -> None:
    plain, worn = both(METHODS["fedavg"])
    psi, x, present = noisy(doubles(plain)), client(0, 17).x, torch.ones(17, dtype=EXACT)
    logits = plain.f(psi, x)
    wanted = logits + log_prior(logits, present)
    assert torch.allclose(worn.f(worn.personalize(psi, x, present), x), wanted, atol=1e-12)


@pytest.mark.parametrize("name", ["flowdup", "flowdup-plus"])
def test_a_move_leads_from_the_global_model_to_the_personal_one(name: str) -> None:
    plain, worn = both(METHODS[name])
    psi, x, present = noisy(doubles(plain)), client(0, 17).x, torch.ones(17, dtype=EXACT)
    ends = plain.global_model(psi), plain.personalize(psi, x, present)
    at = {}
    for move in (0.0, 0.5, 1.0):
        still = numbers(move=move, scale=1.0, strength=0.0) | {
            "correction.bias": torch.zeros(4, dtype=EXACT)
        }
        at[move] = worn.personalize(psi | still, x, present)
    for n in ends[0]:
        assert torch.allclose(at[0.0][n], ends[0][n], atol=1e-14)
        assert torch.allclose(at[1.0][n], ends[1][n], atol=1e-14)
        assert torch.allclose(at[0.5][n], (ends[0][n] + ends[1][n]) / 2, atol=1e-14)
    assert any(not torch.allclose(ends[0][n], ends[1][n]) for n in ends[0])


def test_a_method_without_models_in_between_is_not_moved() -> None:
    _, worn = both(METHODS["fedavg-tent"])
    psi, x, present = noisy(doubles(worn)), client(0, 17).x, torch.ones(17, dtype=EXACT)
    near, far = (worn.personalize(psi | numbers(move=m), x, present) for m in (0.0, 1.0))
    assert all(torch.equal(near[n], far[n]) for n in near)


@pytest.mark.parametrize("name", [n for n in METHODS if METHODS[n]["name"] != "lame"])
def test_training_is_the_methods_own_to_the_bit(name: str) -> None:
    plain, worn = both(METHODS[name])
    psi, data = noisy(doubles(plain)), batch(client(0, 13))
    start = psi | broadcast(plain, psi)
    assert torch.equal(plain.loss(psi, data, start), worn.loss(psi, data, start))
    mine, theirs = (grad(m.loss)(psi, data, start) for m in (worn, plain))
    assert all(torch.equal(mine[n], theirs[n]) for n in psi)
    first, second = (m.init(Stream(4)) for m in (plain, worn))
    assert list(first) == list(second)
    assert all(torch.equal(first[n], second[n]) for n in first)
    state = plain.server_state()
    assert state.keys() == worn.server_state().keys()
    loss = torch.tensor(0.4)
    own, other = (m.update_server_state(state, loss, Deployed(m, psi)) for m in (plain, worn))
    assert all(torch.allclose(own[n], other[n], 0, 0, equal_nan=True) for n in state)
    kept = ("learns_unlabeled", "fingerprint", "k", "batch_size", "has_embedding", "broadcast")
    for what in (*kept, "interpolates", "relabels", "rank_one", "lr_scales"):
        assert getattr(plain, what) == getattr(worn, what), what
    assert worn.is_corrected
    assert not plain.is_corrected


def test_the_embedding_and_the_global_model_are_the_methods_own() -> None:
    plain, worn = both(METHODS["flowdup"])
    psi, x, present = noisy(doubles(plain)), client(0, 17).x, torch.ones(17, dtype=EXACT)
    mine = worn.embedding(psi | numbers(), x, present)
    assert torch.equal(mine, plain.embedding(psi, x, present))
    wanted = 1.7 * plain.f(plain.global_model(psi), x) + NUMBERS["bias"]
    assert torch.allclose(worn.f(worn.global_model(psi | numbers()), x), wanted, atol=1e-10)
    same, own = worn.global_model(psi), plain.global_model(psi)
    assert all(torch.equal(same[n], own[n]) for n in own)


@pytest.mark.parametrize("kind", ["sequential", "batched"])
def test_engines_give_what_one_client_alone_gets(kind: str) -> None:
    m = method("flowdup-corrected", EXACT)
    params = noisy(doubles(m)) | numbers(move=0.5)
    pairs = [SupportQuery(client(i, n).x, client(i, n).x[:5]) for i, n in enumerate((20, 13, 1))]
    found = engine(kind, m, "float64", ClientConfig()).logits(params, pairs)
    for pair, logits in zip(pairs, found, strict=True):
        ones = torch.ones(len(pair.support), dtype=EXACT)
        wanted = m.logits(params, pair.support, ones, pair.query)
        assert torch.allclose(logits, wanted, atol=1e-10)


def test_a_set_of_more_points_than_go_through_at_once_is_read_whole() -> None:
    plain, worn = both({"name": "fedavg"}, MethodContext("mlp", SPEC, STREAM, "cpu", EXACT))
    psi, x = noisy(doubles(plain)), client(0, 2100).x
    present = torch.ones(2100, dtype=EXACT)
    logits = plain.f(psi, x)
    wanted = logits + log_prior(logits, present)
    assert torch.allclose(worn.f(worn.personalize(psi, x, present), x), wanted, atol=1e-10)


def test_bf16_rounds_networks_and_not_class_shares() -> None:
    context = MethodContext("cnn-small", SPEC, STREAM, "cpu", torch.float32, torch.bfloat16)
    plain, worn = both(METHODS["fedavg"], context)
    psi, x, present = plain.init(Stream(1)), client(0, 17).x, torch.ones(17)
    own = worn.personalize(psi, x, present)
    assert {w.dtype for w in own.values()} == {torch.float32}
    *_, bias = own
    wanted = log_prior(plain.f(psi, x), present)
    assert torch.allclose(own[bias] - psi[bias], wanted, atol=1e-5)


def _normed(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs), nn.LayerNorm(outputs))


def _soft(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs), nn.Softplus())


def _convolution(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, outputs, 8), nn.Flatten())


def _without_bias(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs, bias=False))


@pytest.mark.parametrize(
    ("model", "factory", "sentence"),
    [
        ("ends-in-a-norm", _normed, "no linear layer at its end"),
        ("ends-in-softplus", _soft, "no linear layer at its end"),
        ("ends-in-a-convolution", _convolution, "no linear layer at its end"),
        ("ends-without-bias", _without_bias, "last layer has no bias"),
    ],
)
def test_a_model_whose_last_layer_cannot_be_corrected_is_refused(
    model: str, factory: object, sentence: str
) -> None:
    register_model(model, factory)  # type: ignore[arg-type]
    table: dict[str, object] = {"name": "fedavg"}
    build(table, SPEC, model)
    with pytest.raises(ConfigError, match=sentence):
        build(table | {"correction": "em"}, SPEC, model)


def test_methods_that_correct_predictions_themselves_refuse_to_wear_it() -> None:
    with pytest.raises(ConfigError, match=r"choose method.correction = 'none'"):
        build({"name": "lame", "correction": "em"}, SPEC, "cnn-small")
    assert [n for n, entry in ALL.items() if entry.method.predicts_jointly] == ["lame"]


def test_another_correction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method.correction is 'none' or 'em', not 'bbse'"):
        MethodConfig.from_table({"name": "fedavg", "correction": "bbse"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrected") / "run"
    table = {
        "model": "cnn-small",
        "method": METHODS["flowdup-plus"],
        "client": {"batch_size": 10},
        "server": {"rounds": 2, "cohort": 3},
    }
    list(train_run(read_config(table), folder, population=population()))
    return folder


def test_a_run_keeps_the_correction_beside_psi(run: Path) -> None:
    psi = load(run).psi
    own = {n for n in psi if n.startswith("correction.")}
    assert own == {f"correction.{n}" for n in NUMBERS}
    assert all(torch.isfinite(psi[n]).all() for n in own)


def test_a_personal_model_can_be_saved_and_is_the_personalizers(run: Path, tmp_path: Path) -> None:
    federation, x = load(run), client(30, 20).x
    federation.psi |= {n: t.float() for n, t in numbers(move=0.5).items()}
    model = federation.personalize(x)
    model.save(tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors")(x), model(x))
    wanted: Tensor = federation.method.logits(federation.psi, x, torch.ones(20), x)
    assert torch.allclose(model(x), wanted, atol=1e-5)
    weights = federation.personalizer(x)(x)
    for name, parameter in model.module.named_parameters():
        assert torch.allclose(weights[name], parameter, atol=1e-5)
    other = federation.personalizer(x)(client(31, 20).x)
    assert any(not torch.allclose(weights[n], other[n], atol=1e-3) for n in weights)
