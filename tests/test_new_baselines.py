"""ARM-CML, ATP, FLUX and LAME, each against what its source says, written out."""

from pathlib import Path

import pytest
import torch
from small import SPEC, STREAM, client, engine, method, population
from test_baselines import build, rounds
from test_methods import batch, doubles, noisy
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import cross_entropy

from flowdup.client import ClientConfig
from flowdup.config import load_config, read_config
from flowdup.data import InputSpec, load_population
from flowdup.engines import SupportQuery
from flowdup.errors import ConfigError, FlowdupError
from flowdup.methods import Method, MethodConfig, MethodContext, Params
from flowdup.methods.features import FeatureModel
from flowdup.models import MODELS, register_model
from flowdup.params import strip_prefix
from flowdup.personalize import load, load_model
from flowdup.random import Stream
from flowdup.run import train_run

ONES = torch.ones(20, dtype=torch.float64)
EXACT = torch.float64


def trained(name: str, folder: Path, **settings: object) -> Path:
    table = {
        "model": "cnn-small",
        "method": {"name": name} | settings,
        "client": {"batch_size": 10},
        "server": {"rounds": 2, "cohort": 3},
    }
    list(train_run(read_config(table), folder, population=population()))
    return folder


# ARM-CML


def test_arm_cml_joins_the_mean_context_to_every_points_channels() -> None:
    m = method("arm-cml", EXACT)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    x = m.f.read(data.x)
    out = x
    for layer in (0, 2, 4):
        weight, bias = params[f"phi.{layer}.weight"], params[f"phi.{layer}.bias"]
        out = nn.functional.conv2d(out if layer == 0 else out.relu(), weight, bias, padding=1)
    context = out.sum(0) / 20  # [2, 8, 8]
    module = MODELS["cnn-small"]((3, 8, 8), 4).double()
    module.load_state_dict(strip_prefix(params, "theta.network."))
    logits = torch.stack([module(torch.cat([p, context])[None])[0] for p in x])
    loss = cross_entropy(logits, data.y).item()
    assert float(m.loss(params, data, params)) == pytest.approx(loss, rel=1e-9)
    own = m.personalize(params, data.x, ONES)
    assert torch.allclose(own["context"], context, atol=1e-12)
    assert torch.allclose(m.f(own, data.x), logits, atol=1e-12)


def test_the_context_is_learned_from_the_labels_of_others() -> None:
    m = method("arm-cml", EXACT)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    found = grad(m.loss)(params, data, params)
    assert all(g.abs().max() > 0 for n, g in found.items() if n.startswith("phi."))


@pytest.mark.parametrize(("shape", "context"), [((6,), (2,)), ((3, 9), (2, 9))])
def test_inputs_without_height_and_width_have_a_context_too(
    shape: tuple[int, ...], context: tuple[int, ...]
) -> None:
    spec = InputSpec(shape, "float32", 4)
    m = build({"name": "arm-cml", "channels": 2, "hidden": 5, "kernel": 3}, spec, "mlp")
    params, x = m.init(Stream(3)), torch.rand(7, *shape, generator=torch.Generator())
    own = m.personalize(params, x, torch.ones(7))
    assert own["context"].shape == context
    assert own["network.1.weight"].shape[1] == own["context"].numel() + x[0].numel()
    assert torch.isfinite(m.f(own, x)).all()


def test_a_personal_model_of_arm_cml_is_a_module_that_can_be_saved(tmp_path: Path) -> None:
    federation = load(trained("arm-cml", tmp_path / "run", channels=2, hidden=4, kernel=3))
    x = client(30, 20).x
    model = federation.personalize(x)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    own = federation.method.personalize(federation.psi, x, torch.ones(20))
    assert torch.equal(again(x), model(x))
    assert torch.allclose(model(x), federation.method.f(own, x), atol=1e-6)
    assert not torch.equal(federation.personalize(client(31, 20).x)(x), model(x))


def test_settings_that_no_context_network_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be odd"):
        build({"name": "arm-cml", "kernel": 4}, SPEC, "mlp")
    with pytest.raises(ConfigError, match="one to four dimensions"):
        build({"name": "arm-cml"}, InputSpec((1, 2, 2, 2, 2), "float32", 4), "mlp")
    context = MethodContext("mlp", SPEC, STREAM, most_weights=50_000)
    with pytest.raises(ConfigError, match="more than 50,000"):
        MethodConfig.from_table({"name": "arm-cml", "channels": 1}).build(context)


# ATP


def entropy_gradient(m: Method, theta: Params, x: Tensor) -> Params:
    leaves = {n: p.clone().requires_grad_() for n, p in theta.items()}
    p = m.f(leaves, x).softmax(1)
    found = torch.autograd.grad(-(p * p.log()).sum(1).mean(), list(leaves.values()))
    return dict(zip(theta, found, strict=True))


def test_a_rates_step_is_the_sources() -> None:
    """a_i += lr <gradient of the loss at theta'_i, g_i> / sqrt(n_i), and theta learns as FedAvg."""
    m, plain = method("atp", EXACT), method("fedavg", EXACT)
    params, data = noisy(doubles(m)), batch(client(0, 20))
    params["rates"] = torch.linspace(-1, 2, len(m.f.shapes), dtype=EXACT)
    theta = strip_prefix(params, "theta.")
    g = entropy_gradient(m, theta, data.x)
    sizes = [p.numel() for p in theta.values()]
    a = {n: r / s**0.25 for n, r, s in zip(theta, params["rates"], sizes, strict=True)}
    adapted = {n: (p - a[n] * g[n]).requires_grad_() for n, p in theta.items()}
    loss = cross_entropy(m.f(adapted, data.x), data.y)
    outer = torch.autograd.grad(loss, list(adapted.values()))
    found, lr = grad(m.loss)(params, data, params), 0.1
    steps = -lr * found["rates"] / torch.tensor([s**0.25 for s in sizes], dtype=EXACT)  # of a
    for step, slope, inner, size in zip(steps, outer, g.values(), sizes, strict=True):
        assert float(step) == pytest.approx(lr * float((slope * inner).sum()) / size**0.5, rel=1e-9)
    fedavg = grad(plain.loss)(theta, data, theta)
    assert all(torch.allclose(found[f"theta.{n}"], fedavg[n], atol=1e-14) for n in theta)
    own = m.personalize(params, data.x, ONES)
    assert all(torch.allclose(own[n], adapted[n], atol=1e-12) for n in theta)


def test_rates_alone_are_learned_where_theta_is_trained_already() -> None:
    m = build({"name": "atp", "train_theta": False}, SPEC, "mlp")
    psi = rounds(m, "batched", 3)
    start = m.init(STREAM.child("psi"))
    assert all(torch.equal(p, start[n]) for n, p in psi.items() if n != "rates")
    assert psi["rates"].abs().max() > 0


def test_the_adapted_model_of_a_round_is_that_of_the_psi_that_was_sent() -> None:
    m = method("atp", EXACT)
    start, data = noisy(doubles(m)), batch(client(0, 20))
    moved = {n: p if n == "rates" else p + 0.1 for n, p in start.items()}
    both = [grad(m.loss)(psi, data, start)["rates"] for psi in (start, moved)]
    assert torch.equal(*both) and both[0].abs().max() > 0


# FLUX


def moments(m: Method, x: Tensor) -> Tensor:
    fixed = m.f.init(STREAM.child("features"))
    body = nn.Sequential(*list(m.f.module.children())[:-1]).double()
    body.load_state_dict({n: w.double() for n, w in fixed.items() if not n.startswith("9.")})
    z = body(m.f.read(x))
    return torch.cat([z.mean(0), z.std(0, unbiased=False)])


def clustered() -> tuple[Method, Params]:
    """Away from the start, with a centroid near each of three clients."""
    m = method("flux", EXACT)
    params = noisy(doubles(m))
    params["centroids"] = params["centroids"] + torch.stack(
        [moments(m, client(i, 20).x) for i in (1, 2, 3)]
    )
    return m, params


def test_a_client_gets_the_model_whose_centroid_is_nearest_to_its_moments() -> None:
    m, params = clustered()
    for number in range(8):
        x = client(number, 20).x
        d = moments(m, x)
        assert torch.allclose(m.embedding(params, x, ONES), d, atol=1e-7)
        nearest = min(range(3), key=lambda c: float((params["centroids"][c] - d).norm()))
        own = m.personalize(params, x, ONES)
        assert all(torch.equal(own[n], params[f"theta.{n}"][nearest]) for n in own)
    chosen = [m.personalize(params, client(i, 20).x, ONES)["9.bias"] for i in (1, 2, 3)]
    assert len({tuple(b.tolist()) for b in chosen}) == 3


def test_flux_trains_the_nearest_model_and_the_centroid_that_wins_by_share() -> None:
    m, params = clustered()
    data = batch(client(1, 20))
    params["shares"] = torch.tensor([0.9, 0.3, 1e-9], dtype=EXACT)
    d = moments(m, data.x)
    distances = [float((mu - d).square().sum()) for mu in params["centroids"]]
    near = min(range(3), key=lambda c: distances[c])
    shares = [max(float(s), 1e-3) for s in params["shares"]]
    won = min(range(3), key=lambda c: distances[c] * shares[c])
    assert near != won  # or this would show less
    theta = {n: params[f"theta.{n}"][near].clone().requires_grad_() for n in m.f.shapes}
    loss = cross_entropy(m.f(theta, data.x), data.y)
    slopes = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))
    onehot = torch.eye(3, dtype=EXACT)[won]
    miss = distances[won] + float((params["shares"] - onehot).square().sum())
    assert float(m.loss(params, data, params)) == pytest.approx(loss.item() + 0.05 * miss, rel=1e-7)
    found = grad(m.loss)(params, data, params)
    for n, slope in slopes.items():
        stack = torch.zeros_like(params[f"theta.{n}"])
        stack[near] = slope
        assert torch.allclose(found[f"theta.{n}"], stack, atol=1e-12)
    pull = torch.zeros_like(params["centroids"])
    pull[won] = 0.1 * (params["centroids"][won] - d)
    assert torch.allclose(found["centroids"], pull, atol=1e-7)
    assert torch.allclose(found["shares"], 0.1 * (params["shares"] - onehot), atol=1e-12)


def test_flux_finds_the_four_rotations_of_unlabeled_clients_from_a_cold_start(
    tmp_path: Path,
) -> None:
    settings = ("data.classes_per_client=0", "data.train_clients=200", "data.test_clients=40")
    rest = ("method.name=flux", "server.rounds=300", "server.optimizer.lr=0.015")
    config = load_config("digits", [*settings, *rest, "client.optimizer.lr=0.3"])
    list(train_run(config, tmp_path))
    federation = load(tmp_path)
    m, psi = federation.method, federation.psi
    chosen: dict[object, set[int]] = {}
    for stranger in load_population(config.data, Stream(config.seed).child("data")).test:
        apart = psi["centroids"] - m.embedding(psi, stranger.x, torch.ones(len(stranger)))
        rotation = stranger.traits["rotation"]
        chosen.setdefault(rotation, set()).add(int(apart.norm(dim=1).argmin()))
    assert sorted(chosen.values(), key=min) == [{0}, {1}, {2}, {3}]


def test_features_that_the_seed_gives_otherwise_are_refused(tmp_path: Path) -> None:
    a, b = (
        MethodConfig.from_table({"name": "flux"}).build(MethodContext("mlp", SPEC, Stream(seed)))
        for seed in (0, 1)
    )
    assert a.fingerprint != b.fingerprint
    folder = trained("flux", tmp_path / "run") / "checkpoint"
    assert load(folder).method.fingerprint
    context = MethodContext("mlp", SPEC, STREAM, most_weights=30_000)
    with pytest.raises(ConfigError, match=r"lower method\.clusters"):
        MethodConfig.from_table({"name": "flux", "clusters": 5}).build(context)


# LAME


def lame_by_hand(logits: Tensor, features: Tensor, k: int, steps: int) -> Tensor:
    """The source's fixed point on a whole set, one point after the other."""
    log_p, unit = logits.log_softmax(1), features / features.norm(dim=1, keepdim=True)
    n = len(unit)
    near = [
        sorted((j for j in range(n) if j != i), key=lambda j: -float(unit[i] @ unit[j]))[:k]
        for i in range(n)
    ]
    y = log_p.exp()
    for _ in range(steps):
        y = torch.stack([(log_p[i] + y[near[i]].sum(0)).softmax(0) for i in range(n)])
    return y


def lame() -> tuple[Method, Params, Tensor]:
    m = method("lame", EXACT)
    params, x = noisy(doubles(m)), client(0, 20).x
    body = nn.Sequential(*list(m.f.module.children())[:-1]).double()
    body.load_state_dict({n: w for n, w in params.items() if not n.startswith("9.")})
    return m, params, body(m.f.read(x))


def test_lame_corrects_a_set_as_the_source_does() -> None:
    m, params, features = lame()
    x = client(0, 20).x
    plain = m.f(params, x)
    found = m.logits(params, x, ONES, x)
    assert torch.allclose(found.softmax(1), lame_by_hand(plain, features, 3, 5), atol=1e-10)
    assert not torch.allclose(found.softmax(1), plain.softmax(1), atol=1e-3)


def test_a_new_point_is_corrected_by_its_neighbours_in_the_set_alone() -> None:
    m, params, features = lame()
    x = client(0, 20).x
    y = lame_by_hand(m.f(params, x[:15]), features[:15], 3, 4)
    unit = features / features.norm(dim=1, keepdim=True)
    for i in range(15, 20):
        near = (unit[:15] @ unit[i]).topk(3).indices
        wanted = m.f(params, x[i : i + 1])[0].log_softmax(0) + y[near].sum(0)
        alone, among = (m.logits(params, x[:15], ONES[:15], q) for q in (x[i : i + 1], x[15:]))
        assert torch.allclose(alone[0], wanted, atol=1e-10)
        assert torch.allclose(among[i - 15], wanted, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 20])
def test_neither_padding_nor_the_engine_changes_corrected_predictions(size: int) -> None:
    m, params, _ = lame()
    x = client(0, size).x
    padded = torch.cat([x, client(5, 7).x])
    present = torch.cat([torch.ones(size), torch.zeros(7)]).double()
    found = m.logits(params, padded, present, x)
    assert torch.allclose(found, m.logits(params, x, torch.ones(size).double(), x), atol=1e-12)
    clients = [x, client(2, 13).x, client(3, 6).x]
    pairs = [SupportQuery(part, part[:5]) for part in clients]
    for kind in ("sequential", "batched"):
        runner = engine(kind, m, "float64", ClientConfig())
        for pair, logits in zip(pairs, runner.logits(params, pairs), strict=True):
            ones = torch.ones(len(pair.support), dtype=EXACT)
            wanted = m.logits(params, pair.support, ones, pair.query)
            assert torch.allclose(logits, wanted, atol=1e-10)


def test_lame_makes_no_model_of_ones_own_and_says_so(tmp_path: Path) -> None:
    federation = load(trained("lame", tmp_path))
    x = client(30, 20).x
    for ask in (federation.personalize, federation.personalizer):
        with pytest.raises(FlowdupError, match=r"'lame' corrects .* by `flowdup evaluate`"):
            ask(x)


def _ends_in_softplus(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs), nn.Softplus())


def test_features_are_refused_where_the_last_layer_is_not_linear() -> None:
    register_model("softplus-for-tests", _ends_in_softplus)
    for name in ("lame", "flux"):
        with pytest.raises(ConfigError, match="no linear layer at its end"):
            build({"name": name}, SPEC, "softplus-for-tests")


def _linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Linear(shape[0], outputs)


@pytest.mark.parametrize("model", ["mlp", "cnn-small", "resnet18", "linear-for-tests"])
def test_features_and_the_last_layer_are_the_model(model: str) -> None:
    spec = InputSpec((64,), "float32", 4) if model == "linear-for-tests" else SPEC
    register_model("linear-for-tests", _linear)
    context = MethodContext(model, spec, STREAM)
    found, theta = FeatureModel.of(context.f, context), context.f.init(Stream(2))
    x = client(0, 5).x if model != "linear-for-tests" else torch.rand(5, 64)
    features = found.features(theta, x)
    assert torch.allclose(found.logits(theta, features), context.f(theta, x), atol=1e-4)
