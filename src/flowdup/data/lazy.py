"""Simulated clients that are made when they are asked for: nothing is stored per client."""

from dataclasses import asdict

import torch
from torch import Tensor

from flowdup.data.clients import ClientData, LazyClients
from flowdup.data.partition import (
    Recipe,
    check_classes,
    check_rotations,
    check_size,
    make_client,
)
from flowdup.random import Stream, distinct


def lazy_clients(
    recipe: Recipe, x: Tensor, y: Tensor, pool: Tensor, clients: int, labeled: int, stream: Stream
) -> LazyClients:
    """Clients by a recipe from images x [n, channels, height, width] and labels y [n].

    `pool` has the numbers of the images that they may be made of; two clients may share some.  The
    first `labeled` clients have labels.

    Client i is made from substream i of the stream: one word for its rotation, one for each of its
    classes, one for each of its points.  It does not depend on how many clients there are.  Each
    draws its classes for itself, all sets of them being equally likely.
    """
    piles = [pool]
    if recipe.classes_per_client:
        labels = y[pool]
        piles = [pool[labels == label] for label in labels.bincount().nonzero()]
        check_classes(recipe, len(piles))
    kinds = recipe.classes_per_client or 1
    size = recipe.points // kinds
    check_size(size, min(map(len, piles)))
    check_rotations(recipe.rotations, x.shape[-2:])
    rotations = recipe.rotations or (0,)

    def make(number: int) -> ClientData:
        words = iter(stream.substreams(number, 1, 1 + kinds + recipe.points)[0].tolist())
        turn = rotations[next(words) * len(rotations) >> 32]
        chosen = [piles[i] for i in sorted(distinct(words, kinds, len(piles)))]
        part = torch.cat([pile[distinct(words, size, len(pile))] for pile in chosen])
        return make_client(recipe, x, y, part, turn, f"{stream.path[-1]}-{number}")

    return LazyClients(clients, make, labeled, recipe.points, asdict(recipe))
