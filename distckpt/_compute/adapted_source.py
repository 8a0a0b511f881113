"""Tensors of another source, with the changes of a PEFT adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._compute.adapter import Change
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read_values import read_requests
from distckpt._io.tensor_source import TensorSource, Wanted
from distckpt._plan.export import OutputTensor
from distckpt._plan.load import Request
from distckpt._storage.open_files import OpenFiles


class AdaptedSource(TensorSource):
    """Another source's values, with an adapter's changes to some tensors."""

    def __init__(
        self, values: TensorSource, adapter: StoredCheckpoint, changes: Mapping[str, Change]
    ) -> None:
        super().__init__(values.stored)
        self._values = values
        self._adapter = adapter
        self._changes = changes

    def with_files(self, files: OpenFiles) -> TensorSource:
        return AdaptedSource(
            self._values.with_files(files), self._adapter.with_files(files), self._changes
        )

    def is_stored(self, tensor: OutputTensor) -> bool:
        return tensor.name not in self._changes and self._values.is_stored(tensor)

    def may_overflow(self, tensor: OutputTensor) -> bool:
        return tensor.name in self._changes or self._values.may_overflow(tensor)

    def dtype_of(self, tensor: OutputTensor) -> torch.dtype:
        dtype = self._values.dtype_of(tensor)
        if tensor.name not in self._changes:
            return dtype
        # Torch does not promote 8-bit floats.
        if dtype.itemsize > 1:
            return torch.promote_types(dtype, torch.float32)
        return torch.float32

    def converts(self, tensor: OutputTensor) -> bool:
        return tensor.name not in self._changes and self._values.converts(tensor)

    def keys_besides(self, tensor: OutputTensor) -> list[str]:
        change = self._changes.get(tensor.name, Change())
        keys = [f"{key} of the adapter" for key in change.keys]
        return [*self._values.keys_besides(tensor), *keys]

    def read(self, wanted: Sequence[Wanted], factor: float = 1.0) -> None:
        self._values.read(wanted, factor)
        for tensor, region, view in wanted:
            change = self._changes.get(tensor.name)
            if change is not None:
                self._apply(change, region, view, factor)

    def _apply(
        self,
        change: Change,
        region: Region,
        view: torch.Tensor,
        factor: float,
    ) -> None:
        """Apply the adapter's change to a region of a tensor."""
        if change.replacement is not None:
            view.copy_(self._read_adapter(change.replacement, region, view.dtype))
        product = change.product
        if product is None:
            return
        if product.transposed:
            view = view.T
        row, column = region.offset[::-1] if product.transposed else region.offset
        num = max(product.num_experts, 1)
        rank = self._adapter.global_shape(product.a)[0]
        own_rank = rank // num
        rows = Region((row + product.first_row, 0), (view.shape[0], rank))
        columns = Region((product.expert * own_rank, column), (own_rank, view.shape[1]))
        b = self._read_adapter(product.b, rows, view.dtype)[:, product.expert :: num]
        a = self._read_adapter(product.a, columns, view.dtype)
        view.add_((b * (product.scaling * factor)) @ a)

    def _read_adapter(self, key: str, region: Region, dtype: torch.dtype) -> torch.Tensor:
        adapter = self._adapter
        values = torch.empty(region.shape, dtype=FROM_NAME[adapter.dtype_name(key)], device="cpu")
        request = Request(key, adapter.global_shape(key), region)
        read_requests(adapter, [request], [values])
        return values.to(dtype)
