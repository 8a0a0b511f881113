"""Forms of Hugging Face directories that differ from what `save_pretrained` writes for the same
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from distckpt._rules.blocks import Config, joined_experts
from distckpt._rules.rule import Rule
from distckpt._rules.rules import Rename, Transpose
from distckpt._rules.towers import text_part

_FUSED = re.compile(r"((?:.+\.)?layers\.)\d+(\..+)\.experts\.gate_up_proj")
_TOWER = "vision_tower.vision_model."


def forms_on_disk(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    """Make rules from what `save_pretrained` writes to what a directory holds, given its shapes by
    name.
    """
    rules: list[Rule] = []
    fused = {
        f"{found[1]}*{found[2]}": found for name in shapes if (found := _FUSED.fullmatch(name))
    }
    for block, found in fused.items():
        rules += joined_experts(block, shapes[found[0]][0])
        if config("model_type") == "qwen3_vl_moe" and _are_transposed(config, found[0], shapes):
            for name in ("gate_up_proj", "down_proj"):
                old = f"{block}.experts.{name}"
                aside = f"{old}.transposed"
                rules.append(
                    Transpose(old, aside.replace("*", "{0}"), order=(0, 2, 1), optional=True)
                )
                rules.append(Rename(aside, old.replace("*", "{0}"), optional=True))
    if any(name.startswith(_TOWER) for name in shapes):
        parts = ("embeddings", "pre_layrnorm", "encoder", "post_layernorm")
        rules += [
            Rename(f"vision_tower.{part}.**", f"{_TOWER}{part}.{{0}}", optional=True)
            for part in parts
        ]
    return rules


def _are_transposed(
    config: Config,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Tell whether experts are stored as the model was published; one of both matrices at least is
    not square.
    """
    text = text_part(config, "")
    hidden, inner = (
        text.number_of(size, most=1 << 32) for size in ("hidden_size", "moe_intermediate_size")
    )
    down = shapes.get(name.replace("gate_up_proj", "down_proj"))
    return (shapes[name][1:], down and down[1:]) == ((hidden, 2 * inner), (inner, hidden))
