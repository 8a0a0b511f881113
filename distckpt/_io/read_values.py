"""Reading regions of tensors, quantised ones among them: their codes and scales are read and become values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.threads import NUM_THREADS, run_threads
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.read import check_files, read_copies
from distckpt._plan.decoded import Piece, plan_decoding, target_of
from distckpt._plan.load import Copy
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
