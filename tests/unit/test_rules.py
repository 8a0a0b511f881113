from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import distckpt
from distckpt.megatron.core import InvalidShardingError, LoadMismatchError
from distckpt.readers import Region
from distckpt.rules import (
    Add,
    Assemble,
    Concat,
    Copy,
    Drop,
    Interleave,
    RegionCopy,
    Rename,
    Split,
    SplitQKV,
    Stack,
    TensorSpec,
    Transpose,
    Trim,
    Unstack,
    apply_rules,
    invert,
    resolve,
    resolve_padding,
    target_view,
)
from distckpt.rules._mapped import permute, reshape
from tests.support.mapped_arrays import (
    assert_same,
    infos,
    materialize,
    materialize_all,
    numbered_arrays,
)


def converted(rules, arrays, **options):
    return materialize_all(apply_rules(rules, infos(arrays), **options), arrays)


def assert_round_trip(rules, arrays, **options):
    mapped = apply_rules(rules, infos(arrays), **options)
    assert_same(
        materialize_all(invert(mapped, infos(arrays)), materialize_all(mapped, arrays)), arrays
    )


# Each rule against the numpy expression it stands for.

A = numbered_arrays(a=(4, 6, 3))["a"]
EACH_RULE = [
    pytest.param(Rename("a", "b"), {"b": A}, id="rename"),
    pytest.param(Rename("a", "a"), {"a": A}, id="rename-to-itself"),
    pytest.param(Unstack("a", "b.{i}.c"), {f"b.{i}.c": A[i] for i in range(4)}, id="unstack"),
    pytest.param(
        Unstack("a", "b{i}", axis=-1, size=3),
        {f"b{i}": A[:, :, i] for i in range(3)},
        id="unstack-last",
    ),
    pytest.param(Split("a", ("x", "y")), {"x": A[:2], "y": A[2:]}, id="split"),
    pytest.param(
        Split("a", ("x", "y", "z"), axis=1, sizes=(1, 0, 5)),
        {"x": A[:, :1], "y": A[:, :0], "z": A[:, 1:]},
        id="sizes",
    ),
    pytest.param(Transpose("a", "b", (2, 0, 1)), {"b": A.transpose(2, 0, 1)}, id="transpose"),
    pytest.param(
        SplitQKV("a", ("q", "k", "v"), 2, 1, 1),
        {"q": A[:2], "k": A[2:3], "v": A[3:]},
        id="qkv-one-group",
    ),
    pytest.param(Drop("a"), {}, id="drop"),
    pytest.param(Trim("a", axis=1, size=4), {"a": A[:, :4]}, id="trim"),
]


@pytest.mark.parametrize(("rule", "expected"), EACH_RULE)
def test_a_rule_does_what_numpy_does(rule, expected):
    assert_same(converted([rule], {"a": A}), expected)


@pytest.mark.parametrize(
    "shape", [(4 * (3 + 2) * 2, 7), (4 * (3 + 2) * 2,)], ids=["weight", "bias"]
)
def test_fused_heads_are_taken_apart_by_group(shape):
    arrays = numbered_arrays(qkv=shape)
    rule = SplitQKV("qkv", ("q", "k", "v"), num_heads=12, num_kv_heads=4, head_dim=2)
    grouped = arrays["qkv"].reshape(4, 3 + 2, 2, *shape[1:])
    expected = {
        "q": grouped[:, :3].reshape(24, *shape[1:]),
        "k": grouped[:, 3].reshape(8, *shape[1:]),
        "v": grouped[:, 4].reshape(8, *shape[1:]),
    }
    assert_same(converted([rule], arrays), expected)
    assert_round_trip([rule], arrays)


def test_concat_joins_what_its_wildcards_agree_on():
    arrays = numbered_arrays(l__0__gate=(2, 3), l__1__gate=(4, 3), l__1__up=(1, 3), l__0__up=(5, 3))
    rule = Concat(("l.*.gate", "l.*.up"), "layers.{0}.fused")
    expected = {
        f"layers.{n}.fused": np.concatenate([arrays[f"l.{n}.gate"], arrays[f"l.{n}.up"]])
        for n in (0, 1)
    }
    assert_same(converted([rule], arrays), expected)
    assert_round_trip([rule], arrays)


def test_wildcards_stand_for_components_and_keep_their_order_in_new_names():
    arrays = numbered_arrays(a__x__b__y__w=(1,), a__x__w=(2,), a__xx__b__y__w2=(3,), ab__w=(4,))
    names = {
        "a.*.b.*.w": {"y/x": "a.x.b.y.w"},
        "a.*.w": {"x": "a.x.w"},
        "a.**.w": {"x": "a.x.w", "x.b.y": "a.x.b.y.w"},
        "**": {key: key for key in arrays},
        "a*.w": {"b": "ab.w"},
    }
    for pattern, expected in names.items():
        to = "new {1}/{0}" if pattern == "a.*.b.*.w" else "new {0}"
        found = apply_rules([Rename(pattern, to)], infos(arrays))
        assert {n: t.parts[0].key for n, t in found.items() if n.startswith("new ")} == {
            f"new {name}": key for name, key in expected.items()
        }


def captured(pattern, key):
    """Return a name made of what the wildcards match, the key where the pattern does not match."""
    name = "|".join(
        ["new", *(f"{{{number}}}" for number in range(len(re.findall(r"\*\*?", pattern))))]
    )
    (found,) = apply_rules(
        [Rename(pattern, name, optional=True)], {key: TensorSpec((1,), "F32")}, strict=False
    )
    return found


@settings(max_examples=300, deadline=None)
@given(st.text("ab.*", min_size=1, max_size=8), st.text("ab.", max_size=10))
def test_wildcards_match_as_regular_expressions_do(pattern, key):
    """From the first one on, each takes as much as it can."""
    pieces = re.split(r"(\*\*?)", pattern)
    regex = "".join(
        {"*": "([^.]+)", "**": "(.+)"}.get(piece) or re.escape(piece) for piece in pieces
    )
    found = re.fullmatch(regex, key)
    assert captured(pattern, key) == ("|".join(["new", *found.groups()]) if found else key)


@pytest.mark.parametrize("pattern", ["**." * 5 + "x", "*a" * 20 + "b", "**a**a*" * 5 + "b"])
def test_a_pattern_of_many_wildcards_takes_no_longer_than_its_parts(pattern):
    for key in ("a." * 400, "a" * 800, "a" * 800 + "b"):
        assert (captured(pattern, key) != key) == (key[-1] == "b" == pattern[-1])


def test_what_no_rule_matches_stays_as_it_is_or_is_refused():
    arrays = numbered_arrays(a=(2,), b=(3,), c__0=(), c__1=(0, 4))
    assert_same(
        converted([Rename("a", "x")], arrays),
        {"x": arrays["a"], **{k: arrays[k] for k in ("b", "c.0", "c.1")}},
    )
    with pytest.raises(LoadMismatchError, match=r"'b', 'c\.\{0\.\.1\}' \(2 keys\)") as caught:
        apply_rules([Rename("a", "x")], infos(arrays), strict=True)
    assert caught.value.missing == {"b", "c.0", "c.1"}
    apply_rules(
        [Rename("a", "a"), Drop("b"), Trim("c.1", 0, 0), Rename("c.0", "d")],
        infos(arrays),
        strict=True,
    )


# Any stack of rules, on any shapes.


@st.composite
def converted_tensors(draw, max_rules=6):
    """Draw tensors and rules, and convert the tensors with numpy alone."""
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=3))
    arrays = numbered_arrays(**{f"s{n}": tuple(shape) for n, shape in enumerate(shapes)})
    current, rules = dict(arrays), []
    for number in range(draw(st.integers(0, max_rules)) if current else 0):
        rule, consumed, produced = draw(applicable_rules(current, f"n{number}"))
        rules.append(rule)
        current = {key: array for key, array in current.items() if key not in consumed} | produced
    return arrays, rules, current


def without(shape, axis):
    return tuple(None if a == axis else n for a, n in enumerate(shape))


@st.composite
def applicable_rules(draw, arrays, name):
    key = draw(st.sampled_from(sorted(arrays)))
    array = arrays[key]
    order = tuple(draw(st.permutations(range(array.ndim))))
    choices = [
        (Rename(key, name), {name: array}),
        (Transpose(key, name, order), {name: array.transpose(order)}),
    ]
    if array.ndim:
        axis = draw(st.integers(0, array.ndim - 1))
        size = array.shape[axis]
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
        names = tuple(f"{name}.{n}" for n in range(len(cuts) + 1))
        sizes = tuple(np.diff([0, *cuts, size]).tolist())
        choices += [
            (
                Split(key, names, axis, sizes),
                dict(zip(names, np.split(array, cuts, axis), strict=True)),
            ),
            (Trim(key, axis, size // 2), {key: np.split(array, [size // 2], axis)[0]}),
        ]
        if size % 2 == 0:
            halves = tuple(f"{name}.{n}" for n in range(2))
            odd_and_even = [array.take(range(n, size, 2), axis) for n in range(2)]
            choices.append(
                (
                    Split(key, halves, axis, groups=max(size // 2, 1)),
                    dict(zip(halves, odd_and_even, strict=True)),
                )
            )
            turns = [
                index
                for pair in zip(range(size // 2), range(size // 2, size), strict=True)
                for index in pair
            ]
            choices += [(Interleave(key, name, axis), {name: array.take(turns, axis)})] * 3
        if size:
            choices.append(
                (
                    Unstack(key, name + ".{i}", axis),
                    {f"{name}.{i}": np.asarray(array.take(i, axis)) for i in range(size)},
                )
            )
        if array.shape[0] % 3 == 0 and len(array):
            qkv, heads = tuple(f"{name}.{letter}" for letter in "qkv"), len(array) // 3
            choices.append(
                (SplitQKV(key, qkv, heads, heads, 1), {qkv[n]: array[n::3] for n in range(3)})
            )
        for other in sorted(arrays.keys() - {key}):
            if without(arrays[other].shape, axis) == without(array.shape, axis):
                pair = array, arrays[other]
                choices.append(
                    (Concat((key, other), name, axis), {name: np.concatenate(pair, axis)})
                )
                if size % 2 == arrays[other].shape[axis] % 2 == 0:
                    parts = [
                        half
                        for halves in zip(*(np.split(a, 2, axis) for a in pair), strict=True)
                        for half in halves
                    ]
                    rule = Concat((key, other), name, axis, groups=2)
                    choices.append((rule, {name: np.concatenate(parts, axis)}))
    rule, produced = draw(st.sampled_from(choices))
    return rule, set(rule.reads), produced


@settings(max_examples=150, deadline=None)
@given(converted_tensors())
def test_any_stack_of_rules_gives_what_numpy_gives_and_leads_back(case):
    arrays, rules, expected = case
    mapped = apply_rules(rules, infos(arrays))
    assert_same(materialize_all(mapped, arrays), expected)

    # What was trimmed comes back as zeros.
    kept = np.concatenate(
        [np.zeros(0, np.int64), *(array.reshape(-1) for array in expected.values())]
    )
    back = invert(mapped, infos(arrays))
    assert_same(
        materialize_all(back, expected),
        {key: np.where(np.isin(a, kept), a, 0) for key, a in arrays.items()},
    )
    # Forth again, from the way back.
    assert_same(materialize_all(invert(back, infos(expected)), arrays), expected)


@settings(max_examples=120, deadline=None)
@given(converted_tensors(), st.booleans(), st.data())
def test_any_region_of_a_tensor_is_found_in_the_sources(case, on_the_way_back, data):
    arrays, rules, targets = case
    mapped = apply_rules(rules, infos(arrays))
    if on_the_way_back:
        arrays, mapped = targets, invert(mapped, infos(arrays))
    name = data.draw(st.sampled_from(sorted(mapped)))
    tensor = mapped[name]
    spans = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape
    ]
    region = Region(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))

    parts = resolve(tensor, region)
    asked = replace(
        tensor,
        shape=region.shape,
        parts=tuple(part._replace(target=place) for place, part in parts),
        padding=tuple(resolve_padding(tensor, region)),
    )
    expected = materialize(tensor, arrays)[region.slices()]
    np.testing.assert_array_equal(materialize(asked, arrays), expected)
    assert all(part.target.relative_to(region.offset) == place for place, part in parts)

    # The same by writing source regions through views of the target.
    filled = torch.zeros(region.shape, dtype=torch.int64)
    for place, part in parts:
        source = torch.from_numpy(arrays[part.key].copy())[part.source.slices(part.source_step)]
        view = target_view(filled, place, part)
        assert view.shape == part.source.shape
        view.copy_(source)
    np.testing.assert_array_equal(filled.numpy(), expected)


def test_parts_in_place_are_recognisable():
    arrays = numbered_arrays(a=(3, 2, 1, 5))
    mapped = apply_rules([Transpose("a", "b", (2, 0, 1, 3)), Unstack("b", "c.{i}")], infos(arrays))
    # Only an axis of size 1 moved, which changes nothing in memory.
    assert mapped["c.0"].parts == (
        RegionCopy(Region((0,) * 3, (3, 2, 5)), "a", Region((0,) * 4, (3, 2, 1, 5)), (0, 1, 2, 3)),
    )


# The way back.


def test_padding_comes_back_as_zeros_and_is_named():
    arrays = numbered_arrays(vocabulary=(5, 2))
    mapped = apply_rules([Trim("vocabulary", 0, 3), Transpose("vocabulary", "v")], infos(arrays))
    back = invert(mapped, infos(arrays))["vocabulary"]
    assert back.padding == (Region((3, 0), (2, 2)),)
    assert mapped["v"].padding == ()
    assert resolve_padding(back, Region((2, 1), (2, 1))) == [Region((1, 0), (1, 1))]
    assert resolve_padding(back, Region((0, 0), (3, 2))) == []


def test_whole_dropped_tensors_stay_away_and_dropped_pieces_are_refused():
    arrays = numbered_arrays(a=(2, 2), b=(3,))
    assert invert(apply_rules([Drop("b")], infos(arrays)), infos(arrays)).keys() == {"a"}
    with pytest.raises(InvalidShardingError, match=r"Element \(0, 1\) of 'a' is in no target"):
        invert(
            apply_rules([Split("a", ("x", "y"), axis=1), Drop("y")], infos(arrays)), infos(arrays)
        )


def test_a_mapping_is_not_inverted_over_other_tensors_or_when_it_is_ambiguous():
    arrays = numbered_arrays(a=(2, 2), b=(3,))
    mapped = apply_rules([Rename("a", "x")], infos(arrays))
    with pytest.raises(InvalidShardingError, match="The mapping reads 'b'"):
        invert(mapped, {"a": TensorSpec((2, 2), "I64")})
    with pytest.raises(
        InvalidShardingError, match=r"\[0:3\] does not lie inside 'b' of shape \(2,\)"
    ):
        invert(mapped, infos(arrays) | {"b": TensorSpec((2,), "I64")})
    with pytest.raises(InvalidShardingError, match=r"\(0, 0\) of 'a' is in 2 places"):
        invert(mapped | {"twice": mapped["x"]}, infos(arrays))


def test_regions_and_views_must_fit():
    mapped = apply_rules([], {"a": TensorSpec((2, 3), "F32")})["a"]
    for region in (Region((0, 0), (3, 3)), Region((-1, 0), (1, 1)), Region((0,), (1,))):
        with pytest.raises(InvalidShardingError, match="does not lie inside"):
            resolve(mapped, region)
        with pytest.raises(InvalidShardingError, match="does not lie inside"):
            resolve_padding(mapped, region)
    with pytest.raises(ValueError, match=r"\(2, 2\) was given for a part of shape \(2, 3\)"):
        target_view(torch.zeros(3, 2), *resolve(mapped, Region((0, 0), (2, 3)))[0])


# Errors.

B = {
    "a": TensorSpec((4, 6), "F32"),
    "b.0": TensorSpec((4, 6), "BF16"),
    "b.1": TensorSpec((5, 6), "F32"),
}
MISFITS = [
    (Unstack("a", "x{i}", axis=2), r"'a' of shape \(4, 6\).*no axis 2"),
    (Unstack("a", "x{i}", size=3), "axis 0 should have size 3"),
    (Split("a", ("x", "y", "z")), "axis 0 cannot be cut into 3 equal pieces"),
    (Split("a", ("x", "y"), sizes=(1, 2)), r"axis 0 cannot be cut into sizes \(1, 2\)"),
    (SplitQKV("a", ("q", "k", "v"), 4, 2, 8), "axis 0 should have size 64"),
    (Concat(("a", "b.0"), "x"), "'b.0' .* 'a' has another dtype, F32"),
    (Concat(("a", "b.1"), "x", axis=1), r"'b\.1' of shape \(5, 6\).*'a' has shape \(4, 6\)"),
    (Concat(("a", "a"), "x"), "uses 'a' twice, for 'x' and for 'x'"),
    (Transpose("a", "x", (0, 2, 1)), "should have 3 axes"),
    (Stack("b.*", "x", axis=3, size=2), "a stack of such tensors has no axis 3"),
    (Stack("b.*", "x", axis=-4, size=2), "a stack of such tensors has no axis -4"),
    (Trim("a", 0, 5), "axis 0 cannot be trimmed to size 5"),
    (Rename("a", "b.0"), "named 'b.0': it is in the checkpoint, and Rename.* makes it of 'a'"),
    (Rename("b.*", "x"), "named 'x': Rename.* makes it of 'b.0', and Rename.* makes it of 'b.1'"),
    (Split("a", ("x", "x")), "named 'x'"),
]


@pytest.mark.parametrize(("rule", "message"), MISFITS, ids=str)
def test_a_rule_that_does_not_fit_is_refused(rule, message):
    with pytest.raises(InvalidShardingError, match=message):
        apply_rules([rule], B)


def test_a_rule_must_match_something_and_as_often_as_it_says():
    message = (
        r"Rename\(pattern='norm.weihgt', to='x'\) matches no tensor "
        r"\(did you mean 'norm.weight'\?\)"
    )
    with pytest.raises(LoadMismatchError, match=message) as caught:
        apply_rules([Rename("norm.weihgt", "x")], {"norm.weight": B["a"]})
    assert caught.value.unexpected == {"norm.weihgt"}
    with pytest.raises(
        LoadMismatchError, match=r"should match 3 times and matches 2 times, 'b\.\{0\.\.1\}'"
    ):
        apply_rules([Rename("b.*", "x.{0}", count=3)], B)
    with pytest.raises(LoadMismatchError, match=r"'c\.1' is missing.* belongs to 'b\.1'"):
        apply_rules(
            [Concat(("b.*", "c.*"), "x.{0}")], {"b.1": B["b.1"], "b.0": B["b.0"], "c.0": B["b.0"]}
        )
    assert apply_rules([Rename("b.2", "x", optional=True, count=3)], B).keys() == B.keys()


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        (Rename, ("a.*", "b.{1}"), r"uses \{1\}, which the pattern does not provide"),
        (Rename, ("a", "b.{i}"), r"uses \{i\}"),
        (Unstack, ("a", "b"), r"must contain \{i\}"),
        (Split, ("a", "xy"), "a tuple of names"),
        (Split, ("a", ()), "one piece or more"),
        (Split, ("a", ("x", "y"), 0, (1, 2, 3)), "one size"),
        (SplitQKV, ("a", ("q", "k", "v"), 5, 2, 8), "num_heads that num_kv_heads divides"),
        (SplitQKV, ("a", ("q", "k"), 4, 2, 8), "three names"),
        (Concat, ("a", "x"), "a tuple of one pattern or more"),
        (Concat, (("a.*", "b"), "x"), "same number of wildcards"),
        (Transpose, ("a", "b", (0, 2)), "name every axis"),
        (Interleave, ("a", "b", 0, 0), "one piece or more"),
        (Interleave, ("a", "b", 0, -2), "one piece or more"),
    ],
)
def test_rules_that_make_no_sense_cannot_be_made(rule, arguments, message):
    with pytest.raises(ValueError, match=message):
        rule(*arguments)


def test_bytes_that_hold_two_elements_are_not_torn_apart():
    tensors = {"a": TensorSpec((4, 6), "F4"), "c.0": TensorSpec((4, 6), "F4")}
    stack = Stack("c.*", "d", axis=-1, size=1)
    for rule in (Transpose("a", "b"), Unstack("a", "b{i}", axis=1), stack):
        with pytest.raises(InvalidShardingError, match="must stay together"):
            apply_rules([rule], tensors)
    rules = [Unstack("a", "b{i}"), Split("b0", ("x", "y")), replace(stack, axis=1)]
    assert len(apply_rules(rules, tensors)) == 6


def test_keys_with_a_prefix_need_one_more_rule():
    rules = [Rename("model.**", "{0}"), Rename("decoder.*.norm", "n.{0}")]
    assert apply_rules(
        rules, {"model.decoder.3.norm": TensorSpec((2,), "F32")}, strict=True
    ).keys() == {"n.3"}


def test_a_name_can_shift_a_number():
    mapped = apply_rules(
        [Rename("mtp.*.norm", "layers.{0+61}.norm")], {"mtp.1.norm": TensorSpec((2,), "F32")}
    )
    assert mapped.keys() == {"layers.62.norm"}


@pytest.mark.parametrize(
    ("shape", "new_shape"),
    [
        ((6,), (2, 3)),
        ((2, 3, 4), (6, 4)),
        ((4, 6), (3, 8)),
        ((1, 6, 1), (6,)),
        ((2, 1, 3), (3, 2)),
        ((5, 4), (5, 2, 2)),
    ],
)
def test_reshaped_and_permuted_tensors_keep_their_elements(shape, new_shape):
    arrays = numbered_arrays(a=shape)
    tensor = reshape(apply_rules([], infos(arrays))["a"], new_shape)
    assert_same({"a": materialize(tensor, arrays)}, {"a": arrays["a"].reshape(new_shape)})
    order = list(reversed(range(len(new_shape))))
    moved = reshape(permute(tensor, order), shape)
    assert_same(
        {"a": materialize(moved, arrays)},
        {"a": arrays["a"].reshape(new_shape).transpose(order).reshape(shape)},
    )


def test_listed_tensors_are_assembled_of_what_earlier_rules_made():
    arrays = numbered_arrays(w=(4, 6), b=(3,))
    rules = [Split("a", ("x", "y"), axis=1), Transpose("y", "z"), Rename("b", "c")]
    recorded = apply_rules(rules, {"a": TensorSpec((4, 6), "I64"), "b": TensorSpec((3,), "I64")})
    assemble = Assemble(recorded, {"a": (4, 6), "b": (3,)})
    halves = [Split("w", ("top", "end")), Concat(("end", "top"), "a")]
    mapped = apply_rules([*halves, assemble], infos(arrays), strict=True)
    whole_array = np.concatenate([arrays["w"][2:], arrays["w"][:2]])
    assert_same(
        materialize_all(mapped, arrays),
        {"x": whole_array[:, :3], "z": whole_array[:, 3:].T, "c": arrays["b"]},
    )
    with pytest.raises(
        InvalidShardingError, match=r"'b' of shape \(4,\).*shape \(3,\) is expected"
    ):
        apply_rules([assemble], {"a": TensorSpec((4, 6), "I64"), "b": TensorSpec((4,), "I64")})
    with pytest.raises(LoadMismatchError, match="'a' is missing"):
        apply_rules([assemble], {"b": TensorSpec((3,), "I64")})


def test_listed_tensors_may_share_several_sources():
    arrays = numbered_arrays(a=(2,), b=(2,), c=(2,))
    rules = [
        Split("b", ("b0", "b1")),
        Split("c", ("c0", "c1")),
        Concat(("b0", "c0"), "x"),
        Concat(("a", "b1", "c1"), "y"),
    ]
    assemble = Assemble(apply_rules(rules, infos(arrays)), {"a": (2,), "b": (2,), "c": (2,)})
    expected = {
        "x": np.concatenate([arrays["b"][:1], arrays["c"][:1]]),
        "y": np.concatenate([arrays["a"], arrays["b"][1:], arrays["c"][1:]]),
    }
    assert_same(converted([assemble], arrays), expected)
    assert_round_trip([assemble], arrays)


def test_listed_tensors_may_be_empty():
    arrays = numbered_arrays(w=(2,), e=(0, 3))
    recorded = apply_rules([Rename("e", "x"), Rename("w", "y")], infos(arrays))
    assemble = Assemble(recorded, {"w": (2,), "e": (0, 3)})
    expected = {"x": arrays["e"], "y": arrays["w"]}
    assert_same(converted([assemble], arrays), expected)
    assert_round_trip([assemble], arrays)


def test_stacked_and_interleaved_tensors_come_back():
    arrays = numbered_arrays(**{f"l.{n}.e.{e}.w": (6, 2) for n in range(2) for e in range(3)})
    rules = [Stack("l.*.e.*.w", "l.{0}.w", axis=1, size=3), Interleave("l.*.w", "x.{0}", axis=0)]
    mapped = apply_rules(rules, infos(arrays), strict=True)
    expected = {}
    for n in range(2):
        stack = np.stack([arrays[f"l.{n}.e.{e}.w"] for e in range(3)], axis=1)
        expected[f"x.{n}"] = np.stack([stack[:3], stack[3:]], axis=1).reshape(6, 3, 2)
    assert_same(materialize_all(mapped, arrays), expected)
    assert_same(materialize_all(invert(mapped, infos(arrays)), expected), arrays)


@pytest.mark.parametrize(("size", "named"), [(2, r"w\.\{0\.\.2\}.*found"), (4, r"'w\.3' missing")])
def test_an_optional_stack_leaves_out_no_tensor(size, named, tmp_path):
    save_file({f"w.{n}": torch.ones(2) for n in range(3)}, tmp_path / "model.safetensors")
    rules = [Stack("w.*", "w", axis=0, size=size, optional=True)]
    with pytest.raises(LoadMismatchError, match=named):
        distckpt.consolidate(tmp_path, tmp_path / "out", rules=rules)
    assert not (tmp_path / "out").exists()


def test_columns_that_took_turns_are_stacked_anew():
    arrays = numbered_arrays(a=(3, 4))
    rules = [
        Interleave("a", "b", axis=1),
        Unstack("b", "c.{i}", axis=1),
        Stack("c.*", "d", axis=0, size=4),
        Split("d", ("x", "y"), axis=1, sizes=(1, 2)),
    ]
    mapped = apply_rules(rules, infos(arrays), strict=True)
    columns = arrays["a"][:, [0, 2, 1, 3]].T
    expected = {"x": columns[:, :1], "y": columns[:, 1:]}
    assert_same(materialize_all(mapped, arrays), expected)
    assert_same(materialize_all(invert(mapped, infos(arrays)), expected), arrays)


@pytest.mark.parametrize(
    "keys", [["w.0", "w.2"], ["w.0", "w.1", "w.2", "w.3"], ["w.1", "w.2", "w.3"]]
)
def test_a_stack_needs_all_of_its_numbers(keys):
    with pytest.raises(
        LoadMismatchError, match=r"needs the numbers from 0 to 2: .*w.*(missing|found)"
    ):
        apply_rules(
            [Stack("w.*", "w", axis=0, size=3)], {key: TensorSpec((2,), "F32") for key in keys}
        )


def test_rows_that_take_turns_are_few_parts():
    mapped = apply_rules([Interleave("a", "b", axis=1)], {"a": TensorSpec((3, 1 << 20), "F32")})
    assert (
        len(mapped["b"].parts)
        == len(invert(mapped, {"a": TensorSpec((3, 1 << 20), "F32")})["a"].parts)
        == 2
    )


def test_a_number_is_added_and_subtracted_on_the_way_back():
    arrays = numbered_arrays(a=(4,), b=(2,))
    given = infos(arrays, "F32")
    mapped = apply_rules(
        [Add("a", 1.0), Split("a", ("x", "y")), Add("x", 3.0), Rename("b", "c")], given
    )
    expected = {"x": arrays["a"][:2] + 4, "y": arrays["a"][2:] + 1, "c": arrays["b"]}
    assert_same(materialize_all(mapped, arrays), expected)
    assert_same(materialize_all(invert(mapped, given), expected), arrays)
    with pytest.raises(InvalidShardingError, match="numbers are added to floating point tensors"):
        apply_rules([Add("a", 1.0)], infos(arrays))


def test_rows_that_cannot_take_turns():
    with pytest.raises(InvalidShardingError, match="axis 0 cannot be cut into 2 equal pieces"):
        apply_rules([Interleave("a", "b")], {"a": TensorSpec((3,), "F32")})


def test_a_copy_is_exported_and_not_needed_on_the_way_back():
    arrays = numbered_arrays(**{"a.0": (2,), "a.1": (3,)})
    mapped = apply_rules([Copy("a.*", "b.{0}")], infos(arrays), strict=True)
    expected = arrays | {"b.0": arrays["a.0"], "b.1": arrays["a.1"]}
    assert_same(materialize_all(mapped, arrays), expected)
    assert_same(materialize_all(invert(mapped, infos(arrays)), expected), arrays)
