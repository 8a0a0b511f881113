"""Weighted sums of several checkpoints' tensors, computed in float64 and rounded once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, as_integers, is_summed
from distckpt._base.errors import CheckpointingException
from distckpt._base.threads import UNIT_BYTES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.units import cut_region
from distckpt._io.export import round_once
from distckpt._io.read_values import read_requests
from distckpt._io.tensor_source import TensorSource
from distckpt._plan.export import OutputTensor
from distckpt._plan.load import Request
from distckpt._quantization.numbers import scratch
from distckpt._storage.open_files import OpenFiles

_TERMS_BYTES = 2 * UNIT_BYTES
"""Size of the values of all checkpoints that are summed together."""
_SUMMED_AT_ONCE = 1 << 17
"""Elements that are summed at a time. Their sums stay in the cache that the processors share; with
fewer, calls would cost as much as additions.
"""


class SummedSource(TensorSource):
    """Weighted sums of the tensors of several checkpoints, rounded once.

    Tensors that cannot be added, such as integers, must be equal in all of them.
    """

    def __init__(
        self,
        view: StoredCheckpoint,
        terms: Sequence[StoredCheckpoint],
        weights: Sequence[float],
        decay: float = 1.0,
    ) -> None:
        """Sum the checkpoints in `terms`, times their weights.

        `view` describes the sums. A sum is multiplied with `decay` before each further term.
        """
        super().__init__(view)
        self._terms = terms
        self._weights = weights
        self._decay = decay

    def with_files(self, files: OpenFiles) -> TensorSource:
        terms = [term.with_files(files) for term in self._terms]
        return SummedSource(self.stored, terms, self._weights, self._decay)

    def is_stored(self, tensor: OutputTensor) -> bool:
        return False

    def may_overflow(self, tensor: OutputTensor) -> bool:
        return is_summed(FROM_NAME[tensor.mapped.dtype])

    def dtype_of(self, tensor: OutputTensor) -> torch.dtype:
        dtype = FROM_NAME[tensor.mapped.dtype]
        if not is_summed(dtype):
            return dtype
        return torch.complex128 if dtype.is_complex else torch.float64

    def converts(self, tensor: OutputTensor) -> bool:
        if not is_summed(FROM_NAME[tensor.mapped.dtype]):
            return super().converts(tensor)
        target = FROM_NAME[tensor.dtype]
        is_rounded_last = not any(part.add or part.factor != 1.0 for part in tensor.mapped.parts)
        return is_rounded_last and (target.is_floating_point or target.is_complex)

    def read_requests(
        self, requests: Sequence[Request], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        _check_are_dense(requests)
        weights = [weight * factor for weight in self._weights]
        for dtypes, batch in _batches(self.stored, self._terms, requests, views):
            requested = [request for request, _ in batch]
            terms = _read_terms(self._terms, dtypes, requested)
            view = batch[0][1]
            is_direct = len(batch) == 1 and view.is_contiguous()
            goal = view.view(-1) if is_direct else scratch("rounded", terms[0].shape, view.dtype)
            if is_summed(FROM_NAME[self.stored.dtype_name(requested[0].key)]):
                _fill_with_sum(goal, terms, weights, self._decay)
            else:
                _check_equal(self._terms, requested, terms)
                goal.copy_(terms[0])
            if not is_direct:
                for (_, view), values in zip(batch, _divided(goal, requested), strict=True):
                    view.copy_(values)


def _check_are_dense(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.step:
            raise CheckpointingException(
                f"The rules take elements of {request.key!r} that lie apart, which a merge does "
                "not do: merge exports of the checkpoints."
            )


def _batches(
    view: StoredCheckpoint,
    terms: Sequence[StoredCheckpoint],
    requests: Sequence[Request],
    targets: Sequence[torch.Tensor],
) -> Iterator[tuple[list[torch.dtype], list[tuple[Request, torch.Tensor]]]]:
    """Divide requests into batches that need little memory. Yield each batch with its dtypes."""
    batch: list[tuple[Request, torch.Tensor]] = []
    room = 0
    kind = None
    dtypes: list[torch.dtype] = []
    for request, target in zip(requests, targets, strict=True):
        count = request.region.num_elements
        next_dtypes = [_term_dtype(term, request.key) for term in terms]
        next_kind = (view.dtype_name(request.key), target.dtype, next_dtypes)
        size = sum(dtype.itemsize for dtype in next_dtypes)
        # Pieces of even size: each is a plan of its own.
        for piece in cut_region(
            request.region, -(-count // -(-count * size // _TERMS_BYTES)) if count else 1
        ):
            if piece.num_elements * size > room or next_kind != kind:
                if batch:
                    yield dtypes, batch
                batch = []
                room = _TERMS_BYTES
                kind = next_kind
                dtypes = next_dtypes
            batch.append(
                (
                    request._replace(region=piece),
                    target[piece.relative_to(request.region.offset).slices()],
                )
            )
            room -= piece.num_elements * size
    if batch:
        yield dtypes, batch


def _term_dtype(source: StoredCheckpoint, key: str) -> torch.dtype:
    """Return the dtype to read. Values of codes are more precise than the model's dtype."""
    is_quantized = any(chunk in source.quantized for chunk in source.chunks_of(key)[:1])
    if is_quantized:
        return torch.float32
    return FROM_NAME[source.dtype_name(key)]


def _read_terms(
    stored: Sequence[StoredCheckpoint],
    dtypes: Sequence[torch.dtype],
    requests: Sequence[Request],
) -> list[torch.Tensor]:
    """Return the values of each checkpoint, in scratch memory.

    They are flat, one request after the other.
    """
    count = sum(request.region.num_elements for request in requests)
    terms: list[torch.Tensor] = []
    for number, (source, dtype) in enumerate(zip(stored, dtypes, strict=True)):
        terms.append(scratch(f"term {number}", (count,), dtype))
        read_requests(source, requests, _divided(terms[-1], requests))
    return terms


def _divided(values: torch.Tensor, requests: Sequence[Request]) -> list[torch.Tensor]:
    """View flat memory as the regions of requests, in order."""
    ends = itertools.accumulate(request.region.num_elements for request in requests)
    views = []
    for end, request in zip(ends, requests, strict=True):
        views.append(values[end - request.region.num_elements : end].view(request.region.shape))
    return views


def _fill_with_sum(
    target: torch.Tensor, terms: Sequence[torch.Tensor], weights: Sequence[float], decay: float
) -> None:
    """Round the sum of flat terms times their weights, computed in float64.

    Before each further term, the sum is multiplied with `decay`.
    """
    target, terms = _real_parts(target, terms)
    with np.errstate(all="ignore"):
        for low in range(0, len(target), _SUMMED_AT_ONCE):
            place = target[low : low + _SUMMED_AT_ONCE]
            total = scratch("sum", place.shape, torch.float64)
            product = scratch("product", place.shape, torch.float64)
            for index, (values, weight) in enumerate(zip(terms, weights, strict=True)):
                part = values[low : low + _SUMMED_AT_ONCE]
                goal = product if index else total
                # Torch widens float16 fast to float32 only. Not `total.add_(part, alpha=weight)`,
                # which rounds products or not, depending on where they are.
                goal.copy_(part.float() if part.dtype == torch.float16 else part)
                np.multiply(goal.numpy(), weight, out=goal.numpy())
                if index and decay != 1:
                    np.multiply(total.numpy(), decay, out=total.numpy())
                if index:
                    np.add(total.numpy(), product.numpy(), out=total.numpy())
            round_once(total, place)


def _real_parts(
    target: torch.Tensor, terms: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """View complex values as real and imaginary parts: the weights are real."""
    if not (target.dtype.is_complex and any(values.dtype.is_complex for values in terms)):
        return target, terms
    parts = [values.to(torch.complex64).view(torch.float32) for values in terms]
    return target.view(target.dtype.to_real()), parts


def _check_equal(
    stored: Sequence[StoredCheckpoint], requests: Sequence[Request], terms: Sequence[torch.Tensor]
) -> None:
    """Check that tensors that cannot be added are equal in all checkpoints."""
    first, *others = [_divided(as_integers(values), requests) for values in terms]
    for source, values in zip(stored[1:], others, strict=True):
        for request, one, other in zip(requests, first, values, strict=True):
            if not torch.equal(one, other):
                dtype = source.dtype_name(request.key)
                raise CheckpointingException(
                    f"Key {request.key!r} is {dtype}, of which there is no sum, and its values in "
                    f"{source.location!r} differ from those in {stored[0].location!r}: leave the "
                    "key out with `keys`."
                )
