"""Reading regions of tensors whose values are computed: of quantised tensors, and of merged checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME, as_integers, is_summed
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.threads import NUM_THREADS, run_threads
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, covering, cut_region, whole
from distckpt._io.read import check_files, read_copies
from distckpt._plan.decoded import PIECE_ELEMENTS, Piece, plan_decoding, target_of
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._quantization.numbers import scratch
from distckpt._quantization.quantized import decode


def read_values(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    num_threads: int = NUM_THREADS,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill requested regions, see `read_copies`; those of quantised tensors too, in pieces that stay in cache."""
    if not stored.quantized:
        read_copies(stored, copies, targets, num_threads, progress)
        return
    read_copies(stored, [c for c in copies if c.chunk not in stored.quantized], targets, num_threads, progress)
    pieces = plan_decoding(stored, [copy for copy in copies if copy.chunk in stored.quantized])
    check_files(stored, [part.chunk for piece in pieces for part in piece.copies])
    run_threads(lambda piece: _read_piece(stored, piece, target_of(piece, targets), progress), pieces, num_threads)


def read_apart(
    stored: StoredCheckpoint,
    wanted: Sequence[tuple[Request, torch.Tensor]],
    num_threads: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill targets whose requests' elements lie apart, in pieces: what covers one is read, and its elements taken."""
    pieces = [
        (request, target, piece)
        for request, target in wanted
        for piece in cut_region(whole(request.region.shape), PIECE_ELEMENTS // math.prod(request.step))
    ]

    def read(item: tuple[Request, torch.Tensor, Region]) -> None:
        request, target, piece = item
        places = zip(request.region.offset, piece.offset, request.step, strict=True)
        cover = covering(Region(tuple(o + i * s for o, i, s in places), piece.shape), request.step)
        values = scratch("covering", cover.shape, FROM_NAME[stored.dtype_name(request.key)])
        copies = plan_load(stored, [request._replace(region=cover, step=())])
        read_values(stored, copies, [values], 1, progress)
        target[piece.slices()].copy_(values[tuple(slice(None, None, step) for step in request.step)])

    with torch.no_grad():
        run_threads(read, pieces, num_threads)


def read_requests(stored: StoredCheckpoint, requests: Sequence[Request], targets: Sequence[torch.Tensor]) -> None:
    """Fill requested regions in this thread; those of merged checkpoints with sums, rounded to the targets' dtypes."""
    if stored.sources:
        for request, target in zip(requests, targets, strict=True):
            _read_merged(stored, request, target)
    else:
        read_values(stored, plan_load(stored, requests), targets, num_threads=1)


def _read_merged(view: StoredCheckpoint, request: Request, target: torch.Tensor) -> None:
    dtype, shape = FROM_NAME[view.dtype_name(request.key)], request.region.shape
    wide = dtype if not is_summed(dtype) else torch.complex128 if dtype.is_complex else torch.float64
    is_direct = target.dtype == wide and target.is_contiguous()
    total = target if is_direct else scratch("sum", shape, wide)
    for index, (source, weight) in enumerate(view.sources):
        # Values of codes are more precise than the dtype in which the model has them.
        is_quantized = any(chunk in source.quantized for chunk in source.chunks_of(request.key)[:1])
        term_dtype = torch.float32 if is_quantized else FROM_NAME[source.dtype_name(request.key)]
        values = scratch("to merge", shape, term_dtype)
        read_requests(source, [request], [values])
        if is_summed(dtype):
            # Not `total.add_(values, alpha=weight)`, which rounds products or not, depending on where they are.
            terms = scratch("terms", shape, wide) if index else total
            terms.copy_(values).mul_(weight)
            if index:
                total.add_(terms)
        elif index == 0:
            as_integers(total).copy_(as_integers(values))
        elif not torch.equal(as_integers(values), as_integers(total)):
            raise CheckpointingException(
                f"Key {request.key!r} is {view.dtype_name(request.key)}, of which there is no sum, and its values in "
                f"{source.location!r} differ from those in {view.location!r}: leave the key out with `keys`."
            )
    if not is_direct:
        target.copy_(total)


def _read_piece(
    stored: StoredCheckpoint, piece: Piece, target: torch.Tensor, progress: Callable[[int], None] | None
) -> None:
    quantized = piece.quantized
    parts = {
        role: scratch(f"part {role}", region.shape, FROM_NAME[quantized.parts[role].dtype])
        for role, region in zip(piece.roles, piece.parts, strict=True)
    }
    read_copies(stored, piece.copies, list(parts.values()), 1, progress, with_check=False)
    if "shape" in parts and tuple(parts["shape"].tolist()) != quantized.shape:
        raise CorruptCheckpointError(
            f"Key {quantized.parts['codes'].key!r} in {stored.location!r} holds codes for the shape {quantized.shape}, "
            f"but the shape stored beside it is {parts['shape'].tolist()}: the files are damaged, or packed otherwise "
            "than they say. Request the stored dtypes to load what is there."
        )
    decode(quantized, parts, piece.region, target)
