"""Simulated clients that are made when they are asked for: nothing is stored per client."""

from itertools import islice

import torch
from torch import Tensor

from flowdup.data.class_shares import draw_class_counts
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
    classes, with Dirichlet shares one for the class of each point, one for each of its points.  It
    does not depend on how many clients there are.  Each draws its classes for itself, all sets of
    them being equally likely.
    """
    piles = [pool]
    if recipe.classes_per_client or recipe.dirichlet:
        labels = y[pool]
        piles = [pool[labels == label] for label in labels.bincount().nonzero()]
        check_classes(recipe, len(piles))
    left = [len(pile) for pile in piles]
    kinds = recipe.classes_per_client or len(piles)
    size = recipe.points // kinds  # of each class, if equally many
    if recipe.dirichlet:
        check_size(recipe.points, len(pool))
    else:
        check_size(size, min(left))
    check_rotations(recipe.rotations, x.shape[-2:])
    rotations = recipe.rotations or (0,)
    length = 1 + kinds + recipe.points * (2 if recipe.dirichlet else 1)

    def make(number: int) -> ClientData:
        words = iter(stream.substreams(number, 1, length)[0].tolist())
        turn = rotations[next(words) * len(rotations) >> 32]
        own = sorted(distinct(words, kinds, len(piles)))
        counts = [size if c in own else 0 for c in range(len(piles))]
        if recipe.dirichlet:
            drawn = islice(words, recipe.points)
            counts = draw_class_counts(drawn, own, left, recipe.dirichlet)
        part = torch.cat(
            [pile[distinct(words, n, len(pile))] for pile, n in zip(piles, counts, strict=True)]
        )
        return make_client(recipe, x, y, part, turn, f"{stream.path[-1]}-{number}")

    return LazyClients(clients, make, labeled, recipe.points, recipe.listing())
