"""Quantization of an export's tensors when they are written.

The module is imported when an export asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distckpt._compute.encoded_source import EncodedSource
from distckpt._compute.quantize_plan import formats_by_pattern, quantize_outputs
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.export_plan import ExportPlan
from distckpt._plan.decoded import find


def quantized(
    planned: ExportPlan,
    quantize: str | Mapping[str, str],
    reference: StoredCheckpoint | None,
) -> ExportPlan:
    """Return the planned tensors, with quantized ones replaced by parts.

    `quantize` says which tensors to quantize, or a reference directory has them quantized.
    """
    model = None
    if reference is not None:
        model = set(find(reference))
    made = quantize_outputs(planned.outputs, formats_by_pattern(quantize), model)
    made_of = {name: part.tensor.name for name, part in made.parts.items()}
    return replace(
        planned,
        source=EncodedSource(planned.source, made.parts),
        outputs=made.outputs,
        made_of={**planned.made_of, **made_of},
        quantization=made.config,
    )
