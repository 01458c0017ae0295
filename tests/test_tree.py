"""Trees come apart and together again, whatever they are made of."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.immutable_collections import immutable_list

from flowdup import tree


class Pair(NamedTuple):
    first: Any
    second: Any


TREES = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(inner).map(tuple)
        | st.builds(Pair, inner, inner)
    ),
)


@given(TREES)
def test_a_tree_taken_apart_and_put_together_is_the_same(original: Any) -> None:
    leaves, structure = tree.flatten(original)
    assert all(isinstance(leaf, int) for leaf in leaves)
    again = tree.unflatten(leaves, structure)
    assert again == original
    assert repr(again) == repr(original)  # a tuple equals a NamedTuple, and dicts in any order
    assert tree.flatten(again)[1] == structure


@given(TREES)
def test_map_changes_leaves_only(original: Any) -> None:
    doubled = tree.map(lambda a, b: a + b, original, original)
    assert tree.flatten(doubled)[1] == tree.flatten(original)[1]
    assert tree.leaves(doubled) == [2 * leaf for leaf in tree.leaves(original)]


def test_trees_side_by_side_meet_by_key() -> None:
    found = tree.map(lambda a, b: a - b, {"x": 3, "y": [5]}, {"y": [1], "x": 2})
    assert found == {"x": 1, "y": [4]}


@pytest.mark.parametrize(
    "other", [{"x": 1}, {"x": 1, "z": 2}, [1, 2], {"x": 1, "y": [2, 3]}, {"x": 1, "y": 2}]
)
def test_trees_that_differ_are_refused(other: Any) -> None:
    with pytest.raises(ValueError, match="trees differ"):
        tree.map(lambda a, b: a, {"x": 1, "y": [2]}, other)


def test_the_order_of_keys_belongs_to_the_structure() -> None:
    assert tree.flatten({"a": 1, "b": 2})[1] != tree.flatten({"b": 2, "a": 1})[1]


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_or_too_many_leaves_are_refused(count: int) -> None:
    _, structure = tree.flatten([1, 2])
    with pytest.raises(ValueError, match="leaves than the structure has"):
        tree.unflatten(range(count), structure)


def test_a_size_is_a_leaf_and_a_subclass_of_list_a_list() -> None:
    size = torch.Size([2, 3])
    assert tree.leaves([size, immutable_list([4, 5])]) == [size, 4, 5]
