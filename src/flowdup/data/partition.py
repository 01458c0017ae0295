"""Simulated clients from one pool of labeled images: the paper's recipes.

Every draw comes from a named stream, so a seed gives the same clients everywhere.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowdup.data.class_shares import draw_class_counts
from flowdup.data.clients import ClientData
from flowdup.data.strata import Indices, choose_classes, stratify
from flowdup.data.traits import Trait
from flowdup.errors import ConfigError
from flowdup.memory import check_memory
from flowdup.random import Stream, distinct


@dataclass(frozen=True)
class Recipe:
    """How simulated clients are made: how many points, of which classes, turned how."""

    points: int  # per client
    classes_per_client: int = 0  # 0: all
    rotations: tuple[int, ...] = ()  # degrees, one of them drawn per client; empty: none
    overlap: bool = False  # whether two clients may share a point
    dirichlet: float = 0.0  # concentration of a client's label shares; 0: equal, or the pool's

    def listing(self) -> dict[str, Any]:
        """For people to read, and to tell one recipe from another; what came later is named only
        where it is set, so that runs from before go on.
        """
        return {n: v for n, v in asdict(self).items() if n != "dirichlet" or v}


def make_clients(
    recipe: Recipe,
    x: Tensor,
    y: Tensor,
    pool: Tensor,
    clients: int,
    stream: Stream,
    stratified: bool = False,
) -> list[ClientData]:
    """Clients by a recipe from images x [n, channels, height, width] and labels y [n].

    `pool` has the numbers of the images that they may be made of.  Where `stratified`, every set of
    classes and every rotation occurs equally often, up to one.
    """
    if not clients:
        return []
    _check_count(recipe, clients, x, len(pool))
    check_rotations(recipe.rotations, x.shape[-2:])
    labels, rotations = y[pool].numpy(), recipe.rotations or (0,)
    classes, per_client = np.unique(labels), recipe.classes_per_client
    check_classes(recipe, classes.size)
    if stratified:
        strata = stream.child("strata")
        chosen, turns = stratify(clients, per_client, classes.size, len(rotations), strata)
    else:
        chosen = choose_classes(clients, per_client, classes.size, stream.child("classes"))
        turns = stream.child("rotation").integers(clients, len(rotations))
    if recipe.dirichlet:
        dealt = _by_shares(recipe, labels, chosen, stream)
    elif per_client:
        dealt = _by_class(recipe, labels, chosen, stream)
    else:
        every = np.arange(len(pool))
        dealt = _deal(every, clients, recipe.points, recipe.overlap, stream.child("points"))
    return [
        make_client(recipe, x, y, pool[places], rotations[turn], f"{stream.path[-1]}-{number}")
        for number, (places, turn) in enumerate(zip(dealt, turns, strict=True))
    ]


def make_client(
    recipe: Recipe, x: Tensor, y: Tensor, part: Tensor, turn: int, name: str
) -> ClientData:
    """The client of the images with these numbers, turned by so many degrees."""
    traits: dict[str, Trait] = {}
    labels = y[part]
    if recipe.rotations:
        traits["rotation"] = turn
    if recipe.classes_per_client:
        traits["classes"] = "+".join(map(str, sorted(set(labels.tolist()))))
    if recipe.dirichlet:
        traits["main_class"] = int(labels.bincount().argmax())
    images = torch.rot90(x.index_select(0, part), turn // 90, (-2, -1)).contiguous()
    return ClientData(images, labels, name, traits, tuple(part.tolist()))


def _deal(pool: Indices, hands: int, size: int, overlap: bool, stream: Stream) -> list[Indices]:
    """`hands` sets of `size` members of the pool, disjoint unless they may overlap."""
    check_size(size, pool.size)
    if not overlap and hands * size > pool.size:
        raise _too_many(hands, size, pool.size)
    if overlap:
        draws = (stream.substreams(hand, 1, pool.size)[0] for hand in range(hands))  # one in memory
        return [pool[np.argsort(words, kind="stable")[:size]] for words in draws]
    return list(pool[stream.permutation(pool.size)[: hands * size]].reshape(hands, size))


def _by_class(recipe: Recipe, y: Indices, chosen: Indices, stream: Stream) -> list[Indices]:
    """Each client has the same number of points of each of its classes."""
    size = recipe.points // recipe.classes_per_client
    shards = {}
    for index, label in enumerate(np.unique(y)):
        hands = int((chosen == index).sum())
        pool = np.flatnonzero(y == label)
        dealt = _deal(pool, hands, size, recipe.overlap, stream.child("points", int(label)))
        shards[index] = iter(dealt)
    return [np.concatenate([next(shards[index]) for index in row]) for row in chosen.tolist()]


def _by_shares(recipe: Recipe, y: Indices, chosen: Indices, stream: Stream) -> list[Indices]:
    """Each client has Dirichlet shares of its classes, of all if it has none of its own.

    Disjoint clients are dealt one after the other: beware that the last ones take of their classes
    what the others left, and points of other classes where that is not enough.
    """
    check_size(recipe.points, y.size)
    piles = []
    for label in np.unique(y):
        pile, draw = np.flatnonzero(y == label), stream.child("points", int(label))
        piles.append(pile if recipe.overlap else pile[draw.permutation(pile.size)])
    left, every, hands = [pile.size for pile in piles], range(len(piles)), []
    for number, row in enumerate(chosen.tolist()):
        words = stream.child("shares").substreams(number, 1, 2 * recipe.points)[0].tolist()
        counts = draw_class_counts(words[: recipe.points], row or every, left, recipe.dirichlet)
        places = iter(words[recipe.points :])
        if recipe.overlap:
            own = [
                pile[distinct(places, n, pile.size)] for pile, n in zip(piles, counts, strict=True)
            ]
        else:
            own = [pile[m - n : m] for pile, m, n in zip(piles, left, counts, strict=True)]
            left = [m - n for m, n in zip(left, counts, strict=True)]
        hands.append(np.concatenate(own))
    return hands


def _check_count(recipe: Recipe, clients: int, x: Tensor, at_hand: int) -> None:
    """Refuse more clients than the images make or than memory holds, before any is made."""
    if not recipe.overlap and clients * recipe.points > at_hand:
        raise _too_many(clients, recipe.points, at_hand)
    size = clients * (recipe.points * (x[:1].numel() + 8) + 500)  # pixels, labels, and the rest
    remedy = "lower their number or data.points, or set data.lazy to true"
    check_memory(size, f"making {clients:,} clients", remedy)


def _too_many(clients: int, points: int, at_hand: int) -> ConfigError:
    return ConfigError(
        f"{clients} clients with {points} points each need more than the {at_hand} at hand: "
        "lower the number of clients or data.points, or set data.overlap to true"
    )


def check_size(size: int, at_hand: int) -> None:
    """Refuse clients that need more points than there are."""
    if size > at_hand:
        raise ConfigError(
            f"a client needs {size} points and only {at_hand} are at hand: lower data.points, or "
            "(without data.lazy) give this group a larger share of the images by more clients"
        )


def check_classes(recipe: Recipe, classes: int) -> None:
    """Refuse more classes per client than there are, or that do not divide its points."""
    per_client = recipe.classes_per_client
    uneven = per_client and not recipe.dirichlet and recipe.points % per_client
    if per_client > classes or uneven:
        raise ConfigError(
            f"data.classes_per_client = {per_client} must be at most {classes} and, without "
            f"data.dirichlet, divide data.points = {recipe.points}"
        )


def check_rotations(rotations: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Refuse rotations that would not leave images [height, width] as they are in size."""
    if any(turn % 90 for turn in rotations):
        raise ConfigError(f"data.rotations must be multiples of 90 degrees, not {list(rotations)}")
    if size[0] != size[1] and any(turn % 180 for turn in rotations):
        raise ConfigError(f"images of {size[0]}x{size[1]} can be rotated by 180 degrees only")
