"""Reading merged checkpoints: sums of the values of several, computed in float64 and rounded
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, as_integers, is_summed
from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import bounce_buffer
from distckpt._base.threads import UNIT_BYTES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.units import cut_region
from distckpt._io.read_values import read_values
from distckpt._plan.load import Request, plan_load
from distckpt._quantization.numbers import scratch

_TERMS_BYTES = 2 * UNIT_BYTES
"""So much is read of all checkpoints together before it is summed."""
_SUMMED_AT_ONCE = 1 << 17
"""Elements: their sums stay in the cache that processors share, and fewer would cost as much for
calls as for sums.
"""


def read_requests(
    stored: StoredCheckpoint, requests: Sequence[Request], targets: Sequence[torch.Tensor]
) -> None:
    """Fill requested regions in this thread; those of merged checkpoints with sums, rounded to the
    targets' dtypes.
    """
    if not stored.sources:
        read_values(stored, plan_load(stored, requests), targets, num_threads=1)
        return
    for dtypes, batch in _batches(stored, requests, targets):
        wanted = [request for request, _ in batch]
        terms = _read_terms(stored, dtypes, wanted)
        target = batch[0][1]
        is_direct = len(batch) == 1 and target.is_contiguous()
        goal = target.view(-1) if is_direct else scratch("rounded", terms[0].shape, target.dtype)
        if is_summed(FROM_NAME[stored.dtype_name(wanted[0].key)]):
            _fill_with_sum(goal, terms, [weight for _, weight in stored.sources])
        else:
            _check_equal(stored, wanted, terms)
            goal.copy_(terms[0])
        if not is_direct:
            for (_, target), part in zip(batch, _divided(goal, wanted), strict=True):
                target.copy_(part)


def round_once(values: torch.Tensor, target: torch.Tensor) -> None:
    """Convert values, overwriting those in float64, which torch takes to 16 and 8 bits by way of
    float32.

    So that this does not round twice, they are shortened first: of the digits that are cut off, the
    last one that stays says whether there was any (as many as 13 stay). The scratch memory is that
    of products, which is in cache.
    """
    if (
        values.dtype == torch.float64
        and target.dtype.is_floating_point
        and target.dtype.itemsize < 4
    ):
        bits, cut = values.view(torch.int64).numpy(), (1 << 40) - 1
        rest = np.bitwise_and(bits, cut, out=scratch("product", bits.shape, torch.int64).numpy())
        np.bitwise_or(bits, np.add(rest, cut, out=rest), out=bits)
        np.bitwise_and(bits, ~cut, out=bits)
    target.copy_(values)


def _batches(
    view: StoredCheckpoint, requests: Sequence[Request], targets: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.dtype], list[tuple[Request, torch.Tensor]]]]:
    """Divide requests so that all values for a batch, of the same dtypes, need little memory; yield
    these dtypes.
    """
    batch: list[tuple[Request, torch.Tensor]] = []
    room, kind = 0, None
    dtypes: list[torch.dtype] = []
    for request, target in zip(requests, targets, strict=True):
        count = request.region.num_elements
        next_dtypes = [_term_dtype(source, request.key) for source, _ in view.sources]
        next_kind = (view.dtype_name(request.key), target.dtype, next_dtypes)
        size = sum(dtype.itemsize for dtype in next_dtypes)
        # Pieces of even size: each is a plan of its own.
        for piece in cut_region(
            request.region, -(-count // -(-count * size // _TERMS_BYTES)) if count else 1
        ):
            if piece.num_elements * size > room or next_kind != kind:
                if batch:
                    yield dtypes, batch
                batch, room, kind, dtypes = [], _TERMS_BYTES, next_kind, next_dtypes
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
    """Return the dtype to read: values of codes are more precise than the dtype in which the model
    has them.
    """
    is_quantized = any(chunk in source.quantized for chunk in source.chunks_of(key)[:1])
    return torch.float32 if is_quantized else FROM_NAME[source.dtype_name(key)]


def _read_terms(
    view: StoredCheckpoint, dtypes: Sequence[torch.dtype], requests: Sequence[Request]
) -> list[torch.Tensor]:
    """Return the values of each checkpoint, those of one request after the other, in scratch
    memory.
    """
    count = sum(request.region.num_elements for request in requests)
    starts = list(
        itertools.accumulate((-(-count * dtype.itemsize // 64) * 64 for dtype in dtypes), initial=0)
    )
    memory = torch.from_numpy(bounce_buffer("terms", starts[-1]))
    terms: list[torch.Tensor] = []
    for (source, _), dtype, start in zip(view.sources, dtypes, starts, strict=False):
        terms.append(memory[start : start + count * dtype.itemsize].view(dtype))
        read_values(
            source, plan_load(source, requests), _divided(terms[-1], requests), num_threads=1
        )
    return terms


def _divided(values: torch.Tensor, requests: Sequence[Request]) -> list[torch.Tensor]:
    """View flat memory as the regions of requests, one after the other."""
    ends = itertools.accumulate(request.region.num_elements for request in requests)
    return [
        values[end - request.region.num_elements : end].view(request.region.shape)
        for end, request in zip(ends, requests, strict=True)
    ]


def _fill_with_sum(
    target: torch.Tensor, terms: Sequence[torch.Tensor], weights: Sequence[float]
) -> None:
    """Round the sum of flat terms times their weights, each product and sum in float64."""
    if target.dtype.is_complex and any(values.dtype.is_complex for values in terms):
        # Part by part: the weights are real.
        target = target.view(target.dtype.to_real())
        terms = [values.to(torch.complex64).view(torch.float32) for values in terms]
    with np.errstate(all="ignore"):
        for low in range(0, len(target), _SUMMED_AT_ONCE):
            place = target[low : low + _SUMMED_AT_ONCE]
            total, product = (
                scratch(name, place.shape, torch.float64) for name in ("sum", "product")
            )
            for index, (values, weight) in enumerate(zip(terms, weights, strict=True)):
                part, goal = values[low : low + _SUMMED_AT_ONCE], product if index else total
                # Torch widens float16 fast to float32 only. Not `total.add_(part, alpha=weight)`,
                # which rounds products or not, depending on where they are.
                goal.copy_(part.float() if part.dtype == torch.float16 else part)
                np.multiply(goal.numpy(), weight, out=goal.numpy())
                if index:
                    np.add(total.numpy(), product.numpy(), out=total.numpy())
            round_once(total, place)


def _check_equal(
    view: StoredCheckpoint, requests: Sequence[Request], terms: Sequence[torch.Tensor]
) -> None:
    """Refuse different values of tensors of which there is no sum."""
    first, *others = [_divided(as_integers(values), requests) for values in terms]
    for (source, _), values in zip(view.sources[1:], others, strict=True):
        for request, one, other in zip(requests, first, values, strict=True):
            if not torch.equal(one, other):
                raise CheckpointingException(
                    f"Key {request.key!r} is {view.dtype_name(request.key)}, of which there is no "
                    f"sum, and its values in {source.location!r} differ from those in "
                    f"{view.location!r}: leave the key out with `keys`."
                )
