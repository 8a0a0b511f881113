"""Lists of rules with one mistake each, which the tests of a family find."""

from __future__ import annotations

from dataclasses import replace

import torch

import distckpt
from distckpt import CheckpointingException
from distckpt.rules import (
    Concat,
    Interleave,
    Rename,
    Split,
    Stack,
    TensorSpec,
    Transpose,
    apply_rules,
)


def mutants(rules, square="model.layers.*.self_attn.o_proj.weight"):
    """Yield lists of rules with one mistake each."""
    for number, rule in enumerate(rules):
        rest = [rules[:number], rules[number + 1 :]]
        if not rule.optional:
            yield f"without {rule}", rest[0] + rest[1]
        if isinstance(rule, Split) and len(rule.to) > 1:
            yield f"reversed {rule}", [*rest[0], replace(rule, to=rule.to[::-1]), *rest[1]]
        if isinstance(rule, Concat) and not rule.optional and len(rule.patterns) > 1:
            yield (
                f"reversed {rule}",
                [*rest[0], replace(rule, patterns=rule.patterns[::-1]), *rest[1]],
            )
        if isinstance(rule, Split | Concat) and rule.groups > 1:
            sizes = (
                {"sizes": tuple(size * rule.groups for size in rule.sizes)}
                if getattr(rule, "sizes", None)
                else {}
            )
            yield f"not by group {rule}", [*rest[0], replace(rule, groups=1, **sizes), *rest[1]]
        if isinstance(rule, Interleave | Transpose):
            yield f"not {rule}", [*rest[0], Rename(rule.pattern, rule.to), *rest[1]]
        if isinstance(rule, Stack):
            pieces = tuple(f"{rule.to}.{n}" for n in range(rule.size))
            patterns = [piece.replace("{0}", "*") for piece in pieces]
            swapped = tuple([patterns[1], patterns[0], *patterns[2:]])
            swap = [Split(rule.to.replace("{0}", "*"), pieces), Concat(swapped, rule.to)]
            yield f"exchanged {rule}", [*rules[: number + 1], *swap, *rules[number + 1 :]]
    yield "transposed", [*rules, Transpose(square, square.replace("*", "{0}"))]
    for block in [
        rule.to for rule in rules if isinstance(rule, Rename) and ".experts.{1}." in rule.to
    ]:
        one, two, aside = (
            block.replace("{0}", "0").replace("{1}", name) for name in ("0", "1", "x")
        )
        yield (
            "exchanged experts",
            [*rules, Rename(one, aside), Rename(two, one), Rename(aside, two)],
        )


def survivors_of(mutants, rules, trained, saved, checkpoint, is_right):
    """Name the wrong rules that load a directory into a model, and export it, as the right ones do.

    `checkpoint` is one of the model; `is_right` tells whether the model computes what it should.
    """
    stored = distckpt.open(checkpoint).tensors.items()
    infos = {key: TensorSpec(tensor.shape, "F32") for key, tensor in stored}
    request = {
        key: shard
        for key, shard in trained.sharded_state_dict().items()
        if not key.endswith("_extra_state")
    }
    right = {name: tensor.shape for name, tensor in apply_rules(rules, infos, strict=True).items()}

    def survives(mutant):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.fill_(0.1)
        try:
            exported = apply_rules(mutant, infos, strict=True)
            if {name: tensor.shape for name, tensor in exported.items()} != right:
                return False
            distckpt.load(request, saved, rules=mutant)
        except CheckpointingException:
            return False
        return is_right()

    assert survives(rules), "the right rules do not load the model"
    return [name for name, mutant in mutants if survives(mutant)]
