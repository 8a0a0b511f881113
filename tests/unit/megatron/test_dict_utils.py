from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt.mapping import ShardedObject
from distckpt.megatron import dict_utils
from tests.support.reference import megatron_or_skip

NESTED = st.recursive(
    st.integers(0, 5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)
CONTAINERS = NESTED.filter(lambda x: isinstance(x, (dict, list)))


def is_even(leaf):
    return isinstance(leaf, int) and leaf % 2 == 0


def leaves_with_positions(x, position=()):
    """Walk dicts and lists; the independent view of what the functions under test see as leaves."""
    if isinstance(x, dict):
        return [found for k, v in x.items() for found in leaves_with_positions(v, (*position, k))]
    if isinstance(x, list):
        return [
            found for i, v in enumerate(x) for found in leaves_with_positions(v, (*position, i))
        ]
    return [(position, x)]


def test_extract_keeps_the_nesting_and_compacts_lists():
    x = {"a": [1, 2, [3, 4]], "b": {"c": 5}, "d": 6}
    even, odd = dict_utils.extract_matching_values(x, is_even)
    assert even == {"a": [2, [4]], "d": 6}
    assert odd == {"a": [1, [3]], "b": {"c": 5}}
    assert x == {"a": [1, 2, [3, 4]], "b": {"c": 5}, "d": 6}


def test_extract_can_keep_list_indices():
    even, odd = dict_utils.extract_matching_values(
        [1, 2, [3, 4]], is_even, return_lists_as_dicts=True
    )
    assert even == {1: 2, 2: {1: 4}}
    assert odd == {0: 1, 2: {0: 3}}


def test_extract_treats_empty_containers_by_where_they_are():
    seen = []
    match, other = dict_utils.extract_matching_values(
        {"d": {}, "l": [], "in": [{}, []]}, lambda v: seen.append(v)
    )
    assert (match, other) == ({}, {"d": {}, "l": [], "in": [{}, []]})
    assert seen == [{}, []]


def test_extract_needs_a_container():
    with pytest.raises(ValueError, match="tuple"):
        dict_utils.extract_matching_values((1, 2), is_even)


@given(CONTAINERS)
def test_extract_loses_no_leaf(x):
    match, other = dict_utils.extract_matching_values(x, is_even, return_lists_as_dicts=True)
    matching = [(p, v) for p, v in leaves_with_positions(x) if is_even(v)]
    assert sorted(leaves_with_positions(match), key=repr) == sorted(matching, key=repr)
    rest = [(p, v) for p, v in leaves_with_positions(x) if not is_even(v)]
    # Besides leaves, the second half has those containers that were empty from the start.
    others = [(p, v) for p, v in leaves_with_positions(other) if v not in ({}, [])]
    assert sorted(others, key=repr) == sorted(rest, key=repr)


def test_diff_finds_nothing_between_equal_values():
    def make():
        return {"t": torch.arange(6.0), "l": [1, (2, 3)], "n": np.arange(4), "s": "x", "none": None}

    assert dict_utils.diff(make(), make()) == ([], [], [])


def test_diff_gives_positions():
    left = {"a": 1, "b": {"c": [1, 2], "only": 0}, "t": (1, 2)}
    right = {"a": 1.5, "b": {"c": [1, 3]}, "t": (1, 2), "new": 0}
    assert dict_utils.diff(left, right) == (
        [("b", "only")],
        [("new",)],
        [(("a",), int, float), (("b", "c", 1), int, int)],
    )


def test_diff_gives_whole_positions_of_surplus_list_items():
    assert dict_utils.diff({"a": [1, 2, 3, 4]}, {"a": [1, 2]}) == ([("a", 3), ("a", 2)], [], [])
    assert dict_utils.diff({"a": (1,)}, {"a": (1, 2)}) == ([], [("a", 1)], [])


def test_diff_of_tensors_says_how_much_and_where():
    left = torch.zeros(2, 3)
    right = left.clone()
    right[1, 2] = 1
    _, _, [(position, *kinds, count, shape, where)] = dict_utils.diff({"w": left}, {"w": right})
    assert (position, kinds, int(count), shape, where) == (
        ("w",),
        [torch.Tensor] * 2,
        1,
        (2, 3),
        [[1, 2]],
    )


def test_diff_never_takes_tensors_of_different_shapes_for_equal():
    assert dict_utils.diff(torch.zeros(1), torch.zeros(3))[2] == [
        ((), torch.Tensor, torch.Tensor, (1,), (3,))
    ]


def test_diff_compares_arrays_element_by_element():
    left, right = np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]])
    assert dict_utils.diff(left, right, ("n",)) == ([], [], [(("n", 1, 1), np.int64, np.int64)])
    assert dict_utils.diff(np.array(1), np.array(2))[2] == [((), np.ndarray, np.ndarray)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1], (1,)),
        ([1], 1),
        (1, [1]),
        (np.arange(3), 1),
        (1, np.arange(3)),
        ({"a": 1}, [1]),
        (float("nan"), float("nan")),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
    ],
    ids=repr,
)
def test_diff_reports_what_it_cannot_take_for_equal(left, right):
    only_left, only_right, [mismatch] = dict_utils.diff({"k": left}, {"k": right})
    assert (only_left, only_right) == ([], [])
    assert mismatch[:3] == (("k",), type(left), type(right))


def test_diff_compares_only_the_data_of_sharded_values():
    def make(key, data):
        return {"k": ShardedObject(key, data, (1,), (0,))}

    assert dict_utils.diff(make("a", [1]), make("b", [1])) == ([], [], [])
    assert dict_utils.diff(make("a", [1]), make("a", [2]))[2] == [
        (("k", ShardedObject, 0), int, int)
    ]


def test_inspect_types_prints_every_leaf(capsys):
    dict_utils.inspect_types({"a": [1, torch.zeros(2, 3)], "b": {"c": "x" * 100}})
    lines = capsys.readouterr().out.split("\n")
    assert "    - 0: [<class 'int'>]: 1" in lines
    assert "    - 1: Tensor of shape torch.Size([2, 3])" in lines
    assert f"    > c: [<class 'str'>]: {'x' * 30}... (truncated)" in lines


@given(CONTAINERS)
def test_iterators_give_every_leaf_in_order(x):
    leaves = [v for _, v in leaves_with_positions(x)]
    assert list(dict_utils.nested_values(x)) == leaves
    items = list(dict_utils.nested_items_iter(x))
    assert [v for _, _, v in items] == leaves
    assert all(container[key] is value for container, key, value in items)


@given(CONTAINERS)
def test_maps_replace_every_leaf_and_nothing_else(x):
    expected = [(p, repr(v)) for p, v in leaves_with_positions(x)]
    before = repr(x)
    new = dict_utils.dict_list_map_outplace(repr, x)
    assert leaves_with_positions(new) == expected
    assert repr(x) == before
    assert dict_utils.dict_list_map_inplace(repr, x) is x
    assert leaves_with_positions(x) == expected


def test_maps_take_a_single_leaf_and_do_not_walk_what_they_made():
    assert dict_utils.dict_list_map_inplace(lambda v: [v], 1) == [1]
    assert dict_utils.dict_list_map_inplace(lambda v: [v], [1]) == [[1]]
    assert dict_utils.dict_list_map_outplace(lambda v: [v], (1,)) == [(1,)]


def test_inplace_map_keeps_container_classes():
    x = collections.OrderedDict(a=collections.OrderedDict(b=1))
    dict_utils.dict_list_map_inplace(lambda v: v + 1, x)
    assert x == collections.OrderedDict(a=collections.OrderedDict(b=2))
    assert isinstance(x["a"], collections.OrderedDict)


def test_dict_map_with_and_without_key():
    d = {"a": 1, "b": [2, {"c": 3}]}
    dict_utils.dict_map(lambda v: v * 10, d)
    assert d == {"a": 10, "b": [20, {"c": 30}]}
    dict_utils.dict_map_with_key(lambda k, v: (k, v), d)
    assert d == {"a": ("a", 10), "b": [(0, 20), {"c": ("c", 30)}]}


def test_merge_unites_in_place():
    left = {"a": {"b": 1}, "l": [{"x": 1}, {}]}
    merged = dict_utils.merge(left, {"a": {"c": 2}, "d": 3, "l": [{"y": 2}, {"z": 3}]})
    assert merged is left
    assert left == {"a": {"b": 1, "c": 2}, "d": 3, "l": [{"x": 1, "y": 2}, {"z": 3}]}


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, "('a', 'b')"),
        ({"a": [{}, None]}, {"a": [{}, None]}, "('a', 1)"),
        ({"a": [1]}, {"a": [1, 2]}, "('a',)"),
        ({"a": {}}, {"a": []}, "('a',)"),
    ],
)
def test_merge_names_the_position_where_it_fails(left, right, position):
    with pytest.raises(ValueError, match="position") as caught:
        dict_utils.merge(left, right)
    assert position in str(caught.value)


def test_map_reduce_groups_in_order_of_appearance():
    grouped = dict_utils.map_reduce(
        ["bb", "a", "cc", "d"], key_fn=len, value_fn=str.upper, reduce_fn="".join
    )
    assert grouped == {2: "BBCC", 1: "AD"}
    assert list(grouped) == [2, 1]
    assert dict_utils.map_reduce([1, 1]) == {1: [1, 1]}


@pytest.fixture(scope="module")
def megatron():
    return megatron_or_skip("dist_checkpointing.dict_utils")


@given(x=CONTAINERS, lists_as_dicts=st.booleans())
def test_extract_agrees_with_megatron(megatron, x, lists_as_dicts):
    ours = dict_utils.extract_matching_values(x, is_even, lists_as_dicts)
    assert ours == megatron.extract_matching_values(x, is_even, lists_as_dicts)


@given(x=NESTED, y=NESTED)
def test_diff_agrees_with_megatron_where_it_works(megatron, x, y):
    try:
        only_left, only_right, mismatch = megatron.diff(x, y)
    except AssertionError:  # it insists that two sequences are of one type
        return
    ours = dict_utils.diff(x, y)
    assert sorted(map(repr, ours[2])) == sorted(map(repr, mismatch))
    # It gives surplus list items as bare indices.
    for mine, theirs in ((ours[0], only_left), (ours[1], only_right)):
        bare = [p if p in theirs else p[-1] for p in mine]
        assert sorted(map(repr, bare)) == sorted(map(repr, theirs))


@given(x=CONTAINERS, y=CONTAINERS)
def test_merge_agrees_with_megatron(megatron, x, y):
    def outcome(merge):
        try:
            return merge(dict_utils.dict_list_map_outplace(lambda v: v, x), y)
        except ValueError:
            return ValueError

    assert outcome(dict_utils.merge) == outcome(megatron.merge)
