"""Nested dicts, lists, tuples and NamedTuples of tensors: flatten, unflatten, map.

None is an empty tree.  Everything else is a leaf, a `torch.Size` included.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Structure:
    """What a tree is apart from its leaves.  Equal structures have equal keys in equal order."""

    kind: type | None  # the container's; None: a leaf
    keys: tuple[Hashable, ...] = ()  # of a dict
    children: "tuple[Structure, ...]" = ()


_LEAF = Structure(None)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves from left to right, a dict's in the order of its keys, and the rest."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """The tree that `flatten` took apart, with these leaves."""
    remaining = iter(leaves)
    tree = _unflatten(remaining, structure)
    if next(remaining, _LEAF) is not _LEAF:
        raise ValueError("there are more leaves than the structure has")
    return tree


def leaves(tree: Any) -> list[Any]:
    """All leaves of a tree, in order."""
    return flatten(tree)[0]


def map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The same tree with function(leaf, leaf of every other tree) for each leaf.

    The others must have the same structure; their dicts may have another order.
    """
    kind, keys, parts = _split(tree)
    if kind is None:
        return function(tree, *others)
    other_parts = []
    for other in others:
        other_kind, other_keys, found = _split(other)
        if kind is not other_kind or len(parts) != len(found) or set(keys) != set(other_keys):
            raise ValueError(
                f"trees differ: {_name(kind, keys)} and {_name(other_kind, other_keys)}"
            )
        other_parts.append([other[key] for key in keys] if keys else found)
    children = [map(function, *column) for column in zip(parts, *other_parts, strict=True)]
    return _join(kind, keys, children)


def _split(tree: Any) -> tuple[type | None, tuple[Hashable, ...], list[Any]]:
    """Kind, keys and children of a container; subclasses of list and dict become plain."""
    if tree is None:
        return type(None), (), []
    if isinstance(tree, dict):
        return dict, tuple(tree), list(tree.values())
    if isinstance(tree, list):
        return list, (), tree
    if type(tree) is tuple or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return type(tree), (), list(tree)
    return None, (), []


def _join(kind: type, keys: tuple[Hashable, ...], children: list[Any]) -> Any:
    if kind is type(None):
        return None
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    return kind(children) if kind in (list, tuple) else kind(*children)


def _flatten(tree: Any, found: list[Any]) -> Structure:
    kind, keys, parts = _split(tree)
    if kind is None:
        found.append(tree)
        return _LEAF
    return Structure(kind, keys, tuple([_flatten(part, found) for part in parts]))


def _unflatten(remaining: Iterator[Any], structure: Structure) -> Any:
    if structure.kind is None:
        try:
            return next(remaining)
        except StopIteration:
            raise ValueError("there are fewer leaves than the structure has") from None
    children = [_unflatten(remaining, child) for child in structure.children]
    return _join(structure.kind, structure.keys, children)


def _name(kind: type | None, keys: tuple[Hashable, ...]) -> str:
    return f"{kind.__name__ if kind else 'leaf'} {list(keys) if keys else ''}".strip()
