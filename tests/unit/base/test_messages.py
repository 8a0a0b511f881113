from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from distckpt._base.messages import did_you_mean, natural_order, summarize_keys


def test_keys_that_differ_in_numbers_become_one_pattern():
    keys = [f"decoder.layers.{i}.mlp.weight" for i in range(32)] + ["embedding.weight"]
    random.Random(0).shuffle(keys)
    assert (
        summarize_keys(keys) == "'decoder.layers.{0..31}.mlp.weight' (32 keys), 'embedding.weight'"
    )


def test_every_number_has_its_own_range():
    keys = [f"layers.{i}.experts.{j}.w" for i in (2, 4) for j in range(8)]
    assert summarize_keys(keys) == "'layers.{2,4}.experts.{0..7}.w' (16 keys)"
    assert summarize_keys(["a.7.b", "a.7.c"]) == "'a.7.b', 'a.7.c'"
    assert (
        summarize_keys([f"a.{i}" for i in (0, 1, 2, 4, 6, 7, *range(9, 40))])
        == "'a.{0..2,4,6,7,9..39}' (37 keys)"
    )
    assert summarize_keys(["a.6", "a.7"]) == "'a.{6..7}' (2 keys)"
    assert (
        summarize_keys([f"a.{7 * i}" for i in range(20)]) == "'a.{0,7,14,21,28,35,...}' (20 keys)"
    )


def test_keys_that_differ_in_more_than_numbers_are_told_apart():
    assert summarize_keys(["#", "1"]) in ("'#', '1'", "'1', '#'")
    assert summarize_keys(["#1", "1#"]) in ("'#1', '1#'", "'1#', '#1'")


def test_a_key_that_comes_twice_is_one():
    assert summarize_keys(["a", "a"]) == "'a'"
    assert summarize_keys([]) == ""


def test_what_is_too_much_is_counted():
    keys = [f"{letter}.{i}" for letter in "abcdefgh" for i in range(3)]
    assert (
        summarize_keys(keys, limit=2)
        == "'a.{0..2}' (3 keys), 'b.{0..2}' (3 keys), ... and 18 more keys"
    )


@given(st.lists(st.text(st.sampled_from("a1²٣#{}'\0."), max_size=6), max_size=12))
def test_any_keys_can_be_summed_up(keys):
    text = summarize_keys(keys, limit=100)
    assert bool(text) == bool(keys)
    for key in set(keys):
        if not any(letter.isdigit() for letter in key):
            assert repr(key) in text


def test_numbers_with_thousands_of_digits_are_only_text():
    keys = ["w" + digit * 5000 for digit in "12"]
    assert "2 keys" in summarize_keys(keys)
    assert sorted(keys, key=natural_order) == keys


@given(st.lists(st.text(st.sampled_from("ab19²٣."), max_size=6), max_size=12))
def test_any_keys_have_a_natural_order(keys):
    in_order = sorted(set(keys), key=natural_order)
    assert sorted(in_order[::-1], key=natural_order) == in_order


def test_numbers_are_ordered_by_value():
    keys = ["layers.2.w", "layers.10.w", "layers.10.b", "layers", "layers.1.w", "1", "a"]
    assert sorted(keys, key=natural_order) == [
        "1",
        "a",
        "layers",
        "layers.1.w",
        "layers.2.w",
        "layers.10.b",
        "layers.10.w",
    ]


def test_near_names_are_suggested():
    known = ["decoder.layers.0.weight", "decoder.layers.1.weight", "embedding"]
    assert did_you_mean("decoder.layer.0.weight", known).startswith(
        " (did you mean 'decoder.layers.0.weight'"
    )
    assert did_you_mean("embeding", known) == " (did you mean 'embedding'?)"
    assert did_you_mean("unlike all", known) == ""
    assert did_you_mean("a", []) == ""
