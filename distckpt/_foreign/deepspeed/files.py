"""The files of a DeepSpeed checkpoint: which there are, and what is in them besides the values of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError, UnsupportedObjectError
from distckpt._base.threads import run_threads
from distckpt._foreign.torch_dist.archive import Archive
from distckpt._foreign.torch_dist.objects import TensorView, first_byte_of, read_views
from distckpt._foreign.torch_dist.unpickle import Record
from distckpt._format.marker import file_size, read_file
from distckpt._geometry.region import MAX_NDIM
from distckpt._storage import locations

Shape = tuple[int, ...]

POINTERS = ("latest", "latest_universal")
"""Files that name the folder that was written last."""
UNIVERSAL_FOLDER = "zero"

_STATES = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_(model|optim)_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*")
_LAYERS = re.compile(r"layer_\d+-.*")
_MAX_TAG_BYTES = 4096
_TO_UNIVERSAL = (
    "convert it with DeepSpeed (`python -m deepspeed.checkpoint.ds_to_universal --input_folder {0} --output_folder "
    "{0}_universal`), and load the result."
)


class States(NamedTuple):
    """The files of one save, relative to the checkpoint: model and optimizer states by data parallel rank.

    `others` are the model states of further tensor or pipeline parallel ranks, which only Universal checkpoints have.
    """

    folder: str
    is_universal: bool
    model: dict[int, str]
    optim: dict[int, str]
    others: list[str]

    def path(self, location: str) -> str:
        """Return the location of the folder with the files."""
        return locations.join(location, self.folder) if self.folder else location


def is_checkpoint(location: str) -> bool:
    """Tell whether a location holds what DeepSpeed wrote, or the folders of several saves and which is the latest."""
    names = locations.list_names(location) if locations.isdir(location) else []
    return any(map(_STATES.fullmatch, names)) or not set(POINTERS).isdisjoint(names)


def find_states(location: str) -> States:
    """Find the files of a checkpoint: those in its folder, or in the one that `latest` names."""
    folder, names = "", locations.list_names(location)
    if not any(map(_STATES.fullmatch, names)):
        folder = _latest(location, names)
        names = locations.list_names(locations.join(location, folder))
    states = States(folder, UNIVERSAL_FOLDER in names, {}, {}, [])
    path = states.path(location)
    for name in sorted(names):
        if not states.is_universal and (_EXPERTS.fullmatch(name) or _LAYERS.fullmatch(name)):
            kind = "experts, which are not read" if _EXPERTS.fullmatch(name) else "stages of a pipeline"
            way_out = (
                _TO_UNIVERSAL.format(path)
                if _LAYERS.fullmatch(name)
                else "Load it with DeepSpeed, and save with distckpt."
            )
            raise CheckpointingException(f"{path!r} holds {name!r}, of {kind}: {way_out}")
        if (match := _STATES.fullmatch(name)) is None:
            continue
        rank, model_rank = int(match[1] or 0), int(match[2])
        inner = f"{folder}/{name}" if folder else name
        files = states.model if match[3] == "model" else states.optim
        if model_rank and not states.is_universal:
            raise CheckpointingException(
                f"{path!r} holds {name!r}: the model is divided among tensor or pipeline parallel ranks, and these "
                f"files do not say how. First {_TO_UNIVERSAL.format(path)}"
            )
        if model_rank:
            states.others.append(inner)
        elif rank in files:
            raise CorruptCheckpointError(
                f"{path!r} holds {files[rank].rpartition('/')[2]!r} and {name!r}, which are of different saves: remove "
                "the one that does not belong here."
            )
        else:
            files[rank] = inner
    if not states.model:
        raise CorruptCheckpointError(f"{path!r} holds no mp_rank_00_model_states.pt: restore it from a copy.")
    return states


def _latest(location: str, names: Iterable[str]) -> str:
    pointer = next(name for name in POINTERS if name in names)
    path = locations.join(location, pointer)
    tag = read_file(path, _MAX_TAG_BYTES).decode(errors="replace").strip()
    if locations.is_inner_name(tag, max_parts=1) and locations.isdir(locations.join(location, tag)):
        return tag
    raise CorruptCheckpointError(
        f"{path!r} names {tag!r:.300}, and there is no such folder beside it: restore it from a copy, or give the "
        "location of another folder with the save."
    )


class StateFile(NamedTuple):
    """A file that `torch.save` wrote; `name` is relative to the checkpoint, `content` has views in place of tensors."""

    location: str
    name: str
    num_bytes: int
    archive: Archive
    content: Any

    @property
    def path(self) -> str:
        """Return the location of the file."""
        return locations.join(self.location, *self.name.split("/"))

    def damaged(self, what: object) -> CorruptCheckpointError:
        """Return an error that names the file."""
        return CorruptCheckpointError(f"{self.path!r} is damaged or of an unknown form ({what!s:.300}).")

    def first_byte(self, view: TensorView) -> int:
        """Return where in the file a tensor begins."""
        try:
            return first_byte_of(self.archive, view, self.num_bytes)
        except ValueError as error:
            raise self.damaged(error) from error

    def values(self, node: Any, where: str) -> Any:
        """Return a part of the content with its tensors; UnsupportedObjectError for objects of other classes."""
        if type(node) is TensorView:
            first, count = self.first_byte(node), torch.Size(node.shape).numel()
            if not is_contiguous(node):
                raise self.damaged(f"{where} is no contiguous tensor")
            data = locations.read_range(self.path, first, first + count * node.dtype.itemsize)
            return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(node.dtype).reshape(node.shape)
        if isinstance(node, Record):
            raise UnsupportedObjectError(
                f"{where} in {self.path!r} is a {node.kind:.200}, which is not read from pickles: nothing was run."
            )
        if isinstance(node, dict):
            return {key: self.values(value, f"{where}[{key!r:.100}]") for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self.values(item, f"{where}[{i}]") for i, item in enumerate(node))
        return node


def is_contiguous(view: TensorView) -> bool:
    """Tell whether the elements of a tensor follow one another."""
    steps = [math.prod(view.shape[axis + 1 :]) for axis in range(len(view.shape))]
    return all(n <= 1 or n_step == step for n, n_step, step in zip(view.shape, view.strides, steps, strict=True))


def read_state(location: str, name: str) -> StateFile:
    """Read the pickle of a file, and none of its tensors."""
    path = locations.join(location, *name.split("/"))
    try:
        size = file_size(path)
        archive = Archive(partial(locations.read_range, path), size)
        return StateFile(location, name, size, archive, read_views(archive))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path!r} is missing: restore it, or finish copying the directory.") from error
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path!r} is damaged or of an unknown form ({error!s:.300}), and nothing of it was run: restore it from a "
            "copy."
        ) from error


def read_states(location: str, names: Sequence[str]) -> list[StateFile]:
    """Read several files at once; most of the time is latency."""
    found: dict[str, StateFile] = {}
    run_threads(lambda name: found.update({name: read_state(location, name)}), names)
    return [found[name] for name in names]


def locate_views(views: Iterable[tuple[StateFile, TensorView]]) -> None:
    """Read where tensors lie, several at once: later `first_byte` reads nothing."""
    run_threads(lambda pair: pair[0].first_byte(pair[1]), views)


def shapes_of(file: StateFile, field: str) -> list[dict[str, Shape]]:
    """Return the shapes of parameters by name, in the order in which their values follow one another."""
    groups = file.content.get(field) or []
    groups = [groups] if isinstance(groups, dict) else groups
    for shape in (shape for group in groups for shape in group.values()):
        if (
            not isinstance(shape, tuple | list)
            or len(shape) > MAX_NDIM
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise file.damaged(f"a shape in {field}")
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in groups]
