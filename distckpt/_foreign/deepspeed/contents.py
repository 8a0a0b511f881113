"""The contents of both kinds of DeepSpeed checkpoints, and their keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from distckpt._checkpoint.stored_pieces import StoredPiece

WEIGHT = "fp32"
"""The name of the weights themselves among the states of a parameter."""


class Contents(NamedTuple):
    """The contents of a checkpoint: tensors, aliases for tied ones, optimizer settings."""

    pieces: list[StoredPiece]
    aliases: dict[str, str]
    settings: list[dict[str, Any]]


def key_of(state: str, name: str) -> str:
    """Return the key of a parameter or of its optimizer state."""
    if state == WEIGHT:
        return name
    return f"optimizer.state.{state}.{name}"
