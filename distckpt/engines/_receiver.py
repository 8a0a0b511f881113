"""The model of an inference engine as the target of a `Route`: recorded once, then filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME, flat_bytes
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.options import MoveReport
from distckpt._geometry.region import Region
from distckpt._move.record_loader import LoaderTarget, record_loader
from distckpt._move.route import Route
from distckpt._operations.checkpoint import Checkpoint
from distckpt._operations.checkpoint import open as open_checkpoint


@dataclass(frozen=True)
class RouteInfo:
    """The facts an engine needs to take versions from a trainer.

    All of it can be sent as JSON.

        info = distckpt.engines.RouteInfo("trainer-0:29700", "models/qwen3")

    Attributes:
        address: of the trainer, see `distckpt.Route`.
        tensors: the tensors that the trainer sends: the path of a directory or checkpoint that has
            tensors of these names, shapes and dtypes, or `{name: [dtype, shape]}` with safetensors
            names of dtypes, such as `{"norm.weight": ["BF16", [64]]}`.
        check: with a path, compare the weights of the engine with the values stored there, and
            refuse an engine that has changed them after loading. False for an engine that was
            started with other weights.
        atomic: change weights only when all of a version has arrived. The same as on the trainer.
        allow_dtype_cast: see `MoveOptions`. The same as on the trainer.
        verify: compare the values that arrive with the values sent, see `Route.run`. The same as on
            the trainer.
        timeout: seconds to wait for the trainer.
    """

    address: str
    tensors: str | dict[str, list[Any]]
    check: bool = True
    atomic: bool = False
    allow_dtype_cast: bool = False
    verify: bool = False
    timeout: float = 600.0


class Receiver:
    """The parameters of a model as the target of a route.

    Args:
        model: has `load_weights` and parameters with memory.
        info: of the trainer.

    Raises:
        InvalidShardingError: the loader computes, or the model does not keep weights as its loader
            puts them.
        LoadMismatchError: its weights differ from the checkpoint.
    """

    def __init__(self, model: torch.nn.Module, info: RouteInfo) -> None:
        stored = None
        specs: Any
        if isinstance(info.tensors, dict):
            specs = _specs_of(info.tensors)
        else:
            specs = stored = open_checkpoint(info.tensors, as_stored=True)
        load_weights: Any = model.load_weights
        self.info = info
        self._target = record_loader(load_weights, specs, module=model)
        if stored is not None and info.check:
            _check_equal(self._target, stored)
        self._route = Route(
            info.address,
            target=self._target,
            timeout=info.timeout,
            atomic=info.atomic,
            allow_dtype_cast=info.allow_dtype_cast,
        )

    def run(self, version: int | None) -> MoveReport:
        """Take a version, None for the next one.

        Raises:
            InvalidShardingError: the engine has moved its parameters. Nothing is changed.
        """
        self._target.check_memory()
        return self._route.run(version, verify=self.info.verify)

    def close(self) -> None:
        """Leave the route."""
        self._route.close()


def _specs_of(tensors: dict[str, list[Any]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    unknown = {str(dtype) for dtype, _ in tensors.values()} - FROM_NAME.keys()
    if unknown:
        raise ValueError(f"unknown dtypes {sorted(unknown)}: use {sorted(FROM_NAME)}")
    return {name: (tuple(shape), FROM_NAME[dtype]) for name, (dtype, shape) in tensors.items()}


def _check_equal(target: LoaderTarget, stored: Checkpoint) -> None:
    """Refuse a model whose memory differs from its loader's result."""
    different = set()
    for shard in target.values():
        region = Region(shard.global_offset, shard.local_shape)
        if not _holds(shard.data, stored.read(shard.key, region.slices())):
            different.add(shard.key)
    if different:
        raise LoadMismatchError(
            f"The engine does not hold {summarize_keys(sorted(different))} as its loader has put "
            f"what {stored.location} has: it changes the layout of weights after loading, and has "
            "to load updates itself; or it was started with other weights, then set check=False.",
            unexpected=different,
        )


def _holds(data: torch.Tensor | None, values: torch.Tensor) -> bool:
    if data is None:
        return False
    expected = values.to(data.dtype).view(data.shape)
    # As bytes, since NaN does not equal itself.
    return torch.equal(flat_bytes(data.cpu()), flat_bytes(expected))
