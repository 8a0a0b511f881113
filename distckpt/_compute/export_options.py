"""Tensors that an export computes: with adapters merged in, quantized on write.

Each option imports its own machinery.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._format.hf_names import SUFFIX
from distckpt._format.marker import CONFIG_FNAME
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.export_plan import ExportPlan
from distckpt._plan.decoded import find
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.rules._mapped import TensorSpec
from distckpt.rules._rule import Rule

_ADAPTER_CONFIG = "adapter_config.json"
_MAX_PROBED = 100
"""Entries of a directory that are searched for adapters, for an error."""


def check_formats(quantize: str | Mapping[str, str]) -> None:
    """Check that the names of formats are known."""
    from distckpt._compute.formats import formats_by_pattern

    formats_by_pattern(quantize)


def quantized(
    planned: ExportPlan,
    quantize: str | Mapping[str, str],
    reference: StoredCheckpoint | None,
) -> ExportPlan:
    """Return the planned tensors, with quantized ones replaced by codes and scales.

    `quantize` says which tensors to quantize, or a reference directory has them quantized.
    """
    from distckpt._compute.encoded_source import EncodedSource
    from distckpt._compute.formats import formats_by_pattern, quantize_outputs

    model = None
    if reference is not None:
        model = set(find(reference))
    formats = formats_by_pattern(quantize)
    outputs, parts, config = quantize_outputs(planned.outputs, formats, model)
    made_of = {name: part.tensor.name for name, part in parts.items()}
    return replace(
        planned,
        source=EncodedSource(planned.source, parts),
        outputs=outputs,
        made_of={**planned.made_of, **made_of},
        quantization=config,
    )


def rules_of_adapters(
    rules: Sequence[Rule], selected: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> Sequence[Rule]:
    """Return the rules of a model with those for the adapters in it."""
    from distckpt._compute.peft_names import with_peft_names

    return with_peft_names(rules, selected, config)


def adapted(
    planned: ExportPlan,
    stored: StoredCheckpoint,
    model: Mapping[str, Any] | None,
    tied: Collection[str],
) -> ExportPlan:
    """Return the tensors with the changes of an adapter.

    Args:
        planned: tensors of the export.
        stored: the adapter.
        model: the configuration of the model, where it is known.
        tied: stored keys whose other names are not exported.
    """
    from distckpt._compute.adapted_source import AdaptedSource
    from distckpt._compute.adapter import Adapter, plan_changes
    from distckpt.families._config import read_config

    config = read_config(locations.join(stored.location, _ADAPTER_CONFIG))
    changes = plan_changes(Adapter(stored, config), planned.outputs, model, tied)
    return replace(
        planned,
        source=AdaptedSource(planned.source, stored, changes),
        made_of={**planned.made_of, **{name: name for name in changes}},
    )


def check_is_adapter(ranks: Ranks, location: str) -> None:
    """Check that a directory, if it exists, has an adapter's files.

    Collective operation: all ranks must call it; rank 0 looks.

    Raises:
        CheckpointNotFoundError: a file is missing.
    """
    ranks.decide("open the adapter", lambda: _check_files(location))


def _check_files(location: str) -> bytes:
    names = locations.list_names(location) if locations.isdir(location) else []
    lacks = []
    if CONFIG_FNAME not in names and not any(name.endswith(SUFFIX) for name in names):
        lacks.append("adapter_model.safetensors")
    if _ADAPTER_CONFIG not in names:
        lacks.append(_ADAPTER_CONFIG)
    if not lacks or not locations.exists(location):
        return b""
    raise CheckpointNotFoundError(
        f"{location!r} is no adapter of PEFT, it has no {' and no '.join(lacks)}: "
        f"{_advice(location, names)}."
    )


def _advice(location: str, names: list[str]) -> str:
    inside = []
    for name in names[:_MAX_PROBED]:
        if locations.exists(locations.join(location, name, _ADAPTER_CONFIG)):
            inside.append(name)
    if inside:
        return f"give one of the adapters in it, {', '.join(map(repr, inside))}"
    if "adapter_model.bin" in names:
        return (
            "adapter_model.bin is a pickle, which can run code: open it with PEFT and save it as "
            "safetensors"
        )
    return "give the directory that save_pretrained of PEFT wrote"
