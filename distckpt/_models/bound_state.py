"""Shards that are views of the memory of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import summarize_keys
from distckpt.mapping._sharded_tensor import ShardedTensor


class BoundState(dict[str, ShardedTensor]):
    """Sharded state dict of a module, valid while it keeps its memory.

    Attributes:
        module: whose memory it is; None where that is not known.
        memory: the tensors of the module by name, as they were when this was made.
    """

    module: torch.nn.Module | None = None
    memory: Mapping[str, torch.Tensor]

    def check_memory(self) -> None:
        """Refuse to be used when the module has other memory by now.

        Raises:
            InvalidShardingError: it has. Loaded values would not reach the module.
        """
        # The same memory: its storage may have been freed and made anew.
        now = {name: place_of(tensor) for name, tensor in named_tensors(self.module)}
        moved = [name for name, old in self.memory.items() if now.get(name) != place_of(old)]
        if moved:
            raise InvalidShardingError(
                f"The module has replaced the memory of {summarize_keys(moved)} since its loader "
                "was recorded (moved, converted, or made anew), so that nothing of it would be "
                "filled. Record it again: with record_loader, and a new Route for what it returns, "
                "or by sending the engine another RouteInfo, with check=False."
            )


def named_tensors(module: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a module; nothing where it is not known."""
    if module is not None:
        values = module.state_dict(keep_vars=True).items()
        yield from (pair for pair in values if isinstance(pair[1], torch.Tensor))


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key of a tensor's memory, and its layout there."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
