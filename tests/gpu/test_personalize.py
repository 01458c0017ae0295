"""Personal models made on a GPU: as one launch, from many threads, and as a CPU makes them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from small import METHODS, client, population

import flowdup
from flowdup.config import read_config
from flowdup.methods import METHODS as ALL
from flowdup.methods.corrected import Corrected
from flowdup.run import train_run

DEVICE = "cuda"
THREADS = 8
MAKE_MODELS = [n for n, m in METHODS.items() if not ALL[m["name"]].method.predicts_jointly]


@pytest.fixture(scope="module", params=MAKE_MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, on a CPU."""
    config = read_config(
        {
            "model": "cnn-small",
            "method": METHODS[request.param],
            "client": {"batch_size": 10, "optimizer": {"lr": 0.05}},
            "server": {"rounds": 2, "cohort": 4},
            "engine": {"device": "cpu"},
        }
    )
    out = tmp_path_factory.mktemp(request.param)
    list(train_run(config, out, population=population()))
    return out


def test_one_launch_gives_the_weights_of_many_and_of_a_cpu(folder: Path) -> None:
    here, there = flowdup.load(folder), flowdup.load(folder, DEVICE)
    sets = [client(i, 20).x for i in range(4)]
    personalizer = there.personalizer(sets[0])
    method = here.method
    shares = method.bias if isinstance(method, Corrected) else ""
    for x in sets:
        found = personalizer(x)
        model, exact = there.personalize(x), here.personalize(x)
        for name, weight in exact.module.named_parameters():
            own = dict(model.module.named_parameters())[name]
            assert own.is_cuda == (DEVICE == "cuda")
            for made in (found[name].cpu(), own.cpu()):
                if name == shares:  # EM's steps multiply what a logarithm is rounded by
                    assert torch.allclose(made.softmax(0), weight.softmax(0), atol=5e-3), name
                else:
                    assert torch.allclose(made, weight, atol=1e-4), name


def test_eight_threads_make_and_use_personalizers_at_once(folder: Path) -> None:
    there = flowdup.load(folder, DEVICE)
    sets = [client(i, 20).x for i in range(THREADS)]
    wanted = [dict(there.personalize(x).module.named_parameters()) for x in sets]
    shared = there.personalizer(sets[0])

    def make(number: int) -> None:
        own = there.personalizer(sets[number])
        for _ in range(5):
            for personalizer in (own, shared):
                found = personalizer(sets[number])
                for name, weight in wanted[number].items():
                    assert torch.allclose(found[name], weight, atol=1e-5), name

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(make, range(THREADS)))


def test_callers_on_streams_of_their_own_get_their_own_models(folder: Path) -> None:
    """Nobody waits between calls, so only the order of streams keeps one's copy from another's."""
    there = flowdup.load(folder, DEVICE)
    sets = [client(i, 20).x.to(DEVICE) for i in range(4)]
    wanted = [dict(there.personalize(x).module.named_parameters()) for x in sets]
    shared = there.personalizer(sets[0])
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((number, shared(sets[number])))
    torch.cuda.synchronize()
    for number, weights in found:
        for name, weight in wanted[number].items():
            assert torch.allclose(weights[name], weight, atol=1e-5), name
