"""Reading of tensor regions, and of the values of quantized tensors."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME, has_smaller_range
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.memory import Copier
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import NUM_THREADS, Progress, run_threads
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, covering, whole
from distckpt._geometry.units import cut_region
from distckpt._io.read import read_parts
from distckpt._io.read_parts import parts_of
from distckpt._plan.decoded import PIECE_ELEMENTS, Piece, plan_decoding, target_of
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._quantization.numbers import scratch
from distckpt._quantization.quantized import decode

logger = logging.getLogger(__name__)


def read_requests(
    stored: StoredCheckpoint,
    requests: Sequence[Request],
    targets: Sequence[torch.Tensor],
    num_threads: int = 1,
) -> None:
    """Fill requested regions in this thread, or in several, see `read_copies`."""
    read_copies(stored, plan_load(stored, requests), targets, num_threads)
    read_apart(stored, requests, targets, num_threads)


def read_copies(
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    num_threads: int = NUM_THREADS,
    progress: Progress | None = None,
    chunks: Sequence[int] = (),
) -> list[bytes]:
    """Fill requested regions, also of quantized tensors; return the bytes of whole `chunks`.

    `targets` has for each request a tensor of its region's shape, of any strides, device and dtype.
    Quantized tensors are decoded in pieces that stay in cache. For `progress` and errors see
    `read_parts`.
    """
    plain = copies
    pieces: list[Piece] = []
    if stored.quantized:
        plain = [copy for copy in copies if copy.chunk not in stored.quantized]
        pieces = plan_decoding(stored, copies)
    copier = Copier(targets)
    parts = parts_of(stored, plain, targets, copier)
    contents = read_parts(stored, parts, chunks, copier, num_threads, progress)
    run_threads(
        lambda piece: _read_piece(stored, piece, target_of(piece, targets), progress),
        pieces,
        num_threads,
    )
    return contents


def read_apart(
    stored: StoredCheckpoint,
    requests: Sequence[Request],
    targets: Sequence[torch.Tensor],
    num_threads: int,
    progress: Progress | None = None,
) -> None:
    """Fill the targets of those requests whose elements lie apart.

    They are read in pieces, together with the gaps between their elements.
    """
    pieces = []
    for request, target in zip(requests, targets, strict=True):
        if not request.step:
            continue
        region = whole(request.region.shape)
        for piece in cut_region(region, PIECE_ELEMENTS // math.prod(request.step)):
            pieces.append((request, target, piece))

    def read(item: tuple[Request, torch.Tensor, Region]) -> None:
        request, target, piece = item
        places = zip(request.region.offset, piece.offset, request.step, strict=True)
        offset = tuple(start + index * step for start, index, step in places)
        cover = covering(Region(offset, piece.shape), request.step)
        values = scratch("covering", cover.shape, FROM_NAME[stored.dtype_name(request.key)])
        copies = plan_load(stored, [request._replace(region=cover, step=())])
        read_copies(stored, copies, [values], 1, progress)
        target[piece.slices()].copy_(values[whole(piece.shape).slices(request.step)])

    if pieces:
        with torch.no_grad():
            run_threads(read, pieces, num_threads)


def warn_of_overflows(filled: Iterable[tuple[str, torch.dtype | None, torch.Tensor]]) -> None:
    """Warn about tensors that became infinite or NaN through conversion.

    Only conversions to a floating-point dtype with a smaller range count. Each tensor has its key,
    its dtype before (None if it has none), and its values now.
    """
    counts: Counter[str] = Counter()
    for key, dtype, target in filled:
        if dtype not in (target.dtype, None) and has_smaller_range(target.dtype, dtype):
            for piece in cut_region(whole(tuple(target.shape)), PIECE_ELEMENTS):
                counts[key] += int((~target[piece.slices()].float().isfinite()).sum())
    if counts := +counts:
        named = summarize_keys(counts)
        logger.warning(
            "%d values are not finite after conversion to a smaller range: %s",
            counts.total(),
            named,
        )


def _read_piece(
    stored: StoredCheckpoint,
    piece: Piece,
    target: torch.Tensor,
    progress: Progress | None,
) -> None:
    quantized = piece.quantized
    parts = {}
    for role, region in piece.parts.items():
        parts[role] = scratch(f"part {role}", region.shape, FROM_NAME[quantized.parts[role].dtype])
    read_copies(stored, piece.copies, list(parts.values()), 1, progress)
    if "shape" in parts and tuple(parts["shape"].tolist()) != quantized.shape:
        raise CorruptCheckpointError(
            f"Key {quantized.parts['codes'].key!r} in {stored.location!r} holds codes for the "
            f"shape {quantized.shape}, but the shape stored beside it is "
            f"{parts['shape'].tolist()}: the files are damaged, or packed otherwise than they say. "
            "Request the stored dtypes to load what is there."
        )
    decode(quantized, parts, piece.region, target)
