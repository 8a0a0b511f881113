"""Names and shapes of transformers' models, in memory and on disk.

They come from transformers' own conversions. Those of `save_pretrained` and `from_pretrained` are
run on tensors without data that record the source of each element, so every family that
transformers knows is known here, and every form of its files.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from distckpt._base.errors import CheckpointingException, InvalidShardingError
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
from distckpt.rules._rules import Assemble, Rename, Tie, invert

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def transformers_rules(
    config: Mapping[str, Any], keys: Collection[str] = (), on_disk: Shapes | None = None
) -> list[Rule]:
    """Return the rules from transformers' names in memory to its files.

    Args:
        config: the configuration of the model.
        keys: names in memory, which may be of the model without its head.
        on_disk: shapes of the tensors in files by name, in any form that `from_pretrained` reads;
            by default the form of `save_pretrained`.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointingException(
            "transformers knows how it names the tensors of a model in memory, and it is not "
            "installed: `pip install transformers`."
        )
    model, quantizer = _model_with(keys, config)
    shapes = _shapes(model)
    tied = _tied(model, shapes)
    own: dict[str, MappedTensor] = {}
    tied_targets: dict[str, MappedTensor] = {}
    for name, mapped in _in_files(model, quantizer, shapes, tied, on_disk or {}).items():
        if _is_of(tied, mapped):
            tied_targets[name] = mapped
        else:
            own[name] = mapped
    return [
        *_head_rules(model.base_model_prefix, keys, shapes),
        *(Tie(key, to, optional=True) for key, to in tied.items()),
        # Files may hold apart the tensors that the configuration ties.
        Assemble(tied_targets, {key: shapes[key] for key in tied}, optional=True),
        Assemble(own, {key: shape for key, shape in shapes.items() if key not in tied}),
    ]


def _head_rules(prefix: str, keys: Collection[str], shapes: Shapes) -> list[Rule]:
    """Return the rule for a model without the head, or with one."""
    if not prefix or any(key in shapes for key in keys):
        return []
    if any(f"{prefix}.{key}" in shapes for key in keys):
        return [Rename("**", f"{prefix}.{{0}}")]
    if any(key.startswith(f"{prefix}.") and key[len(prefix) + 1 :] in shapes for key in keys):
        return [Rename(f"{prefix}.**", "{0}")]
    return []


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    ignored = set(model._keys_to_ignore_on_save or ())
    state = model.state_dict()
    return {key: tuple(value.shape) for key, value in state.items() if key not in ignored}


def _tied(model: Any, shapes: Mapping[str, Any]) -> dict[str, str]:
    """Return names that are not stored -> their stored names."""
    tied = dict(model.all_tied_weights_keys)
    return {key: to for key, to in tied.items() if {key, to} <= shapes.keys() and to not in tied}


def _in_files(
    model: Any, quantizer: Any, shapes: Shapes, tied: Collection[str], on_disk: Shapes
) -> dict[str, MappedTensor]:
    """Return the tensors of the files by name."""
    saved = _saved(model, shapes)
    if not on_disk or _are_stored(saved, tied, on_disk):
        return saved
    loaded = _loaded(model, quantizer, shapes, on_disk)
    sources = {part.key for mapped in loaded.values() for part in mapped.parts}
    try:
        in_files = invert(loaded, {name: TensorSpec(on_disk[name], _DTYPE) for name in sources})
    except InvalidShardingError:
        # The model has a place for a part of a tensor only: it is another one.
        return saved
    for name, mapped in saved.items():
        if not _is_of(loaded, mapped):
            in_files.setdefault(name, mapped)
    return in_files


def _are_stored(saved: Mapping[str, MappedTensor], tied: Collection[str], on_disk: Shapes) -> bool:
    """Return whether files hold all tensors that are not tied."""
    for name, mapped in saved.items():
        if not _is_of(tied, mapped) and on_disk.get(name) != mapped.shape:
            return False
    return True


def _is_of(keys: Collection[str], mapped: MappedTensor) -> bool:
    """Return whether a tensor is made of certain tensors only."""
    return bool(mapped.parts) and all(part.key in keys for part in mapped.parts)


def _recorders(shapes: Shapes) -> dict[str, _Recorder]:
    recorders = {}
    for key, shape in shapes.items():
        recorders[key] = _Recorder.make(identity(key, TensorSpec(shape, _DTYPE)))
    return recorders


def _saved(model: Any, shapes: Shapes) -> dict[str, MappedTensor]:
    """Return the tensors that transformers makes when it saves a model."""
    try:
        converted = _core_model_loading().revert_weight_conversion(model, _recorders(shapes))
    except (RuntimeError, TypeError) as error:
        raise CheckpointingException(
            f"transformers' conversion of {model.config.model_type!r} cannot be followed: {error}"
        ) from error
    recorded = {}
    for name, tensor in converted.items():
        if not isinstance(tensor, _Recorder):
            raise CheckpointingException(
                f"transformers' conversion computes {name!r}, which rules cannot."
            )
        recorded[name] = tensor.mapped
    return recorded


def _loaded(model: Any, quantizer: Any, shapes: Shapes, on_disk: Shapes) -> dict[str, MappedTensor]:
    """Return the tensors in memory that transformers makes of files.

    Tensors that it does not make, or in another shape, are left out.
    """
    loaded = {}
    for key, conversion in _conversions(model, quantizer, shapes, on_disk).items():
        try:
            converted = conversion.convert(key, model=model, config=model.config)
        except (RuntimeError, TypeError, ValueError, LookupError):
            # Some of its sources are absent, for one. The missing tensor is named later.
            continue
        for name, tensor in converted.items():
            recorder = tensor[0] if isinstance(tensor, list) else tensor
            if isinstance(recorder, _Recorder) and recorder.mapped.shape == shapes.get(name):
                loaded[name] = recorder.mapped
    return loaded


def _conversions(model: Any, quantizer: Any, shapes: Shapes, on_disk: Shapes) -> dict[str, Any]:
    """Return transformers' conversions of files, by a name in memory."""
    loading = _core_model_loading()
    steps = _loading_steps(model, quantizer)
    prefix = model.base_model_prefix
    by_pattern = {pattern: step for step in steps[1] for pattern in step.source_patterns}
    recorders = _recorders(on_disk)
    conversions: dict[str, Any] = {}
    for name in sorted(on_disk, key=loading.dot_natural_key):
        key, pattern = loading.rename_source_key(name, *steps, prefix, shapes)
        if key not in shapes and name in shapes:
            # It has its name in memory in the file.
            key, pattern = loading.rename_source_key(name, [], [], prefix, shapes)
        if key not in shapes:
            continue
        if key not in conversions:
            converter = by_pattern.get(pattern)
            conversions[key] = copy.deepcopy(converter) or loading.WeightRenaming(name, key)
        conversions[key].add_tensor(key, name, pattern or name, recorders[name])
    return conversions


def _loading_steps(model: Any, quantizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters of a model."""
    loading = _core_model_loading()
    mapping = importlib.import_module("transformers.conversion_mapping")
    steps = mapping.get_model_conversion_mapping(model, hf_quantizer=quantizer)
    return (
        [step for step in steps if isinstance(step, loading.WeightRenaming)],
        [step for step in steps if isinstance(step, loading.WeightConverter)],
    )


def _core_model_loading() -> Any:
    return importlib.import_module("transformers.core_model_loading")


def _make_model(config: Mapping[str, Any]) -> Any:
    """Make the model without memory for its tensors."""
    transformers = importlib.import_module("transformers")
    values = copy.deepcopy(dict(config))
    values.pop("quantization_config", None)
    model_type = values.pop("model_type", None)
    names = [name for name in config.get("architectures") or () if hasattr(transformers, name)]
    try:
        settings = transformers.AutoConfig.for_model(model_type, **values)
        make = transformers.AutoModelForCausalLM.from_config
        if names:
            make = getattr(transformers, names[0])._from_config
        with torch.device("meta"), _NoInitialization():
            return make(settings, attn_implementation="eager")
    except Exception as error:  # of any class, by the model and by the checks of its configuration
        raise CheckpointingException(
            f"transformers {transformers.__version__} makes no model of type {model_type!r}, "
            f"architectures {config.get('architectures')!r}: {error!s:.300}"
        ) from error


class _NoInitialization(TorchFunctionMode):
    """A mode of this thread that skips the functions of `torch.nn.init`.

    On the meta device they set no values, and take a third of the time to make a model.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and "tensor" in kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _model_with(keys: Collection[str], config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Make the model with certain tensors, and transformers' quantizer or None.

    The model has modules for codes and scales if some of these are among the keys.
    """
    model = _make_model(config)
    settings = config.get("quantization_config")
    others = set(keys) - model.state_dict().keys()
    if settings and others:
        quantized = _make_model(config)
        quantizers = importlib.import_module("transformers.quantizers")
        try:
            quantizer = quantizers.AutoHfQuantizer.from_config(
                copy.deepcopy(settings), pre_quantized=True
            )
            quantizer.preprocess_model(quantized)
        except Exception:  # of any class: packages and devices that it asks for
            return model, None
        if others & quantized.state_dict().keys():
            return quantized, quantizer
    return model, None


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add the defaults of transformers to the parts of a configuration.

    Parts leave them out. None if that fails.
    """
    parts = {}
    for name, part in config.items():
        is_part = name.endswith("_config") and name != "quantization_config"
        if is_part and isinstance(part, Mapping):
            parts[name] = part
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


_DTYPE = "F32"
"""The dtype of all recorders: no conversion depends on it."""


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
    for piece in torch.split(tensor, sizes, axis):
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
        shape = getattr(tensor, operation)(*arguments, **options).shape
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
