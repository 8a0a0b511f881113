"""Tensors that an export computes: with adapters merged in, quantized on write.

Each option imports its own machinery.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.export_plan import ExportPlan
from distckpt._ranks.collectives import Ranks
from distckpt.rules._mapped import TensorSpec
from distckpt.rules._rule import Rule


def check_is_adapter(ranks: Ranks, location: str) -> None:
    """Check that a directory has the files of an adapter, see `_compute.merge_adapter`."""
    from distckpt._compute import merge_adapter

    merge_adapter.check_is_adapter(ranks, location)


def check_formats(quantize: str | Mapping[str, str]) -> None:
    """Check that the names of formats are known."""
    from distckpt._compute.quantize_plan import formats_by_pattern

    formats_by_pattern(quantize)


def rules_of_adapters(
    rules: Sequence[Rule], selected: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> Sequence[Rule]:
    """Return the rules of a model with those for the adapters in it."""
    from distckpt._compute.peft_names import with_peft_names

    return with_peft_names(rules, selected, config)


def adapted(
    planned: ExportPlan,
    adapter: StoredCheckpoint,
    config: Mapping[str, Any] | None,
    tied: Collection[str],
) -> ExportPlan:
    """Return the tensors with an adapter merged in, see `_compute.merge_adapter`."""
    from distckpt._compute import merge_adapter

    return merge_adapter.adapted(planned, adapter, config, tied)


def quantized(
    planned: ExportPlan,
    quantize: str | Mapping[str, str],
    reference: StoredCheckpoint | None,
) -> ExportPlan:
    """Return the tensors with codes and scales in their places, see `_compute.quantize`."""
    from distckpt._compute import quantize as quantizing

    return quantizing.quantized(planned, quantize, reference)
