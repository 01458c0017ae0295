"""Clients of your own: sensors that each live in a place of their own, half of them labeled.

    flowdup --import examples/own_data.py train examples/own_data.toml --out runs/own-data
    flowdup evaluate runs/own-data

`data.source = "folder"` and `"table"` read files without any code; this is for everything else.
"""

import numpy as np
import torch

import flowdup
from flowdup.data import ClientData, DataConfig
from flowdup.random import Stream


def sensors(config: DataConfig, stream: Stream) -> list[ClientData]:
    """20 numbers in, one of 3 classes; every place adds an offset that no client is told."""
    centers = np.random.default_rng(0).normal(size=(3, 20))
    clients = []
    for number in range(120):
        draw = np.random.default_rng(1 + number)
        offset, y = draw.normal(size=20), draw.integers(0, 3, config.points)
        x = centers[y] + offset + 0.5 * draw.normal(size=(config.points, 20))
        inputs = torch.from_numpy(x.astype(np.float32))
        clients.append(ClientData(inputs, torch.from_numpy(y), f"sensor-{number}"))
    return clients  # split into training, validation and test by data.*_clients


flowdup.register_source("sensors", sensors)
