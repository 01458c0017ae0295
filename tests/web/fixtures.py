"""Bundles for the browser test, with what Python makes of them: `python fixtures.py FOLDER`.

`cnn` has the size of the paper's (k = 10^4); its weights are hardly trained, its clients are coloured
patterns.
"""

import sys
import warnings
from pathlib import Path

import torch

import flowdup
from flowdup.data import ClientData, InputSpec, Population
from flowdup.export import export_bundle
from flowdup.personalize import Federation

SETTINGS = ["server.rounds=2", "server.cohort=4", "engine.device=cpu", "run.evaluate_every=2"]
CLASSES = 10


def pattern(client: int, points: int = 100) -> ClientData:
    """Stripes whose width is the class, in the client's own colours."""
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, CLASSES, (points,), generator=draw)
    wave = torch.sin(torch.arange(32) / (1.0 + y[:, None]))  # [points, 32]
    colours = torch.rand(points, 3, 1, 1, generator=draw) * torch.rand(3, 1, 1, generator=draw)
    image = (127 + 127 * colours * wave[:, None, None, :]).expand(points, 3, 32, 32)
    noise = 20 * torch.rand(points, 3, 32, 32, generator=draw)
    return ClientData((image + noise).clamp(0, 255).to(torch.uint8), y, f"client-{client}")


def train_cnn(out: Path) -> Federation:
    spec = InputSpec((3, 32, 32), "uint8", CLASSES)
    groups = [list(map(pattern, numbers)) for numbers in (range(25), range(25, 45), range(45, 48))]
    config = flowdup.load_config("class-partitioned-cifar10", SETTINGS)
    for _ in flowdup.train_run(config, out, population=Population(spec, *groups)):
        pass
    return flowdup.load(out)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    export_bundle(train_cnn(out / "cnn-run"), out / "cnn")
