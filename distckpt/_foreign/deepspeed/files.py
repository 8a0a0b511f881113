"""The files of a DeepSpeed checkpoint: which there are, and what is in them besides the values of
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt._base.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    UnsupportedObjectError,
)
from distckpt._base.threads import run_threads
from distckpt._foreign.torch_dist.archive import Archive
from distckpt._foreign.torch_dist.objects import TensorView, first_byte_of, read_views
from distckpt._foreign.torch_dist.unpickle import Record
from distckpt._format.marker import file_size, read_file
from distckpt._storage import locations

Shape = tuple[int, ...]

_POINTERS = ("latest", "latest_universal")
_STATES = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_(model|optim)_states\.pt"
)
_OTHERS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*|layer_\d+-.*")
"""Files of experts, and of the stages of a pipeline."""
_MAX_TAG_BYTES = 4096
_SAME_IN_A_SAVE = {"global_steps", "global_samples", "skipped_steps", "ds_version"}


class States(NamedTuple):
    """The files of one save, relative to the checkpoint: model and optimizer states by data
    parallel rank.

    `others` are the model states of further tensor or pipeline parallel ranks, which only Universal
    checkpoints have.
    """

    folder: str
    is_universal: bool
    model: dict[int, str]
    optim: dict[int, str]
    others: list[str]


def is_checkpoint(location: str) -> bool:
    """Tell whether a location holds what DeepSpeed wrote, or the folders of several saves and which
    is the latest.
    """
    names = locations.list_names(location) if locations.isdir(location) else []
    return any(map(_STATES.fullmatch, names)) or not set(_POINTERS).isdisjoint(names)


def find_states(location: str) -> States:
    """Find the files of a checkpoint: those in its folder, or in the one that `latest` names."""
    names, folder = locations.list_names(location), ""
    if not any(map(_STATES.fullmatch, names)):
        pointer = join(location, next(name for name in _POINTERS if name in names))
        tag = read_file(pointer, _MAX_TAG_BYTES).decode(errors="replace").strip()
        if not locations.is_inner_name(tag, max_parts=1) or not locations.isdir(
            join(location, tag)
        ):
            raise CorruptCheckpointError(
                f"{pointer!r} names {tag!r:.300}, and there is no such folder beside it: restore "
                "it from a copy, or give the location of another folder with a save."
            )
        folder = f"{tag}/"
        names = locations.list_names(join(location, folder[:-1]))
    states = States(folder, "zero" in names, {}, {}, [])
    path = join(location, folder.rstrip("/"))
    for name in sorted(names):
        match = _STATES.fullmatch(name)
        is_divided = bool(match and int(match[2]))
        if not states.is_universal and (is_divided or _OTHERS.fullmatch(name)):
            raise CheckpointingException(
                f"{path!r} holds {name!r}: experts are not read, and the files of a model that is "
                "divided among tensor or pipeline parallel ranks do not say how. Convert those "
                "with DeepSpeed (`python -m deepspeed.checkpoint.ds_to_universal --input_folder "
                f"{path} --output_folder {path}_universal`) before loading."
            )
        if match and is_divided:
            states.others.append(folder + name)
        elif match:
            files = states.model if match[3] == "model" else states.optim
            if (first := files.setdefault(int(match[1] or 0), folder + name)) != folder + name:
                raise CorruptCheckpointError(
                    f"{path!r} holds {first!r} and {name!r}, of different saves: remove what does "
                    "not belong here."
                )
    if not states.model:
        raise CorruptCheckpointError(
            f"{path!r} holds no mp_rank_00_model_states.pt: restore it from a copy."
        )
    return states


def join(location: str, name: str) -> str:
    """Return the location of a file or folder of a checkpoint."""
    return locations.join(location, *filter(None, name.split("/")))


class StateFile(NamedTuple):
    """A file that `torch.save` wrote; `name` is relative to the checkpoint, `content` has views in
    place of tensors.
    """

    path: str
    name: str
    num_bytes: int
    archive: Archive
    content: Any

    def damaged(self, what: object) -> CorruptCheckpointError:
        """Return an error that names the file."""
        return CorruptCheckpointError(
            f"{self.path!r} is damaged or of an unknown form ({what!s:.300})."
        )

    def first_byte(self, view: TensorView) -> int:
        """Return where in the file a tensor begins."""
        try:
            return first_byte_of(self.archive, view, self.num_bytes)
        except ValueError as error:
            raise self.damaged(error) from error

    def values(self, node: Any, where: str) -> Any:
        """Return a part of the content with its tensors; UnsupportedObjectError for objects of
        other classes.
        """
        if type(node) is TensorView:
            if not is_contiguous(node):
                raise self.damaged(f"{where} is no contiguous tensor")
            first = self.first_byte(node)
            stop = first + torch.Size(node.shape).numel() * node.dtype.itemsize
            data = np.frombuffer(bytearray(locations.read_range(self.path, first, stop)), np.uint8)
            return torch.from_numpy(data).view(node.dtype).reshape(node.shape)
        if isinstance(node, Record):
            raise UnsupportedObjectError(
                f"{where} in {self.path!r} is a {node.kind:.200}, which is not read from pickles: "
                "nothing was run."
            )
        if isinstance(node, dict):
            return {
                key: self.values(value, f"{where}[{key!r:.100}]") for key, value in node.items()
            }
        if type(node) in (list, tuple):
            return type(node)(self.values(item, f"{where}[{i}]") for i, item in enumerate(node))
        return node

    def shapes(self, field: str) -> list[dict[str, Shape]]:
        """Return shapes of parameters by name, in the order in which their values follow one
        another.
        """
        groups = self.content.get(field) or []
        return [
            {str(n): torch.Size(s) for n, s in g.items()}
            for g in ([groups] if isinstance(groups, dict) else groups)
        ]


def is_contiguous(view: TensorView) -> bool:
    """Tell whether the elements of a tensor follow one another."""
    return torch.empty_strided(view.shape, view.strides, device="meta").is_contiguous()


def read_states(location: str, names: Iterable[str]) -> list[StateFile]:
    """Read the pickles of files, and none of their tensors; several at once, since most of the time
    is latency.
    """
    found = dict.fromkeys(names)

    def read(name: str) -> None:
        path = join(location, name)
        try:
            size = file_size(path)
            archive = Archive(partial(locations.read_range, path), size)
            found[name] = StateFile(path, name, size, archive, read_views(archive))
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"{path!r} is missing: restore it, or finish copying the directory."
            ) from error
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{path!r} is damaged or of an unknown form ({error!s:.300}), and nothing of it "
                "was run: restore it from a copy."
            ) from error

    run_threads(read, list(found))
    return [file for file in found.values() if file is not None]


def read_save(location: str, states: States) -> tuple[list[StateFile], list[StateFile]]:
    """Read all model states, and the optimizer's or `others`; check that they are of one save, and
    of all ranks.
    """
    rest = (
        states.others
        if states.is_universal
        else [states.optim[rank] for rank in sorted(states.optim)]
    )
    files = read_states(location, [*(states.model[rank] for rank in sorted(states.model)), *rest])
    for file in files:
        degrees, num = (
            file.content.get("checkpoint_parallel_dimensions") or {},
            1 + len(states.others),
        )
        product = math.prod(degrees.get(name) or 1 for name in ("tp_degree", "pp_degree"))
        if (size := max(file.content.get("mp_world_size") or 1, product)) > num:
            raise CheckpointingException(
                f"{file.path!r} is of a model split among {size} tensor or pipeline parallel "
                f"ranks, of which {num} is here: copy the files of all, and convert them with "
                "`python -m deepspeed.checkpoint.ds_to_universal`."
            )
        for field in file.content.keys() & files[0].content.keys() & _SAME_IN_A_SAVE:
            if (value := file.content[field]) != (other := files[0].content[field]):
                raise CorruptCheckpointError(
                    f"{file.path!r} and {files[0].path!r} are of different saves ({field} is "
                    f"{value!r:.100} and {other!r:.100}): copy the files of one save again."
                )
    return files[: len(states.model)], files[len(states.model) :]


def locate_views(views: Iterable[tuple[StateFile, TensorView]]) -> None:
    """Read where tensors lie, several at once: later `first_byte` reads nothing."""
    run_threads(lambda pair: pair[0].first_byte(pair[1]), views)
