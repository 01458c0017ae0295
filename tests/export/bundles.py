"""Bundles with known answers, for tests in other languages: `python bundles.py FOLDER`."""

import json
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

import flowdup
from flowdup.export import export_bundle
from flowdup.personalize import Federation, PersonalModel

SMALL = [
    "data.train_clients=20",
    "data.validation_clients=10",
    "data.test_clients=5",
    "server.rounds=3",
    "server.cohort=5",
    "engine.device=cpu",
]
KINDS = {
    "flowdup": ["digits"],
    "kronecker": ["digits", 'method.subspace={"kind"="kronecker", "k"=500}'],
    "corrected": ["digits", "method.correction=em"],
    "plus": ["digits-plus", "before=[]", "data.validation_clients=19"],
    "cnn": ["digits", "model=cnn-small", "method.subspace.k=1000"],
}


def train(kind: str, out: Path) -> Federation:
    preset, *settings = KINDS[kind]
    for _ in flowdup.train_run(flowdup.load_config(preset, [*SMALL, *settings]), out):
        pass
    return flowdup.load(out)


def images(federation: Federation, count: int) -> torch.Tensor:
    shape = (count, *federation.spec.inputs.shape)
    return torch.randint(0, 256, shape, generator=torch.manual_seed(count)).to(torch.uint8)


def write(federation: Federation, out: Path) -> None:
    """The bundle, points, and what Python makes of them."""
    export_bundle(federation, out)
    known = []
    for number, count in enumerate((1, 7, 600)):
        x = images(federation, count)
        (out / f"points-{number}.bin").write_bytes(x.numpy().tobytes())
        weights = federation.method.global_model(federation.psi)
        for_all = PersonalModel(federation.spec.model, federation.spec.inputs, weights)
        known.append(
            {
                "points": count,
                "dtype": federation.spec.inputs.dtype,
                "personal": federation.personalize(x).logits(x).flatten().tolist(),
                "for_all": for_all.logits(x).flatten().tolist(),
                "embedding": federation.embedding(x).tolist(),
                "familiarity": asdict(federation.familiarity(x)) if federation.summary else None,
            }
        )
    (out / "known.json").write_text(json.dumps(known))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as run:
            write(train(kind, Path(run)), Path(sys.argv[1]) / kind)
