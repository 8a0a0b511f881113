"""Nested containers are walked and changed without changing the argument."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt._base.tree import (
    at,
    copied,
    dotted,
    is_plain_container,
    leaves,
    map_leaves,
    on_the_way,
    replaced,
)


class Pair(NamedTuple):
    first: Any
    second: Any


TREE = {"a": [1, (2, {"b": 3})], 4: Pair(5, []), "c": {}}
TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
)


def test_leaves_have_their_positions():
    assert list(leaves(TREE)) == [
        (("a", 0), 1),
        (("a", 1, 0), 2),
        (("a", 1, 1, "b"), 3),
        ((4, 0), 5),
    ]
    assert list(leaves(7)) == [((), 7)]
    assert dotted(("a", 1, "b")) == "a.1.b"


def test_what_is_not_a_container_is_a_leaf():
    assert list(leaves(TREE, lambda node: isinstance(node, dict))) == [
        (("a",), TREE["a"]),
        ((4,), Pair(5, [])),
    ]
    assert list(leaves([OrderedDict(a=1)], is_plain_container)) == [((0,), OrderedDict(a=1))]


@pytest.mark.parametrize("position", [("x",), ("a", 2), ("a", -1), ("a", "b"), ("a", 0, 0), (4, 2)])
def test_nothing_is_at_other_positions(position):
    assert at(TREE, position, "nothing") == "nothing"
    assert at(TREE, position) is None


def test_nodes_on_the_way_end_where_there_is_nothing_more():
    assert list(on_the_way(TREE, ("a", 0, "x"))) == [TREE, TREE["a"], 1]


@given(TREES)
def test_each_leaf_is_found_and_replaced_at_its_position(tree):
    before = copy.deepcopy(tree)
    for position, leaf in leaves(tree):
        assert at(tree, position) is leaf
        changed = replaced(tree, position, "new")
        assert [(place, value) for place, value in leaves(changed) if value != "new"] == [
            (place, value) for place, value in leaves(tree) if place != position
        ]
        assert at(changed, position) == "new"
    assert tree == before


@given(TREES)
def test_mapped_trees_have_the_same_containers(tree):
    def negated(position, leaf):
        assert at(tree, position) is leaf
        return -leaf

    mapped = map_leaves(negated, tree)
    assert [type(node) for node in walk(mapped)] == [type(node) for node in walk(tree)]
    assert list(leaves(map_leaves(lambda _, leaf: -leaf, mapped))) == list(leaves(tree))


def walk(node):
    yield node
    if isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            yield from walk(child)


def test_instances_of_subclasses_are_kept_if_nothing_in_them_changes():
    ordered, size = OrderedDict(a=1), torch.Size([2, 3])
    tree = {"ordered": ordered, "size": size, "list": [1]}
    mapped = map_leaves(lambda _, leaf: leaf, tree)
    assert mapped == tree
    assert mapped["ordered"] is ordered
    assert mapped["size"] is size
    assert mapped["list"] is not tree["list"]
    changed = map_leaves(lambda _, leaf: leaf + 1, tree)
    assert type(changed["ordered"]) is dict
    assert type(changed["size"]) is tuple


@given(TREES)
def test_a_copy_shares_only_leaves_and_tuples(tree):
    twin = copied(tree)
    assert twin == tree
    mutable = {id(node) for node in walk(tree) if isinstance(node, dict | list)}
    assert not any(id(node) in mutable for node in walk(twin))
