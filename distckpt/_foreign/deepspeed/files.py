"""The files of a DeepSpeed checkpoint without tensors, and its settings."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    UnsupportedObjectError,
)
from distckpt._base.lazy import torch
from distckpt._base.threads import map_threads, run_threads
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._foreign.torch_dist.archive import Archive
from distckpt._foreign.torch_dist.objects import TensorView, first_byte_of, read_views
from distckpt._foreign.torch_dist.unpickle import Record
from distckpt._format.marker import file_size, read_file
from distckpt._storage import locations

Shape = tuple[int, ...]

WEIGHT = "fp32"
"""The name of the weights themselves among the states of a parameter."""

SAMPLE = 256
"""Elements of a parameter that are compared."""

_POINTERS = ("latest", "latest_universal")
_STATES = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_(model|optim)_states\.pt"
)
_OTHERS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*|layer_\d+-.*")
"""Files of experts and of pipeline stages."""
_MAX_TAG_BYTES = 4096
_SAME_IN_A_SAVE = {"global_steps", "global_samples", "skipped_steps", "ds_version"}


class Contents(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        pieces: of its tensors.
        aliases: of tied tensors.
        settings: of the optimizer.
        num_groups: where parameters go by number, of the optimizer's groups in common state; else
            0.
    """

    pieces: list[StoredPiece]
    aliases: dict[str, str]
    settings: list[dict[str, Any]]
    num_groups: int = 0


def key_of(state: str, name: str) -> str:
    """Return the key of a parameter or of its optimizer state."""
    if state == WEIGHT:
        return name
    return f"optimizer.state.{state}.{name}"


class States(NamedTuple):
    """The files of one save, relative to the checkpoint.

    Attributes:
        folder: of the save, empty or ending in a slash.
        is_universal: whether DeepSpeed converted it to a Universal checkpoint.
        model: model states by data parallel rank.
        optim: optimizer states by data parallel rank.
        others: model states of further tensor or pipeline parallel ranks, which only Universal
            checkpoints have.
    """

    folder: str
    is_universal: bool
    model: dict[int, str]
    optim: dict[int, str]
    others: list[str]


def is_checkpoint(location: str) -> bool:
    """Whether DeepSpeed wrote one save there, or several with a `latest` file."""
    names = locations.names_within(location)
    return any(map(_STATES.fullmatch, names)) or not set(_POINTERS).isdisjoint(names)


def find_states(location: str) -> States:
    """Find a checkpoint's files, in its folder or the `latest` one."""
    names = locations.list_names(location)
    folder = ""
    if not any(map(_STATES.fullmatch, names)):
        tag = _latest_tag(location, names)
        names = locations.list_names(join(location, tag))
        folder = f"{tag}/"
    states = States(folder, "zero" in names, {}, {}, [])
    path = join(location, folder.rstrip("/"))
    for name in sorted(names):
        _add_file(states, path, name)
    if not states.model:
        raise CorruptCheckpointError(
            f"{path!r} holds no mp_rank_00_model_states.pt: restore it from a copy."
        )
    return states


def _latest_tag(location: str, names: Collection[str]) -> str:
    """Return the name of the folder of the latest save."""
    pointer = join(location, next(name for name in _POINTERS if name in names))
    tag = read_file(pointer, _MAX_TAG_BYTES).decode(errors="replace").strip()
    if locations.is_inner_name(tag, max_parts=1) and locations.isdir(join(location, tag)):
        return tag
    raise CorruptCheckpointError(
        f"{pointer!r} names {tag!r:.300}, and there is no such folder beside it: restore "
        "it from a copy, or give the location of another folder with a save."
    )


def _add_file(states: States, path: str, name: str) -> None:
    """Add a file of the folder `path`, unless it holds no states."""
    match = _STATES.fullmatch(name)
    is_divided = match is not None and int(match[2]) > 0
    if (is_divided or _OTHERS.fullmatch(name)) and not states.is_universal:
        raise CheckpointingException(
            f"{path!r} holds {name!r}: experts are not read, and the files of a model that is "
            "divided among tensor or pipeline parallel ranks do not say how. Convert those "
            "with DeepSpeed (`python -m deepspeed.checkpoint.ds_to_universal --input_folder "
            f"{path} --output_folder {path}_universal`) before loading."
        )
    full_name = states.folder + name
    if is_divided:
        states.others.append(full_name)
    elif match:
        files = states.model if match[3] == "model" else states.optim
        first = files.setdefault(int(match[1] or 0), full_name)
        if first != full_name:
            raise CorruptCheckpointError(
                f"{path!r} holds {first!r} and {name!r}, of different saves: remove what does "
                "not belong here."
            )


def join(location: str, name: str) -> str:
    """Return the location of a file or folder of a checkpoint."""
    return locations.join(location, *filter(None, name.split("/")))


class StateFile(NamedTuple):
    """A file that `torch.save` wrote.

    Attributes:
        path: its location.
        name: relative to the checkpoint.
        num_bytes: its size.
        archive: the entries of the file.
        content: its object, with views in place of tensors.
    """

    path: str
    name: str
    num_bytes: int
    archive: Archive
    content: Any

    def damaged(self, problem: object) -> CorruptCheckpointError:
        """Return an error that names the file."""
        return CorruptCheckpointError(
            f"{self.path!r} is damaged or of an unknown form ({problem!s:.300})."
        )

    def first_byte(self, view: TensorView) -> int:
        """Return the first byte of a tensor in the file."""
        try:
            return first_byte_of(self.archive, view, self.num_bytes)
        except ValueError as error:
            raise self.damaged(error) from error

    def values(self, node: Any, where: str) -> Any:
        """Return some of the content with its tensors read.

        Raises:
            UnsupportedObjectError: it holds an object of another class.
        """
        if type(node) is TensorView:
            if not is_contiguous(node):
                raise self.damaged(f"{where} is not a contiguous tensor")
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

    def elements(self, view: TensorView, start: int, count: int) -> Any:
        """Read some contiguous elements of a tensor, fewer at its end."""
        stop = min(start + count, math.prod(view.shape))
        part = view._replace(offset=view.offset + start, shape=(stop - start,), strides=(1,))
        return self.values(part, "a weight")

    def shapes(self, field: str) -> list[dict[str, Shape]]:
        """Return the shapes of parameters by name for each group, in order.

        It is the order of their values.
        """
        groups = self.content.get(field) or []
        if isinstance(groups, dict):
            groups = [groups]
        shapes: list[dict[str, Shape]] = []
        for group in groups:
            shapes.append({str(name): torch.Size(shape) for name, shape in group.items()})
        return shapes


def is_array(value: Any) -> bool:
    """Whether a value is a tensor with axes: numbers are tensors without."""
    return type(value) is TensorView and bool(value.shape)


def is_contiguous(view: TensorView) -> bool:
    """Whether the elements of a tensor are contiguous."""
    return torch.empty_strided(view.shape, view.strides, device="meta").is_contiguous()


def read_states(location: str, names: Iterable[str]) -> list[StateFile]:
    """Read the pickles of files, but no tensors.

    Several are read at once, as most time is latency.
    """
    return map_threads(partial(_read_state, location), names)


def _read_state(location: str, name: str) -> StateFile:
    path = join(location, name)
    try:
        size = file_size(path)
        archive = Archive(partial(locations.read_range, path), size)
        return StateFile(path, name, size, archive, read_views(archive))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path!r} is missing: restore it, or finish copying the directory."
        ) from error
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path!r} is damaged or of an unknown form ({error!s:.300}), and nothing of it "
            "was run: restore it from a copy."
        ) from error


def read_save(location: str, states: States) -> tuple[list[StateFile], list[StateFile]]:
    """Read all files of model and optimizer states, and check their consistency.

    The second list has the states of the optimizer, or of `others` in a Universal checkpoint.
    """
    model = [states.model[rank] for rank in sorted(states.model)]
    optim = [states.optim[rank] for rank in sorted(states.optim)]
    files = read_states(location, [*model, *(states.others if states.is_universal else optim)])
    for file in files:
        _check_is_whole(file, 1 + len(states.others))
        _check_is_same_save(file, files[0])
    return files[: len(model)], files[len(model) :]


def _check_is_whole(file: StateFile, num_files: int) -> None:
    """Check that no rank of a divided model lacks its file."""
    degrees = file.content.get("checkpoint_parallel_dimensions") or {}
    product = math.prod(degrees.get(name) or 1 for name in ("tp_degree", "pp_degree"))
    size = max(file.content.get("mp_world_size") or 1, product)
    if size > num_files:
        raise CheckpointingException(
            f"{file.path!r} is of a model split among {size} tensor or pipeline parallel "
            f"ranks, of which {num_files} is here: copy the files of all, and convert them with "
            "`python -m deepspeed.checkpoint.ds_to_universal`."
        )


def _check_is_same_save(file: StateFile, other: StateFile) -> None:
    """Compare the values that are equal in all files of a save."""
    for field in file.content.keys() & other.content.keys() & _SAME_IN_A_SAVE:
        value = file.content[field]
        expected = other.content[field]
        if value != expected:
            raise CorruptCheckpointError(
                f"{file.path!r} and {other.path!r} are of different saves ({field} is "
                f"{value!r:.100} and {expected!r:.100}): copy the files of one save again."
            )


def locate_views(views: Iterable[tuple[StateFile, TensorView]]) -> None:
    """Look up the places of tensors, several at once.

    `first_byte` need not read later.
    """
    run_threads(lambda pair: pair[0].first_byte(pair[1]), views)


# ---- settings of the optimizer, in the form of distckpt


def settings_of(
    file: StateFile,
    groups: Iterable[Any],
    states: Mapping[int, dict[str, Any]],
    shapes: Sequence[Mapping[str, Shape]],
) -> list[dict[str, Any]]:
    """Return options and steps by the names of parameters.

    Args:
        file: holds the optimizer.
        groups: `param_groups` of the optimizer.
        states: states of the flat parameters that the groups number.
        shapes: names and shapes of the parameters in each flat parameter.
    """
    # Imported when it is needed: formats are recognized without torch.
    from distckpt._models.optimizer.read import ParamState
    from distckpt._models.optimizer.settings import group_entries

    pairs = []
    for group in groups:
        params: list[ParamState] = []
        for number in group["params"]:
            state = states.get(number, {})
            tensors, values, scalars = _divided(file, {"step": group.get("step"), **state})
            for name in shapes[number]:
                params.append(ParamState(name, tensors, values, scalars, bool(state)))
        options = {**group, "params": [param.name for param in params]}
        options.pop("step", None)
        if group.get("bias_correction") is True:
            # An option of DeepSpeed's own Adam, which PyTorch's always applies.
            del options["bias_correction"]
        pairs.append((file.values(options, "param_groups"), params))
    return group_entries(pairs, {})


def _divided(
    file: StateFile, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Divide a state into tensors, other values and scalars.

    Scalars are tensors without axes.
    """
    tensors = {}
    values = {}
    scalars = {}
    for name, view in state.items():
        if is_array(view):
            tensors[name] = view
            continue
        value = file.values(view, name)
        if name == "step" and value is None:
            continue
        if name == "step":
            # FusedAdam and DeepSpeedCPUAdam count with integers, PyTorch with tensors.
            value = torch.tensor(float(value), device="cpu")
        if isinstance(value, torch.Tensor):
            scalars[name] = value
        else:
            values[name] = value
    return tensors, values, scalars


def step_of(file: StateFile, state: Mapping[str, Any]) -> float | None:
    """Return the step of a state, or None if it has none."""
    step = file.values(state.get("step"), "step")
    if step is None:
        return None
    return float(step)
