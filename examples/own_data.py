"""Clients of your own: sensors that each live in a place of their own, half of them labeled.

    flowdup --import examples/own_data.py train examples/own_data.toml --out runs/own-data
    flowdup evaluate runs/own-data

`data.source = "folder"` and `"table"` read files without any code; this is for everything else.
"""

import torch

import flowdup
from flowdup.data import ClientData, DataConfig
from flowdup.random import Stream


def sensors(config: DataConfig, stream: Stream) -> list[ClientData]:
    """20 numbers in, one of 3 classes; every place adds an offset that no client is told.

    All that is random comes from the stream: the same seed gives the same clients, another others.
    """
    centers = 2 * stream.child("centers").uniform(3 * 20).reshape(3, 20)
    clients = []
    for number in range(120):
        draw = stream.child("sensor", number)
        y = draw.child("y").integers(config.points, 3)
        noise = draw.child("noise").uniform(config.points * 20).reshape(-1, 20)
        x = centers[y] + 2 * draw.child("offset").uniform(20) + noise
        clients.append(ClientData(torch.from_numpy(x), torch.from_numpy(y), f"sensor-{number}"))
    return clients  # split into training, validation and test by data.*_clients


flowdup.register_source("sensors", sensors)
