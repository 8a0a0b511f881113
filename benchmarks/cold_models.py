"""Model directories as on Hugging Face: true names, shapes and files, whose tensors take no disk.

The files are sparse. Their headers and the index are those of a directory of 5 GB files that
transformers writes, so that plans and the bytes of headers are the true ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distckpt._base.dtypes import ITEM_BYTES

FILE_BYTES = 5_000_000_000
"""Size at which transformers begins a new file."""
BLOCK = 128
"""Rows and columns of a block of FP8 codes, which have one scale."""


class Weight(NamedTuple):
    """A stored tensor.

    Attributes:
        name: its key.
        shape: its shape.
        dtype: the name that safetensors has for its dtype.
        axis: the axis that tensor parallel ranks divide; None if each has all of it.
        layer: its decoder layer; embeddings count as the first one, the head as the last one.
        expert: the number of its expert; None for other tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None
    layer: int
    expert: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Sizes(NamedTuple):
    """The sizes of a decoder; multi-head latent attention where `q_rank` is not 0."""

    layers: int
    hidden: int
    vocabulary: int
    inner: int
    q_dim: int
    kv_dim: int
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    dense_layers: int = 0
    experts: int = 0
    expert_inner: int = 0
    has_blocks: bool = False


LLAMA_405B = Sizes(126, 16384, 128256, 53248, 16384, 1024, dense_layers=126)
GLM_5 = Sizes(
    78, 6144, 154880, 12288, 16384, 28672, 2048, 512, 64, 16384, 3, experts=256, expert_inner=2048
)
DEEPSEEK_V3 = Sizes(
    61, 7168, 129280, 18432, 24576, 32768, 1536, 512, 64, 16384, 3, 256, 2048, has_blocks=True
)
MODELS = {"GLM-5": GLM_5, "DeepSeek-V3": DEEPSEEK_V3, "Llama-405B": LLAMA_405B}


def scaled(sizes: Sizes, factor: int) -> Sizes:
    """Divide all dimensions, so that tensors have a `factor ** 2`th of their bytes."""
    fields = {}
    for name, value in sizes._asdict().items():
        if name not in ("layers", "dense_layers", "experts", "has_blocks"):
            fields[name] = value // factor
    return sizes._replace(**fields)


# --- Weights --------------------------------------------------------------------------------------


def weights_of(sizes: Sizes) -> Iterator[Weight]:
    """Yield all weights of a model in the order of its modules."""
    last = sizes.layers - 1
    embedding = (sizes.vocabulary, sizes.hidden)
    yield Weight("model.embed_tokens.weight", embedding, "BF16", 0, 0)
    for layer in range(sizes.layers):
        for name, shape, axis in (*_attention(sizes), *_norms(sizes)):
            yield from _stored(sizes, f"model.layers.{layer}.{name}", shape, axis, layer)
        if layer < sizes.dense_layers:
            yield from _mlp(sizes, f"model.layers.{layer}.mlp", sizes.inner, layer)
        else:
            yield from _experts(sizes, layer)
    yield Weight("model.norm.weight", (sizes.hidden,), "BF16", None, last)
    yield Weight("lm_head.weight", embedding, "BF16", 0, last)


_Named = tuple[str, tuple[int, ...], int | None]


def _norms(sizes: Sizes) -> Iterator[_Named]:
    yield "input_layernorm", (sizes.hidden,), None
    yield "post_attention_layernorm", (sizes.hidden,), None


def _attention(sizes: Sizes) -> Iterator[_Named]:
    hidden = sizes.hidden
    if not sizes.q_rank:
        yield "self_attn.q_proj", (sizes.q_dim, hidden), 0
        yield "self_attn.k_proj", (sizes.kv_dim, hidden), 0
        yield "self_attn.v_proj", (sizes.kv_dim, hidden), 0
        yield "self_attn.o_proj", (hidden, sizes.q_dim), 1
        return
    yield "self_attn.q_a_proj", (sizes.q_rank, hidden), None
    yield "self_attn.q_a_layernorm", (sizes.q_rank,), None
    yield "self_attn.q_b_proj", (sizes.q_dim, sizes.q_rank), 0
    yield "self_attn.kv_a_proj_with_mqa", (sizes.kv_rank + sizes.rope_dim, hidden), None
    yield "self_attn.kv_a_layernorm", (sizes.kv_rank,), None
    yield "self_attn.kv_b_proj", (sizes.kv_dim, sizes.kv_rank), 0
    yield "self_attn.o_proj", (hidden, sizes.v_dim), 1


def _mlp(
    sizes: Sizes, prefix: str, inner: int, layer: int, expert: int | None = None
) -> Iterator[Weight]:
    yield from _stored(sizes, f"{prefix}.gate_proj", (inner, sizes.hidden), 0, layer, expert)
    yield from _stored(sizes, f"{prefix}.up_proj", (inner, sizes.hidden), 0, layer, expert)
    yield from _stored(sizes, f"{prefix}.down_proj", (sizes.hidden, inner), 1, layer, expert)


def _experts(sizes: Sizes, layer: int) -> Iterator[Weight]:
    prefix = f"model.layers.{layer}.mlp"
    shape = (sizes.experts, sizes.hidden)
    yield Weight(f"{prefix}.gate.weight", shape, "BF16", None, layer)
    bias = f"{prefix}.gate.e_score_correction_bias"
    yield Weight(bias, (sizes.experts,), "F32", None, layer)
    for expert in range(sizes.experts):
        name = f"{prefix}.experts.{expert}"
        yield from _mlp(sizes, name, sizes.expert_inner, layer, expert)
    yield from _mlp(sizes, f"{prefix}.shared_experts", sizes.expert_inner, layer)


def _stored(
    sizes: Sizes,
    name: str,
    shape: tuple[int, ...],
    axis: int | None,
    layer: int,
    expert: int | None = None,
) -> Iterator[Weight]:
    """Yield a weight, and the scales of its blocks if it is stored in FP8."""
    if not sizes.has_blocks or len(shape) == 1:
        yield Weight(f"{name}.weight", shape, "BF16", axis, layer, expert)
        return
    yield Weight(f"{name}.weight", shape, "F8_E4M3", axis, layer, expert)
    scales = tuple(-(-size // BLOCK) for size in shape)
    yield Weight(f"{name}.weight_scale_inv", scales, "F32", axis, layer, expert)


# --- Files ----------------------------------------------------------------------------------------


def write_directory(
    folder: Path,
    weights: Sequence[Weight],
    file_bytes: int = FILE_BYTES,
    fill: Callable[[Weight], bytes] | None = None,
) -> int:
    """Write index and files; return their bytes. Tensors are holes unless `fill` gives them."""
    folder.mkdir(parents=True)
    files = list(_files_of(weights, file_bytes))
    weight_map = {}
    total = 0
    for number, members in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map.update(dict.fromkeys((weight.name for weight in members), name))
        total += _write_file(folder / name, members, fill)
    metadata = {"total_size": sum(weight.num_bytes for weight in weights)}
    index = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    (folder / "model.safetensors.index.json").write_text(index)
    return total + len(index)


def _files_of(weights: Sequence[Weight], file_bytes: int) -> Iterator[list[Weight]]:
    """Divide weights into files, and order each as safetensors does."""
    members: list[Weight] = []
    room = file_bytes
    for weight in weights:
        if members and weight.num_bytes > room:
            yield sorted(members, key=_place)
            members = []
            room = file_bytes
        members.append(weight)
        room -= weight.num_bytes
    yield sorted(members, key=_place)


def _place(weight: Weight) -> tuple[int, str]:
    return -ITEM_BYTES[weight.dtype], weight.name


def _write_file(
    path: Path, members: Sequence[Weight], fill: Callable[[Weight], bytes] | None
) -> int:
    entries = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in members:
        offsets = [end, end + weight.num_bytes]
        entries[weight.name] = {  # type: ignore[assignment]
            "dtype": weight.dtype,
            "shape": list(weight.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if fill is not None:
            for weight in members:
                file.write(fill(weight))
        size = 8 + len(text) + end
        file.truncate(size)
    return size
