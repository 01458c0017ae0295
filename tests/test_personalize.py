import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from small import METHODS, SPEC, client, population

import flowdup
from flowdup.config import Config, read_config
from flowdup.data.clients import ClientData
from flowdup.data.input_spec import InputSpec
from flowdup.data.population import Population
from flowdup.errors import CheckpointError, ConfigError, DataError, FlowdupError
from flowdup.methods import MethodConfig, MethodContext
from flowdup.personalize import PersonalModel
from flowdup.random import Stream
from flowdup.run import Simulation

SETTINGS = {
    "model": "cnn-small",
    "method": METHODS["flowdup"],
    "client": {"batch_size": 10, "optimizer": {"lr": 0.05}},
    "server": {"rounds": 3, "cohort": 4},
}


def config(**changes: object) -> Config:
    return read_config(SETTINGS | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    rounds = list(flowdup.train_run(config(), folder, population=population()))
    assert [m["round"] for m in rounds] == [1, 2, 3]
    return folder


def test_any_client_gets_an_ordinary_module_from_unlabeled_data(run: Path) -> None:
    federation = flowdup.load(run)
    x = client(30, 7).x
    model = federation.personalize(x)
    assert isinstance(model, torch.nn.Module)
    assert model(x).shape == (7, 4)
    assert (model.predict(x) == model(x).argmax(1)).all()
    assert not any(p.requires_grad for p in model.parameters())


def test_a_model_moves_between_precisions_and_processes(run: Path) -> None:
    x = client(30, 7).x
    model = flowdup.load(run).personalize(x)
    assert torch.allclose(model.double()(x).float(), model.float()(x), atol=1e-4)
    assert (pickle.loads(pickle.dumps(model))(x) == model(x)).all()


def test_a_model_in_half_precision_is_saved_and_loaded(run: Path, tmp_path: Path) -> None:
    """The sum of its weights is beyond what its type holds."""
    model = flowdup.load(run).personalize(client(30, 7).x).half()
    for parameter in model.parameters():
        parameter.fill_(6e4)
    model.save(tmp_path / "half.safetensors")
    loaded = flowdup.load_model(tmp_path / "half.safetensors")
    assert all((p == 6e4).all() for p in loaded.parameters())


def test_a_model_is_the_networks_at_theta_0_plus_p_v(run: Path) -> None:
    federation, x = flowdup.load(run), client(30, 7).x
    weights = federation.method.personalize(federation.psi, x, torch.ones(7))
    model = federation.personalize(x)
    assert torch.allclose(model(x), federation.method.f(weights, x), atol=1e-6)


def test_a_personalizer_for_many_clients_of_one_size_gives_their_weights(run: Path) -> None:
    federation = flowdup.load(run)
    make = federation.personalizer(client(30, 7).x)
    for number in (30, 33):
        x = client(number, 7).x
        own = dict(federation.personalize(x).module.named_parameters())
        for name, weight in make(x.numpy()).items():
            assert torch.allclose(weight, own[name], atol=1e-6)
    with pytest.raises(DataError, match=r"for inputs \[7, .* not \[8, .*: make another"):
        make(client(30, 8).x)


def test_eight_threads_make_personalizers_of_one_federation_at_once(run: Path) -> None:
    federation = flowdup.load(run)
    sets = [client(30 + i, 5 + i).x for i in range(8)]
    start = Barrier(len(sets))

    def weights(x: torch.Tensor) -> flowdup.models.Weights:
        start.wait()
        return federation.personalizer(x)(x)

    with ThreadPoolExecutor(len(sets)) as pool:
        found = list(pool.map(weights, sets))
    for x, made in zip(sets, found, strict=True):
        own = dict(federation.personalize(x).module.named_parameters())
        assert all(torch.allclose(made[n], w, atol=1e-6) for n, w in own.items())


def test_models_are_made_where_the_federation_is(run: Path) -> None:
    """On a device that every machine has, which keeps shapes and no numbers."""
    here = flowdup.load(run)
    spec, psi = here.spec, {n: p.to("meta") for n, p in here.psi.items()}
    parts = MethodContext(spec.model, spec.inputs, Stream(spec.seed), "meta")
    federation = flowdup.Federation(
        spec, MethodConfig.from_table(spec.method).build(parts), psi, here.round
    )
    x = client(30, 7).x
    weights = federation.method.personalize(psi, x.to("meta"), torch.ones(7, device="meta"))
    model = PersonalModel(spec.model, spec.inputs, weights)
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert model(x.to("meta")).device.type == federation.embedding(x).device.type == "meta"


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(run: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown device '{device}': use auto, cpu"):
        flowdup.load(run, device)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with clients of float32 inputs, three channels."""
    draw, spec = torch.Generator().manual_seed(0), InputSpec((3, 8, 8), "float32", 4)
    clients = [
        ClientData(torch.rand(6, 3, 8, 8, generator=draw), torch.arange(6) % 4) for _ in range(4)
    ]
    people, folder = Population(spec, clients, [], []), tmp_path_factory.mktemp("floats")
    list(flowdup.train_run(config(server={"rounds": 1, "cohort": 2}), folder, population=people))
    return folder


def test_a_personalizer_takes_what_personalize_takes(floats: Path) -> None:
    federation, x = flowdup.load(floats), torch.linspace(0, 1, 1152).view(6, 3, 8, 8)
    make = federation.personalizer(x)
    wanted = make(x)
    for same in (x.double().numpy(), x.contiguous(memory_format=torch.channels_last)):
        for name, weight in make(same).items():
            assert torch.equal(weight, wanted[name])


def test_inputs_that_give_numbers_which_are_not_finite_are_refused(
    floats: Path, tmp_path: Path
) -> None:
    federation, x = flowdup.load(floats), torch.linspace(0, 1, 1152).view(6, 3, 8, 8)
    model = federation.personalize(x)
    with pytest.raises(DataError, match="give a model with NaN or infinite numbers"):
        federation.personalize(x * 1e38)
    with pytest.raises(DataError, match="give logits with NaN or infinite numbers"):
        model.predict(x * 3e38)
    next(model.parameters())[0] = float("nan")
    with pytest.raises(FlowdupError, match="NaN or infinite weights and is not saved"):
        model.save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_weights_from_a_personalizer_are_not_psi_itself(tmp_path: Path) -> None:
    list(flowdup.train_run(config(method={"name": "fedavg"}), tmp_path, population=population()))
    federation, x = flowdup.load(tmp_path), client(30, 7).x
    before = {n: p.clone() for n, p in federation.psi.items()}
    for weight in federation.personalizer(x)(x).values():
        weight.zero_()
    assert all(torch.equal(p, before[n]) for n, p in federation.psi.items())


def test_the_order_of_points_does_not_matter_and_arrays_serve_as_well(run: Path) -> None:
    federation, x = flowdup.load(run), client(31, 9).x
    a, b = federation.personalize(x), federation.personalize(x.flip(0).numpy())
    assert torch.allclose(a(x), b(x), atol=1e-4)
    assert torch.allclose(federation.embedding(x), federation.embedding(x.flip(0)), atol=1e-5)
    assert federation.embedding(x).shape == (12,)


def test_reversed_and_foreign_arrays_are_read(run: Path) -> None:
    federation, x = flowdup.load(run), client(31, 9).x.numpy()
    assert torch.allclose(federation.embedding(x[::-1]), federation.embedding(x), atol=1e-5)


def test_one_point_is_a_set(run: Path) -> None:
    assert flowdup.load(run).personalize(client(5, 1).x).predict(client(5, 3).x).shape == (3,)


def test_a_model_file_reads_back_as_the_model(run: Path, tmp_path: Path) -> None:
    model, x = flowdup.load(run).personalize(client(0, 20).x), client(0, 5).x
    model.save(tmp_path / "me.safetensors")
    again = flowdup.load_model(tmp_path / "me.safetensors")
    assert (again(x) == model(x)).all()
    assert again.inputs == SPEC


@pytest.mark.parametrize("place", [3, 40, 400, -1])
def test_a_changed_model_file_is_refused(run: Path, tmp_path: Path, place: int) -> None:
    path = tmp_path / "me.safetensors"
    flowdup.load(run).personalize(client(0, 20).x).save(path)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="personalize again"):
        flowdup.load_model(path)


IMAGE = np.zeros((2, 1, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (IMAGE[:0], "is empty"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"\(3, 8, 8\), of 3 channels, and 1 is what is read"),
        (np.zeros((2, 1, 9, 8), np.uint8), r"\(1, 9, 8\)"),
        (IMAGE[0], r"\(8, 8\)"),
        (IMAGE.astype(np.float32), "float32, the federation reads uint8"),
        (np.zeros(()), "shape"),
        (np.array([None, "a"]), "must be numbers"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(run: Path, x: np.ndarray, message: str) -> None:
    federation = flowdup.load(run)
    model = federation.personalize(client(0, 5).x)
    for use in (federation.personalize, federation.embedding, model.predict):
        with pytest.raises(DataError, match=message):
            use(x)


def test_ones_own_population_is_checked_before_it_trains(tmp_path: Path) -> None:
    ours = population()
    broken = flowdup.ClientData(torch.zeros(3, 1, 8, 9, dtype=torch.uint8), name="odd one")
    ours = flowdup.Population(SPEC, [*ours.train, broken], ours.validation, ours.test)
    with pytest.raises(DataError, match="'odd one'"):
        next(flowdup.train_run(config(), tmp_path / "run", population=ours))
    assert not (tmp_path / "run").exists()


def test_a_method_without_an_embedding_says_so(tmp_path: Path) -> None:
    for _ in flowdup.train_run(
        config(method={"name": "fedavg"}), tmp_path, population=population()
    ):
        pass
    with pytest.raises(FlowdupError, match="train flowdup"):
        flowdup.load(tmp_path).embedding(client(0, 5).x)


def test_a_folder_of_another_federation_is_not_continued(run: Path) -> None:
    with pytest.raises(CheckpointError, match="another expansion"):
        Simulation(config(seed=1), population()).load_state(run / "checkpoint")
    other = config(method=METHODS["flowdup"] | {"regularization": 0.5})
    with pytest.raises(CheckpointError, match="another federation"):
        Simulation(other, population()).load_state(run / "checkpoint")


class Tied(torch.nn.Module):
    """One matrix in two places, a buffer, and a number that scales the output."""

    offset: torch.Tensor

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(64, outputs)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.linspace(-1, 1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.flatten(1) + self.offset))
        out: torch.Tensor = self.head(torch.tanh(self.second(x))) * self.scale
        return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_module_with_tied_weights_and_buffers_serves_as_f_and_h1(
    tmp_path: Path, dtype: str
) -> None:
    flowdup.register_model("tied", Tied)
    settings = config(model="tied", engine={"dtype": dtype})
    for _ in flowdup.train_run(settings, tmp_path, population=population()):
        pass
    federation, x = flowdup.load(tmp_path), client(30, 7).x
    model = federation.personalize(x)
    weights = federation.method.personalize(federation.psi, x, torch.ones(7))
    assert torch.allclose(model(x), federation.method.f(weights, x), atol=1e-6)
    model.save(tmp_path / "tied.safetensors")
    assert (flowdup.load_model(tmp_path / "tied.safetensors")(x) == model(x)).all()
    found = flowdup.evaluate_run(tmp_path, population())
    assert found["metrics"]["transductive"]["accuracy"]["mean"] is not None


def test_floats_with_nan_or_infinity_are_refused() -> None:
    spec = flowdup.InputSpec((2,), "float32", 3)
    for bad in (float("nan"), float("inf")):
        x = torch.zeros(5000, 2)
        x[4999, 1] = bad
        with pytest.raises(DataError, match="NaN or infinite"):
            spec.check(flowdup.ClientData(x, name="c"))
    with pytest.raises(DataError, match="uint8 inputs, the federation reads floats"):
        spec.check(flowdup.ClientData(torch.zeros(2, 2, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0, 3], "from 0 to 3: they must lie between 0 and 2"),
        ([-2, 0], "from -2 to 0"),
        ([0.5, 1], "whole number per point"),
        ([0], "whole number per point"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y: list[float], message: str) -> None:
    spec = flowdup.InputSpec((2,), "float32", 3)
    with pytest.raises(DataError, match=message):
        spec.check(flowdup.ClientData(torch.zeros(2, 2), torch.tensor(y)))
