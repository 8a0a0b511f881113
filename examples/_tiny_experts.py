"""Layers for the language model in `_tiny_lm`: a SwiGLU feed-forward layer and a mixture of such
experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tiny_lm import (
    WIDTH,
    Axis,
    Layout,
    ParallelModule,
    RowLinear,
    TinyLM,
    _SumGradientOverRanks,
    all_reduce,
)
from torch import Tensor, nn

from distckpt.experts import sequential_experts
from distckpt.factories import swiglu_factory

Offsets = tuple[tuple[int, int, int], ...]


class SwiGLU(ParallelModule):
    """Gated feed-forward layer; each rank computes some of the hidden features."""

    def __init__(self, layout: Layout, hidden: int, rng: torch.Generator) -> None:
        super().__init__(layout)
        halves = [torch.randn(hidden, WIDTH, generator=rng) * WIDTH**-0.5 for _ in range(2)]
        # One parameter: the first half is this rank's part of gate, the second half its part of up.
        self.gate_up = nn.Parameter(
            torch.cat([half.chunk(self.tp.size)[self.tp.rank] for half in halves])
        )
        self._split_axes["gate_up"] = 0
        self.down = RowLinear(layout, hidden, WIDTH, rng)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(_SumGradientOverRanks.apply(x, self.tp), self.gate_up).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def sharded_state_dict(self, prefix: str = "", offsets: Offsets = ()) -> dict[str, Any]:
        """See ParallelModule. Gate and up are sharded separately, so that any number of ranks can
        load them.
        """
        state = super().sharded_state_dict(prefix, offsets)
        state["gate_up"] = swiglu_factory(state["gate_up"])
        return state


class Router(ParallelModule):
    """Chooses an expert and a weight for each token; the same on all ranks."""

    def __init__(self, layout: Layout, num_experts: int, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.add_parameter("weight", torch.randn(num_experts, WIDTH, generator=rng) * WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).softmax(-1)


class MoE(ParallelModule):
    """A layer in which each token uses one expert. The experts are distributed over the data
    parallel ranks.
    """

    def __init__(self, layout: Layout, num_experts: int, hidden: int, rng: torch.Generator) -> None:
        super().__init__(layout)
        self.ep, self.num_local = layout.dp, num_experts // layout.dp.size
        self.first = self.ep.rank * self.num_local
        self.router = Router(layout, num_experts, rng)
        # Create all experts, so that the initial weights do not depend on the layout; keep only
        # this rank's.
        experts = [SwiGLU(layout, hidden, rng) for _ in range(num_experts)]
        self.experts = nn.ModuleList(experts[self.first : self.first + self.num_local])

    def forward(self, x: Tensor) -> Tensor:
        tokens = _Gather.apply(x.flatten(0, -2), self.ep)
        weights = _Gather.apply(self.router(x).flatten(0, -2), self.ep)
        chosen, output = weights.argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts, self.first):
            own = (chosen == number).nonzero().squeeze(-1)
            output = output.index_add(
                0, own, expert(tokens[own]) * weights[own, number].unsqueeze(-1)
            )
        return _Return.apply(output, self.ep).view_as(x)

    def sharded_state_dict(self, prefix: str = "", offsets: Offsets = ()) -> dict[str, Any]:
        """See ParallelModule. `sequential_experts` adds an axis with the global number of each
        expert.
        """
        experts = [
            expert.sharded_state_dict(f"{prefix}experts.", offsets) for expert in self.experts
        ]
        return {
            "router": self.router.sharded_state_dict(f"{prefix}router.", offsets),
            "experts": sequential_experts(experts, self.ep.rank, self.ep.size, expert_dp_rank=0),
        }


def _all_gather(x: Tensor, axis: Axis) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts)


class _Gather(torch.autograd.Function):
    """Gathers the tokens of all ranks on each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis).chunk(ctx.axis.size)[ctx.axis.rank], None


class _Return(torch.autograd.Function):
    """Sums the outputs of all ranks and returns to each rank those of its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x.clone(), axis).chunk(axis.size)[axis.rank]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.axis), None


def make_model(layout: Layout, seed: int, num_experts: int = 0) -> TinyLM:
    """Make the language model with SwiGLU layers, or with mixtures of experts if `num_experts` is
    not 0.
    """
    model = TinyLM(layout, seed)
    for layer in model.layers:
        rng = torch.Generator().manual_seed(seed + 100 + layer.number)
        layer.mlp = (
            MoE(layout, num_experts, WIDTH, rng) if num_experts else SwiGLU(layout, 2 * WIDTH, rng)
        )
    return model
