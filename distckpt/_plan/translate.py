"""Translation of requests through rules, from model to checkpoint tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import TO_NAME
from distckpt._plan.load import Request
from distckpt.rules._mapped import (
    UNCHANGED,
    MappedTensor,
    TensorSpec,
    resolve,
    resolve_padding,
    target_view,
)
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Tie, apply_rules, invert, matched_rules

logger = logging.getLogger(__name__)

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors of a model, by key."""


def _tensors_of_other_ranks(
    stored: Mapping[str, MappedTensor], infos: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Describe tensors of other ranks that rules name, such as stack members."""
    shapes: dict[str, list[int]] = {}
    dtypes = {}
    for tensor in stored.values():
        for part in tensor.parts:
            if part.key in infos:
                continue
            ends = [offset + size for offset, size in zip(*part.source, strict=True)]
            shapes[part.key] = list(map(max, shapes.get(part.key, ends), ends))
            dtypes[part.key] = tensor.dtype
    return {key: TensorSpec(tuple(shape), dtypes[key]) for key, shape in shapes.items()}


def _ties(rules: Sequence[Rule]) -> dict[str, str]:
    ties = {}
    for rule in rules:
        if isinstance(rule, Tie):
            ties[rule.key] = rule.to
    return ties


def decide_ties(
    rules: Sequence[Rule],
    model_rules: Sequence[Rule],
    shapes: Shapes,
    shared: Mapping[str, str],
    stored: Collection[str],
) -> list[Rule]:
    """Let the checkpoint, not the configuration, decide which names are tied.

    Names that are stored apart are read apart; among the rest, a stored name stands for all.

    Args:
        rules: rules of the user, which come first and stay as they are.
        model_rules: rules of the family.
        shapes: shapes of the requested tensors by key.
        shared: requested keys -> other keys with the same memory.
        stored: names of the tensors in the checkpoint.
    """
    before, ties, after = _around_ties(rules, model_rules)
    known = {**_ties(rules), **ties}
    shared = {key: to for key, to in shared.items() if key not in known and to not in known}
    return [
        *_decided(shared, [*before, *after], shapes, stored),
        *before,
        *_decided(ties, after, _shapes_after(before, shapes) if ties else {}, stored),
        *after,
    ]


def without_ties(
    rules: Sequence[Rule],
    model_rules: Sequence[Rule],
    shapes: Shapes,
    stored: Collection[str],
) -> list[Rule]:
    """Leave out ties whose tensors are both given and both stored.

    See `decide_ties`; `shapes` are of all tensors that are given.
    """
    before, ties, after = _around_ties(rules, model_rules)
    shapes = _shapes_after(before, shapes) if ties else {}
    both = {}
    for key, to in ties.items():
        if {key, to} <= shapes.keys():
            both[key] = to
    apart = _stored_ones(both, after, shapes, stored)
    kept_rules = []
    for rule in model_rules:
        if not (isinstance(rule, Tie) and {rule.key, rule.to} <= apart):
            kept_rules.append(rule)
    return kept_rules


def _around_ties(
    rules: Sequence[Rule], model_rules: Sequence[Rule]
) -> tuple[list[Rule], dict[str, str], list[Rule]]:
    """Return the rules before a model's ties, its ties, and later rules."""
    first = next((n for n, rule in enumerate(model_rules) if isinstance(rule, Tie)), 0)
    after = []
    for rule in model_rules[first:]:
        if not isinstance(rule, Tie):
            after.append(rule)
    return [*rules, *model_rules[:first]], _ties(model_rules), after


def _shapes_after(rules: Sequence[Rule], shapes: Shapes) -> Shapes:
    """Return the shapes of the tensors that rules make, by name."""
    made = _apply_some(rules, {key: TensorSpec(shape, "F32") for key, shape in shapes.items()})
    return {name: tensor.shape for name, tensor in made.items()}


def _decided(
    ties: Mapping[str, str],
    rules: Sequence[Rule],
    shapes: Shapes,
    stored: Collection[str],
) -> list[Rule]:
    """Return ties of names that are not stored to a stored name."""
    there = _stored_ones(ties, rules, shapes, stored)
    stand_ins = {to: to for to in ties.values()}
    for key, to in ties.items():
        if key in there and stand_ins[to] not in there:
            stand_ins[to] = key
    pairs = [(key, stand_ins[to]) for key, to in ties.items()] + list(stand_ins.items())
    decided: list[Rule] = []
    for key, to in pairs:
        if key not in there and key != to:
            decided.append(Tie(key, to, optional=True))
    return decided


def _stored_ones(
    ties: Mapping[str, str],
    rules: Sequence[Rule],
    shapes: Shapes,
    stored: Collection[str],
) -> set[str]:
    """Return the names of tied tensors that are stored."""
    specs = {}
    for key, to in ties.items():
        shape = shapes.get(key, shapes.get(to))
        if shape is not None:
            specs[key] = specs[to] = TensorSpec(shape, "F32")
    there = set(specs)
    for name, tensor in _apply_some(rules, specs).items():
        if name not in stored:
            there.difference_update(part.key for part in tensor.parts)
    return there


def _apply_some(
    rules: Sequence[Rule], tensors: Mapping[str, TensorSpec]
) -> dict[str, MappedTensor]:
    """Apply rules to some tensors of a model; not all rules need match."""
    if not tensors:
        return {}
    return apply_rules([replace(rule, optional=True, count=None) for rule in rules], tensors)


def stored_names(rules: Sequence[Rule], shapes: Shapes) -> set[str]:
    """Return the checkpoint's keys for tensors of the model.

    Not all rules need match.
    """
    infos = _infos(rules, shapes)
    return set(_apply_some(rules, infos))


def match_flags(rules: Sequence[Rule], shapes: Shapes) -> bytes:
    """Return a byte per rule: does it match a tensor on this rank?"""
    flags = matched_rules(rules, _infos(rules, shapes))
    are_ties = [isinstance(rule, Tie) and rule.key in shapes for rule in rules]
    return bytes(map(max, flags, are_ties))


def warn_of_unmatched(rules: Sequence[Rule], flags: Sequence[bytes]) -> None:
    """Warn of rules without a tensor on any rank.

    Only the coordinator gets `flags`.
    """
    if not flags:
        return
    for rule, *matched in zip(rules, *flags, strict=False):
        if not any(matched) and not rule.optional:
            logger.warning(
                "%s matches no tensor that is requested: nothing is loaded through it. Correct the "
                "pattern, or set optional=True.",
                rule,
            )


def _infos(rules: Sequence[Rule], shapes: Shapes) -> dict[str, TensorSpec]:
    ties = _ties(rules)
    return {ties.get(key, key): TensorSpec(shape, "F32") for key, shape in shapes.items()}


class Translated(NamedTuple):
    """Requests in terms of the checkpoint.

    Attributes:
        numbers: for each view, the number of its original request.
        requests: the request of each view.
        views: views of the tensors of the model, shaped as the stored regions.
        changes: for each view, the factor of the stored values, and the number that is added.
        padding: views of elements for which the checkpoint has nothing: zeros.
    """

    numbers: list[int]
    requests: list[Request]
    views: list[torch.Tensor]
    changes: list[tuple[float, float]]
    padding: list[torch.Tensor]


def translate(
    rules: Sequence[Rule],
    requests: Sequence[Request],
    tensors: Sequence[torch.Tensor],
    *,
    drops: bool = False,
) -> Translated:
    """Translate requests for the model's tensors into requests for stored tensors.

    A rank that holds only a part of the model need not match all rules. `tensors` has for each
    request a view of its region's shape. Requests without a stored tensor stay under their names,
    for a message about unknown keys, unless `drops` is set.
    """
    ties = _ties(rules)
    requests = [request._replace(key=ties.get(request.key, request.key)) for request in requests]
    pairs = zip(requests, tensors, strict=True)
    infos = {r.key: TensorSpec(r.global_shape, TO_NAME[t.dtype]) for r, t in pairs}
    stored = _apply_some(rules, infos)
    mapped = invert(stored, infos | _tensors_of_other_ranks(stored, infos))
    rows: list[tuple[int, Request, torch.Tensor, tuple[float, float]]] = []
    padding = []
    for number, (request, tensor) in enumerate(zip(requests, tensors, strict=True)):
        if request.key not in mapped:
            if not drops:
                rows.append((number, request, tensor, UNCHANGED))
            continue
        for gap in resolve_padding(mapped[request.key], request.region):
            padding.append(tensor[gap.slices()])
        for place, part in resolve(mapped[request.key], request.region):
            shape = stored[part.key].shape
            may_differ = request.allow_shape_mismatch
            translated = Request(part.key, shape, part.source, may_differ, part.source_step)
            change = (part.factor, part.add)
            rows.append((number, translated, target_view(tensor, place, part), change))
    if not rows:
        return Translated([], [], [], [], padding)
    numbers, stored_requests, views, changes = map(list, zip(*rows, strict=True))
    return Translated(numbers, stored_requests, views, changes, padding)
