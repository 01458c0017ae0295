"""Bundles and images for the browser test, with what Python makes of them.

`python fixtures.py FOLDER RUN BUNDLE`: RUN was exported to BUNDLE with samples.  Into FOLDER go

    cnn/         a bundle of the paper's size (k = 10^4), hardly trained on coloured stripes
    floats/      a bundle for images of floats, which the page refuses
    images/      digits-*.png and stripes-*.png
    known.json   what each model says of them, and whether the client is foreign
"""

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import flowdup
from flowdup.data import ClientData, InputSpec, Population
from flowdup.export import export_bundle
from flowdup.personalize import Federation

SETTINGS = ["server.rounds=2", "server.cohort=4", "engine.device=cpu", "run.evaluate_every=2"]
CLASSES = 10
MANY = 5000


def stripes(client: int, points: int = 100) -> ClientData:
    """Coloured ones, whose width is the class."""
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, CLASSES, (points,), generator=draw)
    wave = torch.sin(torch.arange(32) / (1.0 + y[:, None]))  # [points, 32]
    colours = torch.rand(points, 3, 1, 1, generator=draw) * torch.rand(3, 1, 1, generator=draw)
    image = (127 + 127 * colours * wave[:, None, None, :]).expand(points, 3, 32, 32)
    noise = 20 * torch.rand(points, 3, 32, 32, generator=draw)
    return ClientData((image + noise).clamp(0, 255).to(torch.uint8), y, f"client-{client}")


def floats(client: int, points: int = 30) -> ClientData:
    """Noise of the digits' shape."""
    draw = torch.Generator().manual_seed(client)
    x = torch.rand(points, 1, 8, 8, generator=draw)
    return ClientData(x, torch.randint(0, CLASSES, (points,), generator=draw), f"client-{client}")


def train(out: Path, preset: str, make: Callable[[int], ClientData]) -> Federation:
    """Two rounds on clients made from their numbers."""
    x = make(0).x
    dtype = "uint8" if x.dtype == torch.uint8 else "float32"
    spec = InputSpec(tuple(x.shape[1:]), dtype, CLASSES)
    groups = [list(map(make, numbers)) for numbers in (range(25), range(25, 45), range(45, 48))]
    config = flowdup.load_config(preset, SETTINGS)
    for _ in flowdup.train_run(config, out, population=Population(spec, *groups)):
        pass
    return flowdup.load(out)


def answers(federation: Federation, x: Tensor) -> dict[str, Any]:
    """Both models' classes and probabilities, and whether the client is foreign."""
    return {
        "own": federation.personalize(x).predictions(x),
        "everyone": federation.global_model().predictions(x),
        "familiarity": asdict(federation.familiarity(x)) if federation.summary else None,
    }


def read_samples(bundle: Path, shape: tuple[int, ...]) -> list[Tensor]:
    listed = json.loads((bundle / "samples.json").read_bytes())["clients"]
    points = np.frombuffer((bundle / "samples.bin").read_bytes(), np.uint8).reshape(-1, *shape)
    return list(torch.from_numpy(points.copy()).split([client["points"] for client in listed]))


def write_images(x: Tensor, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(x):
        pixels = image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(out / f"{name}-{number:04}.png")


def main(out: Path, run: Path, bundle: Path) -> None:
    digits = flowdup.load(run)
    samples = read_samples(bundle, digits.spec.inputs.shape)
    each = torch.cat(samples)
    many = each.repeat(MANY // len(each) + 1, 1, 1, 1)[:MANY]
    many[:, :, 0, 0] = torch.arange(MANY).remainder(256)[:, None].to(torch.uint8)
    write_images(many, out / "images", "digits")
    cnn = train(out / "cnn-run", "class-partitioned-cifar10", stripes)
    export_bundle(cnn, out / "cnn")
    export_bundle(train(out / "floats-run", "digits", floats), out / "floats")
    striped = stripes(99).x
    write_images(striped, out / "images", "stripes")
    known = {
        "samples": [answers(digits, x) for x in samples],
        "inverted": answers(digits, 255 - samples[0]),
        "one": answers(digits, many[:1]),
        "many": answers(digits, many),
        "cnn": answers(cnn, striped),
    }
    (out / "known.json").write_text(json.dumps(known))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*map(Path, sys.argv[1:]))
