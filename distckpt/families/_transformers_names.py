"""Names and shapes of transformers' models, in memory and on disk.

They come from transformers' own conversion. The conversion that `save_pretrained` makes is run on
tensors without data that record the source of each element, so every family that transformers knows
is known here.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException
from distckpt.rules._mapped import (
    MappedTensor,
    TensorSpec,
    crop_axis,
    identity,
    join,
    permute,
    reshape,
)
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble, Tie


def transformers_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Return the rules from transformers' names in memory to its files.

    `save_pretrained` writes the files.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointingException(
            "transformers knows how it names the tensors of a model in memory, and it is not "
            "installed: `pip install transformers`."
        )
    model = _make_model(config)
    shapes = _shapes(model)
    tied = _tied(model, shapes)
    own: dict[str, MappedTensor] = {}
    tied_targets: dict[str, MappedTensor] = {}
    for name, mapped in _converted(model, shapes, config["model_type"]).items():
        is_tied = all(part.key in tied for part in mapped.parts)
        if is_tied:
            tied_targets[name] = mapped
        else:
            own[name] = mapped
    return [
        *(Tie(key, to, optional=True) for key, to in tied.items()),
        # Files may hold apart the tensors that the configuration ties.
        Assemble(tied_targets, {key: shapes[key] for key in tied}, optional=True),
        Assemble(own, {key: shape for key, shape in shapes.items() if key not in tied}),
    ]


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    ignored = set(model._keys_to_ignore_on_save or ())
    state = model.state_dict()
    return {key: tuple(value.shape) for key, value in state.items() if key not in ignored}


def _tied(model: Any, shapes: Mapping[str, Any]) -> dict[str, str]:
    """Return names that are not stored -> their stored names."""
    tied = dict(model.all_tied_weights_keys)
    return {key: to for key, to in tied.items() if {key, to} <= shapes.keys() and to not in tied}


def _converted(
    model: Any, sources: Mapping[str, tuple[int, ...]], model_type: str
) -> dict[str, MappedTensor]:
    """Return the tensors that transformers makes when it saves a model."""
    core_model_loading = importlib.import_module("transformers.core_model_loading")
    recorders = {
        key: _Recorder.make(identity(key, TensorSpec(shape, "F32")))
        for key, shape in sources.items()
    }
    try:
        converted = core_model_loading.revert_weight_conversion(model, recorders)
    except (RuntimeError, TypeError) as error:
        raise CheckpointingException(
            f"transformers' conversion of {model_type!r} cannot be followed: {error}"
        ) from error
    return _recorded(converted)


def _make_model(config: Mapping[str, Any]) -> Any:
    """Make the model without memory for its tensors."""
    transformers = importlib.import_module("transformers")
    values = copy.deepcopy(dict(config))
    values.pop("quantization_config", None)
    model_type = values.pop("model_type", None)
    names = [name for name in config.get("architectures") or () if hasattr(transformers, name)]
    try:
        settings = transformers.AutoConfig.for_model(model_type, **values)
        with torch.device("meta"):
            if names:
                return getattr(transformers, names[0])._from_config(
                    settings, attn_implementation="eager"
                )
            return transformers.AutoModelForCausalLM.from_config(
                settings, attn_implementation="eager"
            )
    except Exception as error:  # of any class, by the model and by the checks of its configuration
        raise CheckpointingException(
            f"transformers {transformers.__version__} makes no model of type {model_type!r}, "
            f"architectures {config.get('architectures')!r}: {error!s:.300}"
        ) from error


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add the defaults of transformers to the parts of a configuration.

    Parts leave them out. None if that fails.
    """
    parts = {}
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, Mapping):
            parts[name] = part
    parts.pop("quantization_config", None)
    if not parts or importlib.util.find_spec("transformers") is None:
        return None
    try:
        made = importlib.import_module("transformers").AutoConfig.for_model(
            config["model_type"], **copy.deepcopy(parts)
        )
    except Exception:  # of any class
        return None
    values = made.to_dict()
    completed = dict(config)
    for name, part in parts.items():
        if values.get(name):
            completed[name] = {**values[name], **part}
    return completed


def _recorded(tensors: Mapping[str, Any]) -> dict[str, MappedTensor]:
    unknown = [name for name, tensor in tensors.items() if not isinstance(tensor, _Recorder)]
    if unknown:
        raise CheckpointingException(
            f"transformers' conversion computes {unknown[0]!r}, which rules cannot."
        )
    return {name: tensor.mapped for name, tensor in tensors.items()}


class _Recorder(torch.Tensor):
    """A tensor without data that knows its source regions.

    It can be cut, joined, permuted and reshaped.
    """

    mapped: MappedTensor

    @classmethod
    def make(cls, mapped: MappedTensor) -> _Recorder:
        recorder = torch.empty(mapped.shape, device="meta").as_subclass(cls)
        recorder.mapped = mapped
        return recorder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name in _OPERATIONS:
                return _OPERATIONS[name](*args, **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            raise RuntimeError(f"it computes values ({name})")
        return result


def _split(tensor: _Recorder, sizes: int | list[int], dim: int = 0) -> tuple[_Recorder, ...]:
    axis = dim % tensor.ndim
    pieces = []
    start = 0
    for piece in torch.split(torch.empty(tensor.shape, device="meta"), sizes, axis):
        stop = start + piece.shape[axis]
        pieces.append(_Recorder.make(crop_axis(tensor.mapped, axis, start, stop)))
        start = stop
    return tuple(pieces)


def _chunk(tensor: _Recorder, chunks: int, dim: int = 0) -> tuple[_Recorder, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _cat(tensors: Sequence[_Recorder], dim: int = 0) -> _Recorder:
    return _Recorder.make(join([tensor.mapped for tensor in tensors], dim % tensors[0].ndim))


def _with_axes_moved(operation: str) -> Callable[..., _Recorder]:
    """Return an operation that puts axes in another order."""

    def move(tensor: _Recorder, *arguments: Any, **options: Any) -> _Recorder:
        # The size of each axis is its number.
        numbered = torch.empty(tuple(range(tensor.ndim)), device="meta")
        order = getattr(numbered, operation)(*arguments, **options).shape
        return _Recorder.make(permute(tensor.mapped, order))

    return move


def _with_new_shape(operation: str) -> Callable[..., _Recorder]:
    """Return an operation that keeps the order of elements."""

    def give_shape(tensor: _Recorder, *arguments: Any, **options: Any) -> _Recorder:
        plain = torch.empty(tensor.shape, device="meta")
        shape = getattr(plain, operation)(*arguments, **options).shape
        return _Recorder.make(reshape(tensor.mapped, shape))

    return give_shape


_reshape = _with_new_shape("reshape")
_squeeze = _with_new_shape("squeeze")
_unsqueeze = _with_new_shape("unsqueeze")


def _stack(tensors: Sequence[_Recorder], dim: int = 0) -> _Recorder:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unbind(tensor: _Recorder, dim: int = 0) -> tuple[_Recorder, ...]:
    return tuple(_squeeze(piece, dim) for piece in _split(tensor, 1, dim))


def _same(tensor: _Recorder, *_: Any, **__: Any) -> _Recorder:
    return tensor


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "chunk": _chunk,
    "clone": _same,
    "concat": _cat,
    "contiguous": _same,
    "detach": _same,
    "permute": _with_axes_moved("permute"),
    "reshape": _reshape,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "to": _same,
    "transpose": _with_axes_moved("transpose"),
    "unbind": _unbind,
    "view": _reshape,
}
