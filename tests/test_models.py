import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from flowdup.accelerate.convolution import ClientConv2d
from flowdup.accelerate.layers import for_clients
from flowdup.accelerate.normalization import ClientGroupNorm
from flowdup.accelerate.pooling import ClientMaxPool2d, ClientMean2d
from flowdup.data.input_spec import InputSpec
from flowdup.errors import ConfigError
from flowdup.methods import MethodContext
from flowdup.models import Network, build_network, register_model
from flowdup.models.isolated_random import IsolatedRandom
from flowdup.models.network import replaced_layers
from flowdup.random import Stream

X = torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8)


def read(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "size"),
    [
        ("cnn", (3, 32, 32), 10, 156_810),
        ("cnn", (1, 28, 28), 10, 118_346),
        ("cnn-mcmahan", (1, 28, 28), 10, 1_663_370),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18-imagenet", (3, 32, 32), 10, 11_181_642),
    ],
)
def test_models_have_the_published_number_of_weights(
    name: str, shape: tuple[int, ...], outputs: int, size: int
) -> None:
    network = build_network(name, shape, outputs, read)
    assert network.size == size
    x = torch.zeros(2, *shape)
    assert network(network.init(Stream(0)), x).shape == (2, outputs)


def test_the_norm_of_theta_0_is_what_he_initialisation_gives() -> None:
    weights = build_network("cnn", (3, 32, 32), 10, read).init(Stream(0))
    norm = sum(float(w.square().sum()) for w in weights.values()) ** 0.5
    assert abs(norm - 18.4) < 0.2


def test_theta_0_does_not_depend_on_the_global_random_state() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(build_network("cnn-small", (1, 8, 8), 4, read).init(Stream(0)))
        assert (torch.get_rng_state() == state).all()
    assert all((found[0][n] == found[1][n]).all() for n in found[0])


def test_networks_made_in_threads_while_others_seed_keep_their_definitions() -> None:
    """Other threads seed torch's generator all the time: what is random would come out equal."""
    wanted = {n: w.tolist() for n, w in Network.build(Custom, (6,), 3, read).constants.items()}
    done = threading.Event()

    def seed() -> None:
        while not done.is_set():
            torch.manual_seed(0)

    def build(_: int) -> dict[str, object]:
        return {n: w.tolist() for n, w in Network.build(Custom, (6,), 3, read).constants.items()}

    seeding = [threading.Thread(target=seed) for _ in range(2)]
    for thread in seeding:
        thread.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(found == wanted for found in pool.map(build, range(200)))
    finally:
        done.set()
        for thread in seeding:
            thread.join()


def drawn() -> list[torch.Tensor]:
    """One of everything that a definition may draw."""
    like = torch.full((4, 4), 0.5)
    in_place = ("bernoulli_", "cauchy_", "exponential_", "log_normal_", "random_", "uniform_")
    inits = ("kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "trunc_normal_")
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.Embedding(4, 4),
        nn.GRU(3, 4),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    ]
    return [
        *(next(layer.parameters()).detach().clone() for layer in layers),
        *(getattr(like.clone(), name)() for name in in_place),
        *(getattr(nn.init, name)(like.clone()) for name in inits),
        nn.init.sparse_(like.clone(), 0.5),
        *(torch.rand(8), torch.randn(size=(8,)), torch.randint(99, (8,)), torch.randperm(20)),
        *(torch.rand_like(like), torch.randn_like(like, dtype=torch.float64)),
        *(torch.randint_like(like, 99), torch.randint_like(like, 5, high=99)),
        *(torch.rand_like(input=like), torch.normal(0.0, 1.0, (8,)), torch.normal(like, 1.0)),
        *(torch.bernoulli(like), like.bernoulli(), torch.multinomial(like[0].repeat(9), 20)),
        torch.poisson(like * 100),
    ]


def test_isolated_random_numbers_follow_their_seed_and_no_global_state() -> None:
    before, found, ones = torch.get_rng_state(), [], torch.ones(2, 3, 4)
    for seed in (0, 0, 1):
        with IsolatedRandom(seed):
            found.append(drawn())
            for dropout in (nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.RReLU()):
                assert torch.equal(dropout(ones), ones)  # a definition tries what it has made
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not any(torch.equal(a, c) for a, c in zip(found[0], found[2], strict=True))


class Custom(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], outputs)
        self.scale = nn.Parameter(torch.full((outputs,), 1e-6))
        self.norm = nn.LayerNorm(outputs)
        self.temperature = nn.Parameter(torch.tensor(2.659))
        self.noise = nn.Parameter(torch.randn(()))
        self.register_buffer("offset", torch.arange(float(outputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x)) * self.scale * self.temperature + self.offset
        return out


def test_what_a_users_module_defines_stays_and_what_it_draws_is_drawn_anew() -> None:
    weights = Network.build(Custom, (6,), 3, read).init(Stream(0))
    assert weights["scale"].tolist() == pytest.approx([1e-6] * 3)
    assert weights["norm.weight"].tolist() == [1, 1, 1]
    assert weights["temperature"].item() == pytest.approx(2.659)
    assert weights["linear.bias"].tolist() == [0, 0, 0]
    assert weights["noise"].item() == 0
    assert weights["linear.weight"].abs().max() <= 1  # sqrt(6 / 6)
    assert weights["linear.weight"].std() > 0.3


def test_buffers_of_a_users_module_are_read_and_random_ones_refused() -> None:
    network = Network.build(Custom, (6,), 3, read)
    out = network(network.init(Stream(0)), torch.zeros(1, 6))
    assert out[0].tolist() == pytest.approx([0, 1, 2], abs=1e-4)

    def noisy(shape: tuple[int, ...], outputs: int) -> nn.Module:
        module = nn.Linear(2, outputs)
        module.register_buffer("noise", torch.randn(2))
        return module

    with pytest.raises(ConfigError, match="'noise' is random"):
        Network.build(noisy, (2,), 3, read)


def test_weights_that_start_from_a_file_stay_as_they_are() -> None:
    trained = nn.Linear(2, 3)
    network = Network.build(lambda shape, outputs: trained, (2,), 3, read)
    assert (network.init(Stream(0))["weight"] == trained.weight).all()


def test_a_bias_and_a_norm_have_the_deviation_of_their_layer() -> None:
    network = build_network("resnet18", (3, 8, 8), 10, read)
    assert network.deviations["0.weight"] == network.deviations["1.weight"]
    assert network.deviations["0.weight"] == (2 / 27) ** 0.5


def with_norm(norm: nn.Module) -> Network:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten())
    return Network.build(lambda shape, outputs: layers, (1, 8, 8), 4, read)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, track_running_stats=False).eval(),  # has none to read
        nn.InstanceNorm2d(4, track_running_stats=True),
    ],
)
def test_statistics_of_batches_are_refused(norm: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"GroupNorm.*\.eval\(\)"):
        with_norm(norm)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4).eval(), nn.InstanceNorm2d(4, track_running_stats=True).eval()]
)
def test_running_statistics_of_a_layer_in_eval_mode_are_constants(norm: nn.Module) -> None:
    x = torch.randn(5, 1, 8, 8)
    network = with_norm(norm)
    weights = network.init(Stream(0))
    assert torch.allclose(network(weights, x)[:2], network(weights, x[:2]), atol=1e-6)


def test_dropout_is_announced_as_off() -> None:
    def factory(shape: tuple[int, ...], outputs: int) -> nn.Module:
        dropouts = nn.Dropout(0.5), nn.Dropout(0.0), nn.GRU(outputs, 4, 2, dropout=0.1)
        return nn.Sequential(nn.Linear(2, outputs), *dropouts)

    with pytest.warns(UserWarning, match="dropout is off in federated") as seen:
        Network.build(factory, (2,), 3, read)
    assert "(layer '1', '3')" in str(seen[0].message)


def test_a_registered_model_is_found_and_its_name_is_taken() -> None:
    register_model("custom", Custom)
    assert build_network("custom", (6,), 3, read).size == 32
    with pytest.raises(ConfigError, match="exists already"):
        register_model("custom", lambda shape, outputs: nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="unknown model 'nope'"):
        build_network("nope", (6,), 3, read)


def test_images_too_small_for_a_cnn_are_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        build_network("cnn", (1, 8, 8), 10, read)
    with pytest.raises(ConfigError, match="reads images"):
        build_network("cnn", (12,), 10, read)


def test_images_are_read_to_the_same_bits_however_they_lie() -> None:
    spec = InputSpec((3, 4, 5), "uint8", 2, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    x = torch.arange(120, dtype=torch.uint8).reshape(2, 3, 4, 5)
    wanted = (x / 255 - torch.tensor(spec.mean)[:, None, None]) / torch.tensor(spec.std)[
        :, None, None
    ]
    found = spec.reader()(x)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.equal(spec.reader()(x.contiguous(memory_format=torch.channels_last)), found)


def owned() -> nn.Sequential:
    """A module that its owner keeps: every call of a factory may return it."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)).train()


def state_of(module: nn.Module) -> list[object]:
    parts = [(name, type(part), part.training) for name, part in module.named_modules()]
    tensors = [
        (n, p.requires_grad, p.dtype, p.detach().numpy().tobytes())
        for n, p in module.named_parameters()
    ]
    return [*parts, *tensors]


def test_a_users_module_is_never_changed() -> None:
    mine = owned()
    before = state_of(mine)
    network = Network.build(lambda shape, outputs: mine, (1, 8, 8), 4, read)
    network.module.double()
    with replaced_layers(for_clients):
        network({n: w.double() for n, w in network.init(Stream(0)).items()}, X.double())
    assert state_of(mine) == before


def test_a_networks_module_keeps_its_layers_and_values_whoever_calls_it() -> None:
    network = build_network("resnet18", (1, 8, 8), 4, read)
    before = state_of(network.module)
    weights, found = network.init(Stream(0)), []

    def watched(module: nn.Module) -> nn.Module:
        found.append(module)
        return for_clients(module)

    network(weights, X)
    with replaced_layers(watched):
        network(weights, X)
        network(weights, X)
    assert state_of(network.module) == before
    (module,) = found  # made once
    assert ClientConv2d in map(type, module.modules())
    assert {type(part) for part in network.module.modules()}.isdisjoint(
        {ClientConv2d, ClientGroupNorm, ClientMaxPool2d, ClientMean2d}
    )


def test_layers_are_replaced_inside_the_context_and_in_its_thread_only() -> None:
    network = Network.build(lambda shape, outputs: owned(), (1, 8, 8), 4, read)
    weights, seen = network.init(Stream(0)), []

    class Watched(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(threading.current_thread())
            return super().forward(input)

    def watch(module: nn.Module) -> nn.Module:
        for part in module.modules():
            if type(part) is nn.Conv2d:
                part.__class__ = Watched
        return module

    def call() -> None:
        network(weights, X)

    call()
    with replaced_layers(watch):
        call()
        elsewhere = threading.Thread(target=call)
        elsewhere.start()
        elsewhere.join()
    call()
    assert seen == [threading.current_thread()]


MEETING = threading.Barrier(2, timeout=10)


class Meeting(nn.Linear):
    """A layer that two threads enter and leave together."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):  # calls that take turns never meet
            MEETING.wait()
        out = super().forward(input)
        with contextlib.suppress(threading.BrokenBarrierError):
            MEETING.wait()
        return out


def test_two_threads_inside_one_network_each_see_their_own_weights() -> None:
    network = Network.build(lambda shape, outputs: Meeting(3, outputs), (3,), 2, lambda x: x)
    x, found = torch.ones(1, 3), {}

    def call(value: float) -> None:
        weights = {n: torch.full(shape, value) for n, shape in network.shapes.items()}
        found[value] = network(weights, x).flatten().tolist()

    threads = [threading.Thread(target=call, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1.0: [4.0, 4.0], 2.0: [8.0, 8.0]}


def test_init_scale_multiplies_what_is_drawn_and_nothing_else() -> None:
    spec = InputSpec((1, 8, 8), "uint8", 4)
    large, small = (
        MethodContext("cnn-small", spec, Stream(3), init_scale=scale).f.init(Stream(3))
        for scale in (1.0, 0.25)
    )
    assert all(torch.equal(0.25 * w, small[n]) for n, w in large.items())
    assert all(float(small[n].abs().max()) > 0 for n in small if small[n].ndim > 1)
