"""Layouts of jobs, as a command line describes them: the regions that each rank holds.

Ranks are numbered as by torchtitan and Megatron Core: the ranks of a tensor parallel group are
neighbors, then come the shards of FSDP, then replicas, and last the stages of a pipeline.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distckpt._geometry.region import Region, whole, with_item
from distckpt.rules._mapped import TensorSpec

_COLUMNS = {
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "g_proj", "qkv_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in"),
    *("query_key_value", "dense_h_to_4h"),
    *("wq", "wk", "wv", "w1", "w3"),
    *("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_qkv", "linear_fc1"),
}
"""Layers whose output tensor parallelism divides: `colwise` in plans of transformers."""
_ROWS = {
    *("o_proj", "out_proj", "down_proj", "fc2", "fc_out"),
    *("dense_4h_to_h", "wo", "w2", "linear_proj", "linear_fc2"),
}
"""Layers whose input tensor parallelism divides: `rowwise`."""
_EMBEDDINGS = {"embed_tokens", "word_embeddings", "tok_embeddings", "wte", "embed_in"}
"""Embeddings, divided between rows. The last stage has them, too, where no output is stored."""
_OUTPUTS = {"lm_head", "output", "output_layer", "embed_out"}
"""Output layers outside of the stack of layers, divided like `_COLUMNS`."""
_ENDS = {*_OUTPUTS, "norm", "norm_f", "ln_f", "final_layernorm", "final_norm", "score", "mtp"}
"""Modules of the last stage of a pipeline; others outside of the stack are in the first."""
_PACKED = "gate_up_proj"
"""Experts' gate and up projection in one tensor: a rank has a part of each."""

_LAYER = re.compile(r"(?:^|.*?\.)(?:layers|h|blocks)\.(?=(\d+)\.)")
_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_TOWER = re.compile(r"vision|visual|audio")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_STACKED_EXPERTS = re.compile(r"(?:^|\.)experts\.(?!\d|experts\.)")


class Place(NamedTuple):
    """The place of a rank in each dimension of a layout.

    Ranks of one place hold the same. `expert` and `expert_shard` are those of experts' tensors.
    """

    stage: int
    shard: int
    tensor: int
    expert: int
    expert_shard: int


class Layout(NamedTuple):
    """The division of the ranks of a job.

    Attributes:
        num_ranks: the number of ranks.
        pp: pipeline stages.
        tp: tensor parallel ranks of a stage.
        fsdp: ranks between which FSDP shards the first axis of each tensor.
        ep: ranks between which experts are divided. These are then whole on their ranks, which
            borrows the ranks of `tp`.
        expert_fsdp: ranks between which FSDP shards experts.
    """

    num_ranks: int
    pp: int = 1
    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    expert_fsdp: int = 1

    @property
    def num_replicas(self) -> int:
        """The number of ranks that hold the same, experts apart."""
        return self.num_ranks // (self.pp * self.tp * self.fsdp)

    def place(self, rank: int) -> Place:
        """Return the place of a rank."""
        in_stage = self.num_ranks // self.pp
        stage, rest = divmod(rank, in_stage)
        shard = rest // self.tp % self.fsdp
        expert_shard = shard
        if self.ep > 1:
            expert_shard = rest // self.ep % self.expert_fsdp
        return Place(stage, shard, rest % self.tp, rest % self.ep, expert_shard)


def layout_of(num_ranks: int, degrees: Mapping[str, int]) -> Layout:
    """Divide ranks by the degrees of parallelism.

    Args:
        num_ranks: the number of ranks.
        degrees: of `pp`, `tp`, `fsdp` and `ep`; an `fsdp` of 0 stands for all ranks that are left.

    Raises:
        ValueError: they do not divide the ranks.
    """
    pp, tp, ep = (degrees.get(name, 1) for name in ("pp", "tp", "ep"))
    in_stage = _divided(num_ranks, "pp", pp, "")
    left = _divided(in_stage, "tp", tp, " of a pipeline stage")
    fsdp = degrees.get("fsdp", 1) or left
    _divided(left, "fsdp", fsdp, " that pp and tp leave")
    if "fsdp" not in degrees:
        _divided(in_stage, "ep", ep, " of a pipeline stage")
        return Layout(num_ranks, pp, tp, 1, ep)
    expert_fsdp = _divided(tp * fsdp, "ep", ep, " of tp and fsdp")
    return Layout(num_ranks, pp, tp, fsdp, ep, expert_fsdp if ep > 1 else fsdp)


def _divided(num_ranks: int, name: str, degree: int, which: str) -> int:
    if num_ranks % degree == 0:
        return num_ranks // degree
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    raise ValueError(
        f"{name}={degree} does not divide the {num_ranks} ranks{which}: use one of "
        f"{', '.join(map(str, divisors))}, or another number of ranks."
    )


# --- Tensors --------------------------------------------------------------------------------------


class Division(NamedTuple):
    """The division of all tensors of a shape and kind.

    Attributes:
        shape: the shape of the tensors.
        is_stacked: whether the first axis is that of layers, which stages divide.
        is_expert: whether they belong to experts.
        expert_axis: the axis of experts; None without one.
        axis: the axis that tensor parallelism divides; None if each rank has it whole.
        num_blocks: the blocks along `axis` that are divided one by one.
    """

    shape: tuple[int, ...]
    is_stacked: bool
    is_expert: bool
    expert_axis: int | None
    axis: int | None
    num_blocks: int


class DividedTensor(NamedTuple):
    """A tensor, and the ranks that hold parts of it.

    Attributes:
        key: its key.
        spec: its shape and dtype.
        stages: the stages of the pipeline that have it.
        expert: the place of the ranks that have its expert; None if all have it.
        division: its division between these ranks.
    """

    key: str
    spec: TensorSpec
    stages: Sequence[int]
    expert: int | None
    division: Division


@functools.lru_cache(maxsize=1 << 16)
def regions_at(division: Division, layout: Layout, place: Place) -> list[Region]:
    """Return the regions of a tensor at a place."""
    region = whole(division.shape)
    if division.is_stacked:
        region = _part(region, 0, place.stage, layout.pp)
    if division.expert_axis is not None:
        region = _part(region, division.expert_axis, place.expert, layout.ep)
    regions = [region]
    if division.axis is not None and not (division.is_expert and layout.ep > 1):
        parts = _parts(region, division.axis, place.tensor, layout.tp, division.num_blocks)
        regions = list(parts)
    if not region.shape:
        return regions
    shard = (place.shard, layout.fsdp)
    if division.is_expert:
        shard = (place.expert_shard, layout.expert_fsdp)
    shards = []
    for part in regions:
        shard_region = _part(part, 0, *shard)
        if shard_region.num_elements:
            shards.append(shard_region)
    return shards


def _parts(
    region: Region, axis: int, part: int, num_parts: int, num_blocks: int
) -> Iterator[Region]:
    """Yield a part of each block along an axis."""
    if num_parts == 1:
        num_blocks = 1
    for block in range(num_blocks):
        yield _part(_part(region, axis, block, num_blocks), axis, part, num_parts)


def _part(region: Region, axis: int, part: int, num_parts: int) -> Region:
    """Return a part along an axis, as `torch.chunk` divides it."""
    size = region.shape[axis]
    step = -(-size // num_parts)
    first = min(part * step, size)
    stop = min(first + step, size)
    offset = with_item(region.offset, axis, region.offset[axis] + first)
    return Region(offset, with_item(region.shape, axis, stop - first))


def divide_tensors(tensors: Mapping[str, TensorSpec], layout: Layout) -> list[DividedTensor]:
    """Divide tensors by their names in transformers, torchtitan and Megatron."""
    num_layers: dict[str, int] = {}
    num_experts = 1
    has_output = False
    for key in tensors:
        if match := _LAYER.match(key):
            num_layers[match[0]] = max(num_layers.get(match[0], 0), int(match[1]) + 1)
        if match := _EXPERT.search(key):
            num_experts = max(num_experts, int(match[1]) + 1)
        has_output = has_output or bool(_OUTPUTS & _modules_outside(key))
    divided = []
    for key, spec in tensors.items():
        stages = _stages_of(key, num_layers, layout, has_output)
        divided.append(_divide(key, spec, stages, layout, num_experts))
    return divided


def _divide(
    key: str, spec: TensorSpec, stages: Sequence[int], layout: Layout, num_experts: int
) -> DividedTensor:
    ndim = len(spec.shape)
    is_stacked = ndim > 1 and bool(_STACKED_LAYERS.search(key))
    expert_axis = None
    if ndim > 1 + is_stacked and _STACKED_EXPERTS.search(key):
        expert_axis = int(is_stacked)
    expert = None
    if number := _EXPERT.search(key):
        expert = int(number[1]) * layout.ep // num_experts
    division = Division(
        spec.shape,
        is_stacked=is_stacked,
        is_expert=(expert, expert_axis) != (None, None),
        expert_axis=expert_axis,
        axis=_axis_of(key, ndim, ndim - is_stacked - (expert_axis is not None)),
        num_blocks=1 + (expert_axis is not None and key.endswith(_PACKED)),
    )
    return DividedTensor(key, spec, range(layout.pp) if is_stacked else stages, expert, division)


def _modules_outside(key: str) -> set[str]:
    """Return the modules of a tensor outside of the stack of layers; none within."""
    if _LAYER.match(key) or _STACKED_LAYERS.search(key):
        return set()
    return set(key.split("."))


def _stages_of(
    key: str, num_layers: Mapping[str, int], layout: Layout, has_output: bool
) -> Sequence[int]:
    last = layout.pp - 1
    if _TOWER.search(key):
        return (0,)
    match = _LAYER.match(key)
    if match and not key.startswith("mtp."):
        return (int(match[1]) * layout.pp // num_layers[match[0]],)
    modules = set(key.split("."))
    if modules & _ENDS:
        return (last,)
    if modules & _EMBEDDINGS and not has_output:
        return (0, last)
    return (0,)


def _axis_of(key: str, ndim: int, ndim_of_layer: int) -> int | None:
    """Return the axis that tensor parallelism divides; None if it is not known."""
    names = key.split(".")
    outside = _modules_outside(key) & (_EMBEDDINGS | _OUTPUTS)
    known = _COLUMNS | _ROWS | outside
    place = next((i for i in reversed(range(len(names))) if names[i] in known), None)
    # Codes of some quantizations have other axes.
    if place is None or names[place + 1 : place + 2] not in ([], ["weight"], ["bias"]):
        return None
    is_row = names[place] in _ROWS
    if ndim_of_layer == 2:
        return ndim - 1 if is_row else ndim - 2
    if ndim_of_layer == 1 and not is_row:
        return ndim - 1
    return None


def whole_keys(tensors: Iterable[DividedTensor]) -> list[str]:
    """Return the matrices of which each tensor parallel rank has all."""
    keys = []
    for tensor in tensors:
        if (
            tensor.division.axis is None
            and len(tensor.spec.shape) > 1
            and 0 not in tensor.spec.shape
        ):
            keys.append(tensor.key)
    return keys
