"""A tiny transformer language model with tensor, pipeline and data parallel layers.

Every module describes how its weights are distributed over the processes (`sharded_state_dict`).
This is all distckpt needs to save the model under one layout and load it under another; the rest is
an ordinary Megatron-like model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distckpt.modules import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)

VOCAB, CONTEXT, WIDTH, NUM_HEADS, NUM_LAYERS, DROPOUT = 256, 64, 64, 4, 4, 0.1


# --- Layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """The processes that differ from this one only along one axis of the process grid.

    Attributes:
        ranks: their global ranks, in order.
        rank: this process's position among them.
        group: their process group; None for one process alone.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of processes along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class Layout:
    """A grid of data x pipeline x tensor parallel processes. The default is one process without a
    process group.
    """

    dp: Axis = Axis()
    pp: Axis = Axis()
    tp: Axis = Axis()
    world: Axis = Axis()


def make_layout(tp: int, pp: int, dp: int) -> Layout | None:
    """Lay out the first dp * pp * tp ranks as a grid; None on the other ranks, which must call this
    as well.
    """
    grid = torch.arange(dp * pp * tp).view(dp, pp, tp)
    axes = []
    for lines in (*(grid.movedim(axis, -1).flatten(0, 1) for axis in range(3)), grid.view(1, -1)):
        for ranks in lines.tolist():
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                axes.append(Axis(tuple(ranks), ranks.index(dist.get_rank()), group))
    return Layout(*axes) if axes else None


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Combine a tensor over the processes of an axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, op, group=axis.group)
    return x


# --- Tensor parallelism ---------------------------------------------------------------------------


class _SumOverRanks(torch.autograd.Function):
    """Sum forward, identity backward: joins the partial results of the tensor parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        return all_reduce(x.clone(), tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradientOverRanks(torch.autograd.Function):
    """Identity forward, sum backward: passes one activation to all tensor parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.tp), None


class ParallelModule(nn.Module):
    """A module whose parameters may be sharded over the tensor parallel ranks."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.tp = layout, layout.tp
        self._split_axes: dict[str, int | None] = {}

    def add_parameter(self, name: str, full: Tensor, split_axis: int | None = None) -> None:
        """Register this rank's part of a full tensor as a parameter; without a `split_axis`, all of
        it.
        """
        if split_axis is not None:
            full = full.chunk(self.tp.size, split_axis)[self.tp.rank].clone()
        self.register_parameter(name, nn.Parameter(full))
        self._split_axes[name] = split_axis

    def sharded_state_dict(
        self, prefix: str = "", offsets: tuple[tuple[int, int, int], ...] = ()
    ) -> dict[str, Any]:
        """Describe the part of a global tensor that each parameter is.

        Args:
            prefix: prefix of the keys of the global tensors.
            offsets: additional leading axes of the global tensors, as (axis, position, size); a
                layer passes its number here.
        """
        state: dict[str, Any] = {}
        for name, child in self.named_children():
            state[name] = child.sharded_state_dict(f"{prefix}{name}.", offsets)
        for name, parameter in self.named_parameters(recurse=False):
            axis, key = self._split_axes[name], prefix + name
            # Nobody says which copies there are: save finds out when the shards of all ranks are
            # known.
            if axis is None:
                state[name] = make_sharded_tensor_for_checkpoint(parameter, key, offsets)
            else:
                tp = (self.tp.rank, self.tp.size)
                state[name] = make_tp_sharded_tensor_for_checkpoint(
                    parameter, key, axis, prepend_offsets=offsets, tp_group=tp
                )
        return state


class ColumnLinear(ParallelModule):
    """A linear layer; each rank computes some of the output features."""

    def __init__(self, layout: Layout, inputs: int, outputs: int, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.add_parameter(
            "weight", torch.randn(outputs, inputs, generator=rng) * inputs**-0.5, split_axis=0
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_SumGradientOverRanks.apply(x, self.tp), self.weight)


class RowLinear(ParallelModule):
    """A linear layer; each rank holds some of the input features, and the partial results are
    summed.
    """

    def __init__(self, layout: Layout, inputs: int, outputs: int, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.add_parameter(
            "weight", torch.randn(outputs, inputs, generator=rng) * inputs**-0.5, split_axis=1
        )

    def forward(self, x: Tensor) -> Tensor:
        return _SumOverRanks.apply(F.linear(x, self.weight), self.tp)


def _own_ids(ids: Tensor, num_own: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """Convert token ids to indices into this rank's part of the vocabulary; also return which are
    in it.
    """
    own = ids - tp.rank * num_own
    return own.clamp(0, num_own - 1), (own >= 0) & (own < num_own)


def cross_entropy(logits: Tensor, targets: Tensor, tp: Axis) -> Tensor:
    """Mean cross entropy where each rank has the logits of its part of the vocabulary, [..., VOCAB
    / tp].
    """
    logits = logits - all_reduce(logits.detach().amax(-1, keepdim=True), tp, dist.ReduceOp.MAX)
    ids, is_own = _own_ids(targets, logits.size(-1), tp)
    target_logit = _SumOverRanks.apply(
        logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * is_own, tp
    )
    return (_SumOverRanks.apply(logits.exp().sum(-1), tp).log() - target_logit).mean()


# --- The model ------------------------------------------------------------------------------------


def dropout(x: Tensor, seed: int) -> Tensor:
    """Apply dropout with a mask that depends only on the seed, so that it is the same in every
    layout.
    """
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= DROPOUT
    return x * kept / (1 - DROPOUT)


class Norm(ParallelModule):
    """Layer normalization."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.add_parameter("weight", torch.ones(WIDTH))
        self.add_parameter("bias", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias)


class Embedding(ParallelModule):
    """Token and position embeddings; each rank holds some of the vocabulary."""

    def __init__(self, layout: Layout, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.add_parameter("tokens", torch.randn(VOCAB, WIDTH, generator=rng) * 0.1, split_axis=0)
        self.add_parameter("positions", torch.randn(CONTEXT, WIDTH, generator=rng) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        ids, is_own = _own_ids(tokens, len(self.tokens), self.tp)
        return (
            _SumOverRanks.apply(F.embedding(ids, self.tokens) * is_own.unsqueeze(-1), self.tp)
            + self.positions
        )


class Attention(ParallelModule):
    """Causal self-attention; each rank computes some of the heads."""

    def __init__(self, layout: Layout, rng: torch.Generator) -> None:
        super().__init__(layout)
        # Rows are ordered by head, so that each part consists of complete heads.
        self.qkv = ColumnLinear(layout, WIDTH, 3 * WIDTH, rng)
        self.out = RowLinear(layout, WIDTH, WIDTH, rng)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (NUM_HEADS // self.tp.size, 3, -1))
        query, key, value = heads.transpose(1, 2).unbind(3)
        return self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class MLP(ParallelModule):
    """Feed-forward layer; each rank holds some of the hidden features."""

    def __init__(self, layout: Layout, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.up = ColumnLinear(layout, WIDTH, 4 * WIDTH, rng)
        self.down = RowLinear(layout, 4 * WIDTH, WIDTH, rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(ParallelModule):
    """One transformer layer, with its number in the complete model, regardless of its stage."""

    def __init__(self, layout: Layout, number: int, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.number = number
        self.attention_norm, self.attention = Norm(layout), Attention(layout, rng)
        self.mlp_norm, self.mlp = Norm(layout), MLP(layout, rng)

    def forward(self, x: Tensor, seed: int) -> Tensor:
        x = x + dropout(self.attention(self.attention_norm(x)), seed + 2 * self.number)
        return x + dropout(self.mlp(self.mlp_norm(x)), seed + 2 * self.number + 1)


class Head(ParallelModule):
    """The end of the model; each rank computes the logits of some of the vocabulary."""

    def __init__(self, layout: Layout, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.norm, self.output = Norm(layout), ColumnLinear(layout, WIDTH, VOCAB, rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class TinyLM(ParallelModule):
    """This process's pipeline stage of the model: tokens or activations in, activations or logits
    out.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__(layout)
        # One generator per layer, so that the initial weights do not depend on the layout.
        rngs = [torch.Generator().manual_seed(seed + i) for i in range(NUM_LAYERS + 2)]
        pp, per_stage = layout.pp, NUM_LAYERS // layout.pp.size
        numbers = range(pp.rank * per_stage, (pp.rank + 1) * per_stage)
        self.layers = nn.ModuleList(Layer(layout, number, rngs[number]) for number in numbers)
        self.embedding = Embedding(layout, rngs[-2]) if pp.rank == 0 else None
        self.head = Head(layout, rngs[-1]) if pp.rank == pp.size - 1 else None

    def forward(self, x: Tensor, seed: int) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, seed)
        return x if self.head is None else self.head(x)

    def sharded_state_dict(
        self, prefix: str = "", offsets: tuple[tuple[int, int, int], ...] = ()
    ) -> dict[str, Any]:
        """See ParallelModule.

        All layers share their keys: `decoder.layers.mlp.up.weight` is one global tensor of shape
        [NUM_LAYERS, 4 * WIDTH, WIDTH]. Each pipeline stage holds some indices of the first axis.
        """
        state: dict[str, Any] = {}
        for name, child in (("embedding", self.embedding), ("head", self.head)):
            if child is not None:
                state[name] = child.sharded_state_dict(f"{prefix}{name}.", offsets)
        state["layers"] = [
            layer.sharded_state_dict(
                f"{prefix}decoder.layers.", (*offsets, (len(offsets), layer.number, NUM_LAYERS))
            )
            for layer in self.layers
        ]
        return state
