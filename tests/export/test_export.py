"""Exported files give what PyTorch gives, for sets and batches of any size."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from bundles import KINDS, SMALL, images, train
from commands.here import flowdup as flowdup_here
from consumer import Consumer

import flowdup
from flowdup.errors import ConfigError
from flowdup.export import FORMATS, export_bundle, export_model
from flowdup.federation_spec import FederationSpec
from flowdup.methods import MethodConfig, MethodContext
from flowdup.models import build_network
from flowdup.personalize import Federation, PersonalModel
from flowdup.random import Stream


@pytest.fixture(scope="module", params=KINDS)
def federation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Federation:
    return train(request.param, tmp_path_factory.mktemp("run"))


def test_a_bundle_is_all_that_a_consumer_needs(federation: Federation, tmp_path: Path) -> None:
    manifest = export_bundle(federation, tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_bytes()) == manifest
    consumer = Consumer(tmp_path)
    for count in (1, 7, 300):
        x = images(federation, count)
        own = federation.personalize(x)
        found = consumer.logits(x.numpy(), consumer.personalize(x.numpy()))
        assert np.abs(found - own.logits(x).numpy()).max() < 1e-4
        _, r = consumer.h.run(None, {"x": x.numpy()})
        assert np.abs(r - federation.embedding(x).numpy()).max() < 1e-4


def untrained(model: str) -> Federation:
    """FLowDUP on images of CIFAR-10's size, with weights as they are drawn."""
    inputs = flowdup.InputSpec((3, 32, 32), "uint8", 10, (0.5,) * 3, (0.25,) * 3)
    subspace, h = {"kind": "hashed", "k": 10_000}, {"output_scale": 0.05}
    config = MethodConfig.from_table({"name": "flowdup", "subspace": subspace, "hypernetwork": h})
    method = config.build(MethodContext(model, inputs, Stream(3)))
    spec = FederationSpec.of(3, model, config.table(), inputs, method)
    return Federation(spec, method, method.init(Stream(3)), 0)


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_a_bundle_of_a_large_model_gives_what_pytorch_gives(model: str, tmp_path: Path) -> None:
    federation = untrained(model)
    export_bundle(federation, tmp_path)
    consumer = Consumer(tmp_path)
    for count in (1, 5):  # the example has 2
        x = images(federation, count)
        wanted = federation.personalize(x).logits(x).numpy()
        assert np.abs(wanted - federation.global_model().logits(x).numpy()).max() > 1e-2
        found = consumer.logits(x.numpy(), consumer.personalize(x.numpy()))
        assert np.abs(found - wanted).max() < 1e-4
    if model == "cnn":
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 12e6


def test_a_bundle_tells_foreign_clients_where_the_run_could(
    federation: Federation, tmp_path: Path
) -> None:
    manifest = export_bundle(federation, tmp_path)
    found, width = manifest["familiarity"], manifest["embedding"]
    if federation.spec.method["name"] != "flowdup-plus":
        assert found is None  # with 10 validation clients
        return
    assert len(found["mean"]) == width
    assert [len(row) for row in found["directions"]] == [width] * len(found["variances"])
    assert {*found["limits"]} == {"1", "3", "10", "30", "40"}
    assert found["rate"] == 0.05
    assert 0 < sum(map(sum, found["map"]["counts"])) <= 20
    x = images(federation, 30)
    r = Consumer(tmp_path).h.run(None, {"x": x.numpy()})[1].astype(float)
    away = r - np.array(found["mean"])
    along = np.array(found["directions"]) @ away
    left = (away**2).sum() - (along**2).sum()
    score = (along**2 / np.array(found["variances"])).sum() + left / found["rest"]
    verdict = federation.familiarity(x)
    assert score == pytest.approx(verdict.score, rel=1e-4)
    assert found["limits"]["30"] == verdict.threshold


def test_a_bundle_says_what_it_has_not(tmp_path: Path) -> None:
    small = [s for s in SMALL if "rounds" not in s]
    config = flowdup.load_config("digits", [*small, "server.rounds=1", "method.name=fedavg"])
    for _ in flowdup.train_run(config, tmp_path / "run"):
        pass
    with pytest.raises(ConfigError, match="'fedavg' has no hypernetwork to export: train flowdup"):
        export_bundle(flowdup.load(tmp_path / "run"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def personal(name: str) -> PersonalModel:
    """A model with weights as they are drawn."""
    shape, kind = ((3, 32, 32), "uint8") if name != "mlp" else ((5,), "float32")
    inputs = flowdup.InputSpec(shape, kind, 4, class_names=("a", "b", "c", "d"))
    network = build_network(name, shape, 4, inputs.reader())
    return PersonalModel(name, inputs, network.init(Stream(0)))


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18"])
def test_a_model_of_ones_own_runs_anywhere(name: str, tmp_path: Path) -> None:
    model = personal(name)
    for format in FORMATS:
        export_model(model, tmp_path / f"me.{format}", format)
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx")
    program = torch.export.load(tmp_path / "me.torch").module()
    stored = flowdup.load_model(tmp_path / "me.safetensors")
    for count in (1, 5):
        x = torch.randint(0, 256, (count, *model.inputs.shape)).to(
            getattr(torch, model.inputs.dtype)
        )
        wanted = model.logits(x)
        for found in (
            torch.from_numpy(session.run(None, {"x": x.numpy()})[0]),
            program(x),
            stored.logits(x),
        ):
            assert (found - wanted).abs().max() < 1e-4
    about = {p.key: p.value for p in onnx.load(tmp_path / "me.onnx").metadata_props}
    assert json.loads(about["class_names"]) == ["a", "b", "c", "d"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'pdf': use one of safetensors, onnx, torch"):
        export_model(personal("mlp"), tmp_path / "me.pdf", "pdf")
    assert not [*tmp_path.iterdir()]


def test_the_command_line_exports(tmp_path: Path) -> None:
    for _ in flowdup.train_run(flowdup.load_config("digits", SMALL), tmp_path / "run"):
        pass
    bundle, clients = tmp_path / "bundle", tmp_path / "me.npz"
    words = ["--format", "onnx", "--out", bundle, "--json"]
    told = json.loads(done("export", tmp_path / "run", *words))
    assert told["bytes"] == sum(path.stat().st_size for path in bundle.glob("*.[ob]*n*"))
    np.savez(clients, x=np.zeros((3, 1, 8, 8), np.uint8))
    for format in FORMATS:
        mine = ["--input", clients, "--out", tmp_path / f"me.{format}", "--format", format]
        assert "made from 3 unlabeled points" in done("personalize", tmp_path / "run", *mine)
    onnx.checker.check_model(tmp_path / "me.onnx")
    for ending in ("ONNX", "pt2", "any"):
        mine = ["--input", clients, "--out", tmp_path / f"by-ending.{ending}"]
        done("personalize", tmp_path / "run", *mine)
    onnx.checker.check_model(onnx.load(tmp_path / "by-ending.ONNX", format="protobuf"))
    torch.export.load(tmp_path / "by-ending.pt2")
    flowdup.load_model(tmp_path / "by-ending.any")
    x = torch.zeros(7, 1, 8, 8, dtype=torch.uint8)  # more than it was made from
    wanted = flowdup.load_model(tmp_path / "me.safetensors").logits(x)
    program = torch.export.load(tmp_path / "me.torch").module()
    session = onnxruntime.InferenceSession(tmp_path / "me.onnx")
    for found in (program(x), torch.from_numpy(session.run(None, {"x": x.numpy()})[0])):
        assert (found - wanted).abs().max() < 1e-4


def done(*words: object) -> str:
    ended = flowdup_here(*map(str, words))
    assert ended.code == 0, ended.error
    return ended.out
