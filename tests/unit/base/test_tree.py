"""Nested containers are walked and changed without changing the argument."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt._base.tree import (
    HOLE,
    at,
    compacted,
    copied,
    dotted,
    filled,
    is_container,
    is_dict,
    is_plain_container,
    leaves,
    map_leaves,
    map_nodes,
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
    assert leaves(TREE) == [
        (("a", 0), 1),
        (("a", 1, 0), 2),
        (("a", 1, 1, "b"), 3),
        ((4, 0), 5),
    ]
    assert leaves(7) == [((), 7)]
    assert dotted(("a", 1, "b")) == "a.1.b"


def test_what_is_not_a_container_is_a_leaf():
    assert leaves(TREE, lambda node: isinstance(node, dict)) == [
        (("a",), TREE["a"]),
        ((4,), Pair(5, [])),
    ]
    assert leaves([OrderedDict(a=1)], is_plain_container) == [((0,), OrderedDict(a=1))]


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
    assert leaves(map_leaves(lambda _, leaf: -leaf, mapped)) == leaves(tree)


def test_containers_of_opaque_classes_are_leaves():
    ordered = OrderedDict(a=1)
    tree = {"list": [1, ordered], "pair": Pair(2, [])}
    is_inner = partial(is_container, opaque=(OrderedDict, Pair))
    items = leaves(tree, is_inner)
    assert items == [(("list", 0), 1), (("list", 1), ordered), (("pair",), Pair(2, []))]
    values = iter([3, {"b": [4]}, 5])
    changed = map_leaves(lambda *_: next(values), tree, is_inner)
    assert changed == {"list": [3, {"b": [4]}], "pair": 5}
    assert leaves(ordered, is_inner) == [((), ordered)]
    assert map_leaves(lambda *_: 6, ordered, is_inner) == 6


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


@given(TREES)
def test_a_map_joins_every_leaf_and_every_container(tree):
    num_nodes = map_leaves(lambda *_: 1, tree, join=lambda _, children: 1 + sum(children))
    assert num_nodes == len(list(walk(tree)))


def test_holes_are_dropped_with_what_holds_nothing_else():
    tree = {"a": [HOLE, 1, (HOLE, 2)], "b": {"c": [HOLE, {"d": HOLE}]}, "e": {}, "f": [[]]}
    assert compacted(tree) == {"a": [1, (2,)], "e": {}, "f": [[]]}
    assert compacted({"a": [HOLE]}) is HOLE
    assert compacted(HOLE) is HOLE
    assert copy.deepcopy(HOLE) is pickle.loads(pickle.dumps(HOLE)) is HOLE


def test_a_node_is_replaced_before_what_is_in_it():
    def halved(position, node):
        return {key: value for key, value in node.items() if key != "b"} if is_dict(node) else node

    tree = {"a": {"b": {"a": 1}, "c": {"b": 2}}, "d": [{"b": 3}]}
    assert map_nodes(halved, tree, is_dict) == {"a": {"c": {}}, "d": [{"b": 3}]}
    assert map_nodes(halved, tree) == {"a": {"c": {}}, "d": [{}]}
    assert map_nodes(lambda position, node: repr(position) if position else node, [[5]]) == ["(0,)"]


def either(leaf, value):
    return value if leaf is HOLE else leaf


def test_a_tree_is_filled_at_every_position_of_two():
    assert filled(either, {"a": [1, HOLE], "b": HOLE}, {"a": [2, 3, 4], "c": 5}) == {
        "a": [1, 3, 4],
        "c": 5,
    }
    assert filled(either, {"a": Pair(HOLE, 1)}, {"a": (2, 3, 4)}) == {"a": Pair(2, 1)}
    assert filled(either, {"a": [HOLE], "b": [HOLE]}, {"a": [], "b": 6}) == {"a": [], "b": 6}
    assert filled(either, {"a": {"b": HOLE}}, {"a": 1}) == {"a": 1}
    assert filled(either, {"a": {"b": 2}}, {"a": 1}) == {"a": {"b": 2}}


@given(TREES)
def test_nothing_else_fills_a_tree_without_holes(tree):
    assert filled(either, tree, HOLE) == tree
    assert filled(either, HOLE, tree) == tree
