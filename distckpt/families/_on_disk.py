"""Forms of Hugging Face directories that `save_pretrained` does not write.

It writes another form for the same configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from distckpt.families._blocks import Config, joined_experts
from distckpt.families._towers import text_part
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Rename, Transpose

_FUSED = re.compile(r"((?:.+\.)?layers\.)\d+(\..+)\.experts\.gate_up_proj")
_TOWER = "vision_tower.vision_model."


def forms_on_disk(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    """Return the rules from the form of `save_pretrained` to a directory's.

    The shapes of the directory's tensors are given by name.
    """
    rules: list[Rule] = []
    fused: dict[str, str] = {}
    for name in shapes:
        match = _FUSED.fullmatch(name)
        if match is not None:
            fused[f"{match[1]}*{match[2]}"] = name
    for block, name in fused.items():
        rules += joined_experts(block, shapes[name][0])
        if config("model_type") == "qwen3_vl_moe" and _are_transposed(config, name, shapes):
            for part in ("gate_up_proj", "down_proj"):
                old = f"{block}.experts.{part}"
                aside = f"{old}.transposed"
                rules.append(
                    Transpose(old, aside.replace("*", "{0}"), order=(0, 2, 1), optional=True)
                )
                rules.append(Rename(aside, old.replace("*", "{0}"), optional=True))
    if any(name.startswith(_TOWER) for name in shapes):
        parts = ("embeddings", "pre_layrnorm", "encoder", "post_layernorm")
        for part in parts:
            rules.append(Rename(f"vision_tower.{part}.**", f"{_TOWER}{part}.{{0}}", optional=True))
    return rules


def _are_transposed(
    config: Config,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Return whether experts are stored as the model was published.

    At least one of both matrices is not square.
    """
    text = text_part(config, "")
    hidden = text.number_of("hidden_size", most=1 << 32)
    inner = text.number_of("moe_intermediate_size", most=1 << 32)
    down = shapes.get(name.replace("gate_up_proj", "down_proj"))
    return (shapes[name][1:], down and down[1:]) == ((hidden, 2 * inner), (inner, hidden))
