"""Simulated clients from one pool of labeled images: the paper's recipes.

Every draw comes from a named stream, so a seed gives the same clients everywhere.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.clients import ClientData, Trait
from flowdup.errors import ConfigError
from flowdup.memory import check_memory
from flowdup.random import Stream

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    points: int  # per client
    classes_per_client: int = 0  # 0: all
    rotations: tuple[int, ...] = ()  # degrees, one of them drawn per client; empty: none
    overlap: bool = False  # whether two clients may share a point


def make_clients(
    recipe: Recipe, x: Tensor, y: Tensor, pool: Tensor, clients: int, stream: Stream
) -> list[ClientData]:
    """Clients by a recipe from images x [n, channels, height, width] and labels y [n].

    `pool` has the numbers of the images that they may be made of.
    """
    if not clients:
        return []
    _check_count(recipe, clients, x, len(pool))
    if recipe.classes_per_client:
        dealt = _by_class(recipe, y[pool].numpy(), clients, stream)
    else:
        every = np.arange(len(pool))
        dealt = _deal(every, clients, recipe.points, recipe.overlap, stream.child("points"))
    turns = _turns(clients, recipe.rotations, x.shape[-2:], stream)
    return [
        make_client(recipe, x, y, pool[places], turn, f"{stream.path[-1]}-{number}")
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


def _by_class(recipe: Recipe, y: Indices, clients: int, stream: Stream) -> list[Indices]:
    """Each client has some classes, with the same number of points of each."""
    classes, per_client = np.unique(y), recipe.classes_per_client
    check_classes(recipe, classes.size)
    size = recipe.points // per_client
    chosen = _choose_classes(clients, per_client, classes.size, stream.child("classes"))
    shards = {}
    for index, label in enumerate(classes):
        hands = int((chosen == index).sum())
        pool = np.flatnonzero(y == label)
        dealt = _deal(pool, hands, size, recipe.overlap, stream.child("points", int(label)))
        shards[index] = iter(dealt)
    return [np.concatenate([next(shards[index]) for index in row]) for row in chosen.tolist()]


def _choose_classes(clients: int, per_client: int, classes: int, stream: Stream) -> Indices:
    """Distinct classes for every client, each class used equally often.  # [clients, per_client]

    A client takes the classes used least so far, ties broken at random.
    """
    used = np.zeros(classes, np.int64)
    rows = []
    for noise in stream.substreams(0, clients, classes):
        row = np.lexsort((noise, used))[:per_client]
        used[row] += 1
        rows.append(row)
    return np.array(rows, np.int64).reshape(clients, per_client)


def _turns(
    clients: int, rotations: tuple[int, ...], size: tuple[int, ...], stream: Stream
) -> list[int]:
    if not rotations:
        return [0] * clients
    check_rotations(rotations, size)
    return [rotations[i] for i in stream.child("rotation").integers(clients, len(rotations))]


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
    if size > at_hand:
        raise ConfigError(
            f"a client needs {size} points and only {at_hand} are at hand: lower data.points, or "
            "(without data.lazy) give this group a larger share of the images by more clients"
        )


def check_classes(recipe: Recipe, classes: int) -> None:
    if recipe.classes_per_client > classes or recipe.points % recipe.classes_per_client:
        raise ConfigError(
            f"data.classes_per_client = {recipe.classes_per_client} must be at most {classes} and "
            f"divide data.points = {recipe.points}"
        )


def check_rotations(rotations: tuple[int, ...], size: tuple[int, ...]) -> None:
    if any(turn % 90 for turn in rotations):
        raise ConfigError(f"data.rotations must be multiples of 90 degrees, not {list(rotations)}")
    if size[0] != size[1] and any(turn % 180 for turn in rotations):
        raise ConfigError(f"images of {size[0]}x{size[1]} can be rotated by 180 degrees only")
