"""Conversions between Megatron Core's names and Megatron-FSDP's `fsdp_dtensor`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, flat_bytes
from distckpt._base.messages import check_choice
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._base.tree import dotted, leaves
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import open_undisturbed, opened
from distckpt._commit import posix
from distckpt._commit.output import OutputSettings
from distckpt._format.manifest import OBJECT
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, whole
from distckpt._geometry.units import cut_region
from distckpt._io.tensor_source import TensorSource, Wanted
from distckpt._plan.export import OutputTensor
from distckpt._ranks.collectives import Ranks, collective
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.rules._mapped import MappedTensor, TensorSpec, crop
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble, Drop
from distckpt.torch_dist._encode import TensorRecord, refuse_formless
from distckpt.torch_dist._export import (
    Place,
    TensorEntry,
    common_state_to_write,
    find_places,
    share_of,
    write_archives,
    write_common_state,
    write_index,
    write_together,
)
from distckpt.torch_dist._fsdp_groups import core_common, fsdp_common, gated_of
from distckpt.torch_dist._fsdp_names import (
    FsdpNames,
    Mapped,
    core_tensors,
    fsdp_tensors,
    is_weight,
)

Layout = Literal["fsdp_dtensor", "torch_dist"]

_BLOCK_BYTES = 64 << 20
"""A tensor is stored in blocks of at most this size: a load reads whole ones."""


class _Piece(NamedTuple):
    """A block of a new tensor of shape `whole`."""

    name: str
    region: Region
    whole: tuple[int, ...]
    dtype: torch.dtype
    mapped: MappedTensor

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return self.region.num_elements * self.dtype.itemsize


@collective()
def convert_fsdp_dtensor(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    to: Layout,
    *,
    gated: bool | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    local_experts: bool = False,
    expert_parallel: bool = False,
    fuse: bool = False,
    sizes: Mapping[str, Mapping[str, int]] | None = None,
    wrappers: int = 3,
    dtype: torch.dtype | None = None,
    with_optimizer: bool = True,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Progress | None = None,
) -> None:
    """Convert Megatron Core's checkpoint to Megatron-FSDP's, or back, with the optimizer.

        torch_dist.convert_fsdp_dtensor("megatron/iter_1000", "fsdp/iter_1000", "fsdp_dtensor")
        torch_dist.convert_fsdp_dtensor("fsdp/iter_1000", "megatron/iter_1000", "torch_dist")

    The source is a directory of either program, or a checkpoint of distckpt with the same keys.
    Random states, the rerun state machine and `_extra_state` of layers are left out. Neither
    program is used. The directory appears when it is complete.

    Collective operation: all ranks of the process group must call it; each writes its share.

    Args:
        checkpoint_dir: a path or URL of the source.
        output_dir: a path; it must hold no checkpoint.
        to: the format to write; the source has the names of the other one.
        gated: whether MLPs are gated (SwiGLU), or the names of the modules whose MLPs are; None for
            the choice in the arguments of the run, which Megatron-LM stores.
        rename: text in Megatron Core's names -> text in Megatron-FSDP's, for both ways, such as
            {"mtp.layers.0.transformer_layer.": "mtp.layers.0.mtp_model_layer."}.
        local_experts: whether Megatron-FSDP's experts are modules of their own
            (`local_experts.0.linear_fc1.weight`), not a grouped layer (`linear_fc1.weight0`).
        expert_parallel: for the way back: whether the run that loads has expert parallelism.
            Megatron Core has an optimizer of its own for experts then, Megatron-FSDP never.
        fuse: whether Megatron-FSDP has one input projection for a gated delta net or Mamba mixer.
            Otherwise its parts are entries, as in Megatron Core.
        sizes: for the way back from one projection: the end of its name -> the names of its parts,
            in their order, and their numbers of rows.
        wrappers: how often "module." stands before names of parameters in Megatron-FSDP's
            optimizer: 3 for runs in 16 bits (--bf16, --fp16), 2 for others.
        dtype: dtype of the model's weights, such as torch.bfloat16 for a `torch_dist` as Megatron
            Core writes it; None to keep 32 bits. The optimizer's weights keep them.
        with_optimizer: whether to convert the optimizer. Without it, weights are the 32-bit ones
            of the optimizer all the same, where they are stored by parameter.
        overwrite: replace a checkpoint that is there.
        process_group: the ranks that convert together; None for the default group, or for this
            process alone.
        progress: called with the bytes of tensors this rank has written so far and those it will
            have written.

    Raises:
        CheckpointingException: `output_dir` is a URL; the source is of another layout; or an option
            is needed that was not given.
        LoadMismatchError: a part of a parameter, a layer or an expert is missing.
        CorruptCheckpointError: the checkpoint is damaged.
        UnsupportedObjectError: a value in the common state has no form in files of torch.
        RankFailedError: raised on all ranks when any rank failed; nothing is left then.
    """
    ranks = Ranks(process_group)
    names = FsdpNames(
        gated, rename or {}, local_experts, expert_parallel, fuse, sizes or {}, wrappers
    )
    same = {"to": to, "dtype": dtype, "with_optimizer": with_optimizer, **vars(names)}
    with ranks.phase("check the arguments", decision=True, same=same):
        if isinstance(gated, str):
            raise TypeError(f"gated is True, False or a list of names, got {gated!r:.100}.")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is a torch.dtype, such as torch.bfloat16, got {dtype!r:.100}.")
        check_choice("to", to, ("fsdp_dtensor", "torch_dist"))
        location, target = find_places(checkpoint_dir, output_dir)
        if ranks.is_coordinator:
            posix.check_target(target, overwrite, os.fspath(output_dir))
    stored = open_undisturbed(ranks, location)
    with reading(ranks, [stored]):
        with ranks.phase("plan the conversion", decision=True):
            tensors, common = plan_conversion(stored, to, names, with_optimizer)
        pieces = list(_pieces_of(tensors, dtype))
        piece_bytes = [piece.num_bytes for piece in pieces]
        share = share_of(piece_bytes, ranks.rank, ranks.size)
        settings = OutputSettings(num_bytes=sum(piece_bytes[share]), overwrite=overwrite)
        objects = _objects_in(common, to)
        own = objects if ranks.is_coordinator else {}
        write = partial(_write, stored, pieces[share], own, progress=progress)
        complete = partial(_complete, pieces, common, objects, to)
        write_together(ranks, stored, target, settings, write, complete)


# --- Planning -------------------------------------------------------------------------------------


def plan_conversion(
    stored: StoredCheckpoint, to: Layout, names: FsdpNames, with_optimizer: bool
) -> tuple[Mapped, dict[Any, Any]]:
    """Return the tensors and the common state of a converted checkpoint."""
    names.check_direction(to)
    manifest = stored.manifest
    tensors: dict[str, TensorSpec] = {}
    for key, shape, dtype in zip(
        manifest.keys, manifest.global_shapes, manifest.dtypes, strict=True
    ):
        if dtype != OBJECT and (with_optimizer or is_weight(key)):
            tensors[key] = TensorSpec(shape, dtype)
    common = common_state_to_write(stored)
    if to == "torch_dist":
        mapped = core_tensors(tensors, names)
        has_state = any(key.startswith("optimizer.") for key in mapped)
        return mapped, core_common(common, has_state, names.expert_parallel)
    if not with_optimizer:
        common.pop("optimizer", None)
    if names.gated is None:
        names = replace(names, gated=gated_of(common))
    mapped, num_axes = fsdp_tensors(tensors, names)
    return mapped, fsdp_common(common, num_axes, names.prefix)


def rewriting(source: str, names: Mapping[str, Any], with_optimizer: bool) -> dict[str, Any]:
    """Return arguments of `reshard` that give Megatron-FSDP's checkpoint Megatron Core's names."""
    location = locations.normalize(source)
    with opened(Ranks.alone(), location) as stored:
        facts = FsdpNames(**names)
        tensors, common = plan_conversion(stored, "torch_dist", facts, with_optimizer)
        sources = {}
        for mapped in tensors.values():
            for part in mapped.parts:
                sources[part.key] = stored.global_shape(part.key)
        rules: list[Rule] = [Assemble(tensors, sources)]
        for key in stored.manifest.key_index:
            if not stored.is_object(key) and key not in sources:
                rules.append(Drop(key, optional=True))
    return {"source_dir": source, "rules": rules, "common_state": common}


def _pieces_of(tensors: Mapped, dtype: torch.dtype | None) -> Iterator[_Piece]:
    """Yield blocks of all tensors, by name."""
    for name in sorted(tensors):
        mapped = tensors[name]
        kind = FROM_NAME[mapped.dtype]
        max_elements = _BLOCK_BYTES // kind.itemsize
        if dtype and kind.is_floating_point and not name.startswith("optimizer."):
            kind = dtype
        for region in cut_region(whole(mapped.shape), max_elements):
            yield _Piece(name, region, mapped.shape, kind, crop(mapped, region))


def _objects_in(common: dict[Any, Any], to: Layout) -> dict[tuple[Any, ...], Any]:
    """Return the values that are stored one by one, by their paths."""
    if to == "torch_dist" or not common:
        return {}
    return dict(leaves(common, _is_filled_dict))


def _is_filled_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


# --- Writing --------------------------------------------------------------------------------------


def _write(
    stored: StoredCheckpoint,
    pieces: Sequence[_Piece],
    objects: Mapping[tuple[Any, ...], Any],
    directory: str,
    name: str,
    progress: Progress | None,
) -> list[Place]:
    """Write pieces and objects into one file; return their places."""
    with OpenFiles.for_many_reads() as files:
        source = TensorSource(stored.with_files(files))
        values = itertools.chain(_tensors_in(source, pieces, progress), _checked(objects))
        return write_archives(values, directory, name)


def _tensors_in(
    source: TensorSource, pieces: Sequence[_Piece], progress: Progress | None
) -> Iterator[tuple[Any, TensorRecord]]:
    """Yield the tensor of each piece, after its name and offset."""
    counter = ProgressCounter(progress, sum(piece.num_bytes for piece in pieces))
    for piece in pieces:
        content = _values(source, piece)
        yield (
            (piece.name, piece.region.offset),
            TensorRecord(piece.dtype, piece.region.shape, content),
        )
        counter.add(piece.num_bytes)


def _checked(objects: Mapping[tuple[Any, ...], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield objects after their names; refuse those without a form."""
    for steps, value in objects.items():
        key = dotted(steps)
        refuse_formless(value, f"the common state at {key!r}")
        yield (key, None), value


def _values(source: TensorSource, piece: _Piece) -> list[Any]:
    if not piece.num_bytes:
        return []
    shape = piece.region.shape
    values = torch.empty(shape, dtype=FROM_NAME[piece.mapped.dtype])
    output = OutputTensor(piece.name, piece.mapped.dtype, shape, piece.num_bytes, piece.mapped)
    source.read([Wanted(output, whole(shape), values)])
    return [flat_bytes(values.to(piece.dtype)).numpy().data]


def _complete(
    pieces: Sequence[_Piece],
    common: dict[Any, Any],
    objects: Mapping[tuple[Any, ...], Any],
    to: Layout,
    places: Sequence[Sequence[Place]],
    directory: str,
) -> None:
    """Write the files that describe those of all ranks."""
    tensors: dict[str, TensorEntry] = {}
    for piece in pieces:
        entry = tensors.setdefault(piece.name, (piece.dtype, piece.whole, []))
        entry[2].append(piece.region)
    paths = {dotted(steps): steps for steps in objects}
    is_megatron = to == "torch_dist"
    if is_megatron:
        write_common_state(common, directory)
    else:
        paths |= {name: path_of(name) for name in tensors}
    where = itertools.chain.from_iterable(places)
    write_index(tensors, paths, where, directory, is_megatron=is_megatron)


def path_of(name: str) -> tuple[str, ...]:
    """Return the keys of a tensor in Megatron-FSDP's state dict."""
    first, _, rest = name.partition(".")
    if first != "optimizer":
        return first, rest
    kind, _, rest = rest.partition(".")
    parameter, _, state = rest.rpartition(".")
    return first, kind, parameter, state
