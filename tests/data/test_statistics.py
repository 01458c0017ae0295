"""Inputs of a user's own clients are normalised from sums that the training clients give."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crafted import change_header
from numpy.typing import NDArray
from small import client

import flowdup
from flowdup.data import ClientData, DataConfig, InputSpec, LazyClients, Population, load_population
from flowdup.data.loading import LOADERS
from flowdup.data.statistics import ChannelSums, combine, offset_sentence
from flowdup.errors import ConfigError, DataError
from flowdup.random import Stream

RATES = ["server.rounds=2", "server.cohort=3", "run.keep='last'", "method.name='fedavg'"]


@pytest.fixture
def source() -> Iterator[str]:
    yield "mine"
    LOADERS.unregister("mine")


def write_clients(folder: Path, scale: float = 1.0) -> list[NDArray[Any]]:
    """Ten clients of three features: a large one, a constant one, a small one."""
    folder.mkdir()
    draw, arrays = np.random.default_rng(0), []
    for number in range(10):
        x = draw.normal(size=(7 + number, 3)) * [300.0, 0.0, 1e-3] + [5000.0 + number, 4.3, 0.0]
        x = (x * scale).astype(np.float32)
        np.savez(folder / f"c{number}.npz", x=x, y=np.arange(len(x)) % 2)
        arrays.append(x)
    return arrays


def settings(folder: Path, **more: Any) -> DataConfig:
    return DataConfig("folder", path=str(folder), validation_clients=2, test_clients=2, **more)


def test_mean_and_std_are_those_of_all_training_points_and_of_nobody_else(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients")
    found = load_population(settings(tmp_path / "clients"), Stream(0))
    points = np.concatenate([c.x.numpy() for c in found.train]).astype(np.float64)
    assert len(found.train) == 6
    assert found.spec.mean == pytest.approx(points.mean(0), rel=1e-5)
    assert found.spec.std == pytest.approx([points[:, 0].std(), 1.0, points[:, 2].std()], rel=1e-5)
    read = found.spec.reader()(torch.cat([c.x for c in found.train]))
    assert read.mean(0).abs().max() < 1e-4 and torch.allclose(
        read.std(0, unbiased=False), torch.tensor([1.0, 0.0, 1.0]), atol=1e-4
    )


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients")
    own = load_population(settings(tmp_path / "clients", mean=(1.0,), std=(2.0,)), Stream(0))
    assert (own.spec.mean, own.spec.std) == ((1.0,), (2.0,))
    off = load_population(settings(tmp_path / "clients", normalize=False), Stream(0))
    assert (off.spec.mean, off.spec.std) == ((), ())


def test_images_are_measured_between_0_and_1_and_per_channel(source: str) -> None:
    x = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    x[:, 0, :2], x[1, 1] = 255, 51
    clients = [ClientData(x[i : i + 1], [i], str(i)) for i in range(2)]
    flowdup.register_source(source, lambda config, stream: {"train": clients})
    found = load_population(DataConfig(source), Stream(0)).spec
    assert found.mean == (0.5, 0.1, 0.0)
    assert found.std == (0.5, 0.1, 1.0)


def test_a_gray_that_float64_cannot_hold_is_constant() -> None:
    gray = torch.full((7, 1, 5, 3), 77, dtype=torch.uint8)
    assert combine(map(ChannelSums.of, gray.split(3))).mean_and_std() == ((0.30196,), (1.0,))


def test_a_population_with_inputs_of_its_own_stays_as_it_is(source: str) -> None:
    given = Population(InputSpec((1, 8, 8), "uint8", 4), [client(0, 20)], [], [])
    flowdup.register_source(source, lambda config, stream: given)
    assert load_population(DataConfig(source), Stream(0)).spec == given.spec


def test_lazy_clients_are_not_made_for_it_which_is_told(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def make(number: int) -> ClientData:
        asked.append(number)
        return client(number, 5)

    flowdup.register_source(source, lambda config, stream: {"train": LazyClients(9, make, 9, 5)})
    with caplog.at_level(logging.WARNING):
        found = load_population(DataConfig(source, classes=4), Stream(0))
    assert found.spec.mean == () and set(asked) == {0}  # that tells the shape
    assert "set data.mean and data.std" in caplog.text


def test_sums_do_not_depend_on_who_has_which_points() -> None:
    """Nor do they cancel: the deviation is a hundred-thousandth of the mean."""
    x = torch.from_numpy(1e6 + 10 * np.random.default_rng(1).normal(size=(1000, 2, 3)))
    whole = ChannelSums.of(x).mean_and_std()
    dealt = combine(map(ChannelSums.of, torch.split(x, [1, 700, 9, 290]))).mean_and_std()
    assert whole == dealt
    assert whole[1] == pytest.approx(x.numpy().std((0, 2)), rel=1e-5)
    assert torch.allclose(
        torch.tensor(whole[0], dtype=torch.float64), x.mean((0, 2)), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(
    ("offset", "spread", "lost"),
    [(0, 1, False), (-1e6, 10, False), (1.7e9, 86400, False), (-1e7, 1, True), (1e9, 30, True)],
)
def test_numbers_that_lose_their_digits_as_float32_are_named(
    tmp_path: Path, offset: float, spread: float, lost: bool
) -> None:
    draw = np.random.default_rng(0).normal(size=(200, 2)) * [1, spread] + [0, offset]
    np.savez(tmp_path / "c.npz", x=draw, y=np.arange(200) % 2)
    own = DataConfig("folder", path=str(tmp_path), validation_clients=0, test_clients=0)
    spec = load_population(own, Stream(0)).spec
    told = offset_sentence(spec.mean, spec.std)
    assert told.startswith("inputs 1 differ by a millionth of their size") == lost == bool(told)
    assert ("inputs id differ" in offset_sentence(spec.mean, spec.std, ("x", "id"))) == lost
    read = spec.reader()(torch.from_numpy(draw.astype(np.float32)))
    assert float(read.abs().max()) < 5  # what rounding makes of them, too


def test_numbers_that_no_network_can_read_are_named(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", scale=1e30)
    with pytest.raises(DataError, match=r"channel 0 of the inputs has the mean 5e\+33"):
        load_population(settings(tmp_path / "clients"), Stream(0))


def test_a_run_keeps_them_in_its_checkpoint_and_uses_them_at_the_client(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients")
    data = settings(tmp_path / "clients")
    config = flowdup.load_config("digits", [*RATES, "model='mlp'"])
    config = replace(config, data=data)
    list(flowdup.train_run(config, tmp_path / "run"))
    spec = load_population(data, Stream(0).child("data")).spec
    federation = flowdup.load(tmp_path / "run")
    assert federation.spec.inputs == spec and spec.mean
    x = torch.tensor([[4900.0, 4.3, 0.0], [5300.0, 4.3, 2e-3]])
    model = federation.personalize(x)
    read = (x - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    assert torch.allclose(model(x), model.module(read), rtol=1e-4)
    assert flowdup.evaluate_run(tmp_path / "run")["round"] == 2


def test_a_run_from_before_goes_on_without(tmp_path: Path) -> None:
    """Its files have no such setting, and its checkpoint no mean."""
    write_clients(tmp_path / "clients")
    config = flowdup.load_config("digits", [*RATES, "model='mlp'"])
    old = replace(config, data=settings(tmp_path / "clients", normalize=False))
    list(flowdup.train_run(old, tmp_path / "run"))
    assert flowdup.load(tmp_path / "run").spec.inputs.mean == ()
    saved = tmp_path / "run" / "checkpoint"
    change_header(saved, lambda h: h["run"]["config"]["data"].pop("normalize"))
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    assert "normalize = false\n" in text
    file.write_text(text.replace("normalize = false\n", ""))
    assert flowdup.evaluate_run(tmp_path / "run")["round"] == 2
    new = replace(config, data=settings(tmp_path / "clients"))
    with pytest.raises(ConfigError, match=r"data\.normalize is true .* and false in"):
        list(flowdup.train_run(new, tmp_path / "run", resume=True))
