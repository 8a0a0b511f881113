"""What is saved: a Llama with the two moments of Adam, divided over the ranks as tensor parallelism
does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

MAX_RANKS = 64
BYTES_PER_PARAMETER = 2 + 4 + 4


class Sizes(NamedTuple):
    """The sizes of the model."""

    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int
    num_layers: int

    def weights(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Return the global shape of each weight, and the axis that tensor parallelism divides;
        None for a copy.
        """
        hidden, intermediate, key_value = self.hidden, self.intermediate, self.key_value
        layer: dict[str, tuple[tuple[int, ...], int | None]] = {
            "self_attn.q_proj.weight": ((hidden, hidden), 0),
            "self_attn.k_proj.weight": ((key_value, hidden), 0),
            "self_attn.v_proj.weight": ((key_value, hidden), 0),
            "self_attn.o_proj.weight": ((hidden, hidden), 1),
            "mlp.gate_proj.weight": ((intermediate, hidden), 0),
            "mlp.up_proj.weight": ((intermediate, hidden), 0),
            "mlp.down_proj.weight": ((hidden, intermediate), 1),
            "input_layernorm.weight": ((hidden,), None),
            "post_attention_layernorm.weight": ((hidden,), None),
        }
        return {
            "embed_tokens.weight": ((self.vocabulary, hidden), 0),
            **{
                f"layers.{i}.{name}": weight
                for i in range(self.num_layers)
                for name, weight in layer.items()
            },
            "norm.weight": ((hidden,), None),
            "lm_head.weight": ((self.vocabulary, hidden), 0),
        }

    @property
    def num_bytes(self) -> int:
        """The size of weights and moments, all ranks together."""
        return sum(math.prod(shape) for shape, _ in self.weights().values()) * BYTES_PER_PARAMETER


class Part(NamedTuple):
    """The piece of a tensor that a rank holds: `axis` is divided evenly over the ranks, None for a
    copy.
    """

    local: torch.Tensor
    axis: int | None

    @property
    def num_bytes(self) -> int:
        """The size of the local tensor."""
        return self.local.numel() * self.local.element_size()


State = Mapping[str, Part]


def llama_sizes(gigabytes: float) -> Sizes:
    """Return sizes that make a state of about that size."""
    parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
    width = 4 if gigabytes >= 0.2 else 1
    hidden, intermediate, key_value = 256 * width, 704 * width, 64 * width
    vocabulary = max(256, int(min(parameters / 2e8, 1) * 32000) // 256 * 256)
    layer_parameters = 2 * hidden * (hidden + key_value) + 3 * hidden * intermediate
    num_layers = max(1, round((parameters - 2 * vocabulary * hidden) / layer_parameters))
    return Sizes(hidden, intermediate, key_value, vocabulary, num_layers)


def llama_state(sizes: Sizes) -> dict[str, Part]:
    """Make this rank's part of the state, with random values; copies are equal on all ranks."""
    num_ranks = dist.get_world_size()
    own, common = (torch.Generator().manual_seed(seed) for seed in (dist.get_rank() + 1, 0))
    state: dict[str, Part] = {}
    for prefix, dtype in (
        ("model.", torch.bfloat16),
        ("optimizer.exp_avg.", torch.float32),
        ("optimizer.exp_avg_sq.", torch.float32),
    ):
        for name, (shape, axis) in sizes.weights().items():
            local_shape = [size // num_ranks if i == axis else size for i, size in enumerate(shape)]
            generator = common if axis is None else own
            state[prefix + name] = Part(
                torch.empty(local_shape, dtype=dtype).normal_(generator=generator), axis
            )
    return state


def empty_like(state: State) -> dict[str, Part]:
    """Make memory of the same layout, which is there already when it is filled."""
    return {key: Part(torch.zeros_like(part.local), part.axis) for key, part in state.items()}


def across(state: State) -> dict[str, Part]:
    """Make memory for the tensors that are divided along axis 0, divided along axis 1."""
    num_ranks = dist.get_world_size()
    return {
        key: Part(
            torch.zeros(
                part.local.shape[0] * num_ranks,
                part.local.shape[1] // num_ranks,
                dtype=part.local.dtype,
            ),
            1,
        )
        for key, part in state.items()
        if part.axis == 0 and part.local.ndim == 2
    }


def whole(state: State) -> dict[str, torch.Tensor]:
    """Make memory for the whole tensors."""
    num_ranks = dist.get_world_size()
    return {
        key: torch.zeros(
            [n * num_ranks if i == part.axis else n for i, n in enumerate(part.local.shape)],
            dtype=part.local.dtype,
        )
        for key, part in state.items()
    }


def local_bytes(state: State) -> int:
    """Return how many bytes one rank has to write when replicated tensors are spread evenly."""
    num_ranks = dist.get_world_size()
    return sum(
        part.num_bytes if part.axis is not None else -(-part.num_bytes // num_ranks)
        for part in state.values()
    )


def differing_keys(state: State, axes: Mapping[str, int | None], loaded: State | None) -> list[str]:
    """Compare what was loaded under any layout with what was saved, by sums over the blocks that
    two ranks share.

    Collective operation: all ranks must call it.

    Args:
        state: what this rank has saved.
        axes: key -> axis that the tensor was divided along when it was loaded, None for a whole
            one.
        loaded: what this rank has loaded; None on all but rank 0 when that loaded alone.

    Returns:
        The keys that differ on any rank.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    loaders = torch.tensor(loaded is not None, dtype=torch.int64)
    dist.all_reduce(loaders)
    # saved[key, i, j] and found[key, i, j]: of the block in rank i's part of the saved and rank j's
    # of the loaded.
    saved = torch.zeros(len(axes), num_ranks, num_ranks, dtype=torch.int64)
    found = torch.zeros_like(saved)
    for index, (key, axis) in enumerate(axes.items()):
        was = state[key]
        for other in range(num_ranks):
            if axis is not None and axis == was.axis and other != rank:
                continue  # under one layout they share nothing
            saved[index, rank, other] = _digest(_block(was.local, axis, was.axis, other))
            if loaded is not None:
                found[index, other, rank] = _digest(
                    _block(loaded[key].local, was.axis, axis, other)
                )
    dist.all_reduce(saved)
    dist.all_reduce(found)
    wrong = (saved != found)[:, :, : int(loaders)].flatten(1).any(1)
    return [key for key, is_wrong in zip(axes, wrong.tolist(), strict=True) if is_wrong]


def _block(local: torch.Tensor, axis: int | None, own_axis: int | None, other: int) -> torch.Tensor:
    """Return what a part shares with that of another rank that is divided along `axis`."""
    if axis is None or axis == own_axis:
        return local
    size = local.shape[axis] // dist.get_world_size()
    return local.narrow(axis, other * size, size)


def _digest(block: torch.Tensor) -> int:
    integers = block.contiguous().view({2: torch.int16, 4: torch.int32}[block.element_size()])
    return int(integers.sum(dtype=torch.int64))
