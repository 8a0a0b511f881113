"""Directories with quantised tensors, written by the safetensors library, and what their values
are.

Values are computed here one by one from the definitions of the formats: tables of numbers, and
scales that are repeated to the shape of the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.hf_folders import write_plain

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


WRITTEN_FORMATS = (
    "fp8-block",
    "fp8-block-ue8m0",
    "fp8-tensor",
    "fp8-channel",
    "int8-channel",
    "mxfp4",
    "mxfp4-packed",
    "int4",
    "nvfp4",
)
"""All formats in which tensors can be exported."""


class Model(NamedTuple):
    """Tensors as they are stored, the configuration beside them, and the values by key, float32."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, object]
    values: dict[str, torch.Tensor]

    def write(self, folder: Path, name: str = "config.json") -> Path:
        """Write a Hugging Face directory."""
        write_plain(folder / "model.safetensors", self.tensors)
        (folder / name).write_text(json.dumps(self.config))
        return folder


def repeated(scales: torch.Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Give each element the scale of its block."""
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, axis)
    return scales[tuple(slice(size) for size in shape)]


def random_codes(*shape: int) -> torch.Tensor:
    """Return bytes of every value."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Return the two halves of each byte, the lower one first."""
    return torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()


def finite(codes: torch.Tensor) -> torch.Tensor:
    """Return E4M3 numbers without NaN."""
    return torch.where(codes % 128 == 127, 1, codes).to(torch.uint8).view(E4M3)


def power(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of E8M0 bytes."""
    return torch.exp2(exponents.double() - 127).float()


def fp8_block(rows: int = 300, columns: int = 200) -> Model:
    codes, scales = (
        finite(random_codes(rows, columns)),
        torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1,
    )
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["l.gate"],
    }
    gate = torch.randn(4, columns).bfloat16()
    return Model(
        {"l.up.weight": codes, "l.up.weight_scale_inv": scales, "l.gate.weight": gate},
        {"torch_dtype": "bfloat16", "quantization_config": config},
        {
            "l.up.weight": codes.float() * repeated(scales, (128, 128), (rows, columns)),
            "l.gate.weight": gate.float(),
        },
    )


def fp8_ue8m0() -> Model:
    codes, exponents = (
        finite(random_codes(130, 260)),
        torch.randint(100, 140, (2, 3), dtype=torch.uint8),
    )
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    return Model(
        {"l.weight": codes, "l.weight_scale_inv": exponents.view(torch.float8_e8m0fnu)},
        {"quantization_config": config},
        {"l.weight": codes.float() * repeated(power(exponents), (128, 128), (130, 260))},
    )


def fp8_tensor() -> Model:
    codes, scale = finite(random_codes(60, 90)), torch.tensor(0.37)
    return Model(
        {"l.weight": codes, "l.weight_scale": scale, "l.input_scale": torch.tensor(1.5)},
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        {"l.weight": codes.float() * 0.37},
    )


def fp8_channel() -> Model:
    codes, scale = finite(random_codes(60, 90)), torch.rand(60, 1).bfloat16()
    return Model(
        {"l.weight": codes, "l.weight_scale": scale},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"l.weight": codes.float() * scale.float()},
    )


def int8_channel() -> Model:
    codes, scale = random_codes(60, 90).view(torch.int8), torch.rand(60)
    return Model(
        {"l.weight": codes, "l.weight_scale": scale},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"l.weight": codes.float() * scale[:, None]},
    )


def mxfp4() -> Model:
    """Experts of gpt-oss: as many rows as columns, so that only the names say which way round they
    are.
    """
    blocks, scales = (
        random_codes(3, 64, 2, 16),
        torch.randint(100, 140, (3, 64, 2), dtype=torch.uint8),
    )
    stored = E2M1[halves(blocks)].flatten(-2) * repeated(power(scales), (1, 1, 32), (3, 64, 64))
    return Model(
        {"m.experts.down_proj_blocks": blocks, "m.experts.down_proj_scales": scales},
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        {"m.experts.down_proj": stored.transpose(1, 2).contiguous()},
    )


def mxfp4_packed() -> Model:
    codes, scales = random_codes(40, 48), torch.randint(100, 140, (40, 3), dtype=torch.uint8)
    return Model(
        {
            "e.0.w1.weight": codes.view(torch.int8),
            "e.0.w1.scale": scales.view(torch.float8_e8m0fnu),
        },
        {
            "quantization_config": {
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            }
        },
        {"e.0.w1.weight": E2M1[halves(codes)] * repeated(power(scales), (1, 32), (40, 96))},
    )


def int4() -> Model:
    codes, scale = random_codes(40, 48), torch.rand(40, 3).bfloat16()
    weights = {
        "num_bits": 4,
        "type": "int",
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
    }
    return Model(
        {
            "e.0.up_proj.weight_packed": codes.view(torch.int32),
            "e.0.up_proj.weight_scale": scale,
            "e.0.up_proj.weight_shape": torch.tensor([40, 96], dtype=torch.int32),
        },
        {
            "text_config": {
                "quantization_config": {"config_groups": {"group_0": {"weights": weights}}}
            }
        },
        {
            "e.0.up_proj.weight": (halves(codes) - 8).float()
            * repeated(scale.float(), (1, 32), (40, 96))
        },
    )


def int4_padded() -> Model:
    """Columns that fill no whole items: compressed-tensors pads them, and stores the shape."""
    codes, scale = random_codes(40, 28), torch.rand(40, 4).bfloat16()
    weights = {"num_bits": 4, "type": "int", "group_size": 13, "strategy": "group"}
    return Model(
        {
            "l.weight_packed": codes.view(torch.int32),
            "l.weight_scale": scale,
            "l.weight_shape": torch.tensor([40, 52]),
        },
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": weights}},
            }
        },
        {
            "l.weight": (halves(codes) - 8)[:, :52].float()
            * repeated(scale.float(), (1, 13), (40, 52))
        },
    )


def nvfp4() -> Model:
    codes, scale, factor = (
        random_codes(40, 48),
        finite(random_codes(40, 6) % 128),
        torch.tensor(0.013),
    )
    return Model(
        {
            "l.weight": codes,
            "l.weight_scale": scale,
            "l.weight_scale_2": factor,
            "l.input_scale": torch.tensor(2.0),
        },
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        {"l.weight": E2M1[halves(codes)] * repeated(scale.float() * factor, (1, 16), (40, 96))},
    )


def nvfp4_packed() -> Model:
    codes, scale, factor = (
        random_codes(40, 48),
        finite(random_codes(40, 6) % 128),
        torch.tensor([773.0]),
    )
    return Model(
        {"l.weight_packed": codes, "l.weight_scale": scale, "l.weight_global_scale": factor},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
            }
        },
        {"l.weight": E2M1[halves(codes)] * repeated(scale.float() / factor, (1, 16), (40, 96))},
    )


def nvfp4_experts() -> Model:
    """A stack of experts, each with a scale of its scales."""
    codes, scale, factor = (
        random_codes(3, 20, 24),
        finite(random_codes(3, 20, 3) % 128),
        torch.rand(3) + 0.1,
    )
    scales = scale.float() * factor[:, None, None]
    return Model(
        {"e.up": codes, "e.up_scale": scale, "e.up_scale_2": factor},
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        {"e.up": E2M1[halves(codes)] * repeated(scales, (1, 1, 16), (3, 20, 48))},
    )


MODELS: dict[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        fp8_block,
        fp8_ue8m0,
        fp8_tensor,
        fp8_channel,
        int8_channel,
        mxfp4,
        mxfp4_packed,
        int4,
        int4_padded,
        nvfp4,
        nvfp4_packed,
        nvfp4_experts,
    )
}
