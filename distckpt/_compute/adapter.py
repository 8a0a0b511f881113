"""Changes that a PEFT adapter makes to the tensors of an export."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distckpt._base.dtypes import FROM_NAME, is_summed
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._compute.adapter_targets import FIELDS, check_targets, ends_with
from distckpt._compute.peft_names import OF_EXPERTS, PREFIX, names_in_memory, text_config
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.export import OutputTensor

CONFIG_NAME = "adapter_config.json"
_MATRIX = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<letter>[AB])"
    r"(?P<ending>(?:\.default)?(?:\.weight)?)"
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's other weights as they are."""
_OTHER_ARITHMETIC = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "alora_invocation_tokens",
    "lora_bias",
    "trainable_token_indices",
)
_FIRST_VERSION = (0, 19)
"""First version of PEFT without transposed matrices of experts."""

Shapes = Mapping[str, tuple[int, ...]]


class Adapter(NamedTuple):
    """A PEFT adapter: its tensors and its `adapter_config.json`."""

    stored: StoredCheckpoint
    config: Mapping[str, Any]

    @property
    def location(self) -> str:
        """Directory or URL of the adapter."""
        return self.stored.location


class Product(NamedTuple):
    """A scaled product `b @ a` that is added to a tensor.

    Attributes:
        b: key of the matrix with the rows of the tensor.
        a: key of the matrix with its columns.
        scaling: the factor.
        transposed: whether to transpose the product.
        expert: number of the expert, if the matrices hold several experts, as PEFT's do.
        num_experts: the number of experts; 0 without. The rows of `a` are in the order of the
            experts, and the columns of `b` take turns.
        first_row: the row of `b` that is the first row of the tensor.
    """

    b: str
    a: str
    scaling: float
    transposed: bool = False
    expert: int = 0
    num_experts: int = 0
    first_row: int = 0


@dataclass
class Change:
    """A tensor's replacement, and the product that is added to it.

    `replacement` is the key of a tensor in the adapter.
    """

    replacement: str | None = None
    product: Product | None = None

    @property
    def keys(self) -> list[str]:
        """All keys of the adapter that this change uses."""
        keys = []
        if self.replacement is not None:
            keys.append(self.replacement)
        if self.product is not None:
            keys += [self.product.a, self.product.b]
        return keys


def plan_changes(
    adapter: Adapter,
    outputs: Sequence[OutputTensor],
    model: Mapping[str, Any] | None,
    tied: Collection[str],
) -> dict[str, Change]:
    """Return an adapter's changes to the tensors of an export, by name.

    Args:
        adapter: adapter with the names of the export, or of transformers in memory.
        outputs: tensors of the export.
        model: the configuration of the model, where it is known.
        tied: stored keys whose other names are not exported.

    Raises:
        CheckpointingException: the adapter is no LoRA adapter, its configuration contradicts its
            tensors, or it is not complete.
        LoadMismatchError: it changes tensors that are not exported.
    """
    _check_config(adapter)
    by_name = _by_name_in_memory(adapter, outputs, model)
    shapes = {name: output.shape for name, output in by_name.items()}
    changes = _changes(adapter, shapes)
    _check_saved(adapter, changes, shapes)
    _check_are_exported(adapter, changes, shapes)
    _check_tied(adapter, changes, by_name, model or {}, tied)
    _check_parameters(adapter, changes)
    modules = []
    for name, shape in shapes.items():
        if len(shape) > 1 and name.endswith(".weight"):
            modules.append(_module_of(name))
    adapted = set()
    for name, change in changes.items():
        if change.product:
            adapted.add(_module_of(name))
    check_targets(adapter.location, adapter.config, adapted, modules, model)
    for name, change in changes.items():
        _check_shape(adapter, by_name[name], change)
    return {by_name[name].name: change for name, change in changes.items()}


def _module_of(name: str) -> str:
    return name.removesuffix(".weight")


# --- The configuration ----------------------------------------------------------------------------


def _check_config(adapter: Adapter) -> None:
    """Refuse configurations of other methods, and fields that PEFT does not write."""
    config = adapter.config
    unknown = {}
    for name in _OTHER_ARITHMETIC:
        if config.get(name):
            unknown[name] = config[name]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        unknown["init_lora_weights"] = config["init_lora_weights"]
    if config.get("peft_type") != "LORA" or unknown:
        said = unknown or {"peft_type": config.get("peft_type")}
        raise CheckpointingException(
            f"The adapter {adapter.location!r} cannot be merged here, since its {CONFIG_NAME} says "
            f"{said}: only products of LoRA are added to weights. Use merge_and_unload of PEFT."
        )
    _check_fields(adapter)


def _check_fields(adapter: Adapter) -> None:
    config = adapter.config
    for field in ("use_rslora", "fan_in_fan_out"):
        if config.get(field) not in (True, False, None):
            raise _says(adapter, f"{field}={config[field]!r}", "true or false")
    for field, kind in FIELDS.items():
        if not _is_list_of(config.get(field), field, kind):
            raise _says(adapter, f"{field}={config[field]!r:.200}", f"a list of {kind.__name__}")


def _says(adapter: Adapter, said: str, expected: str) -> CheckpointingException:
    return CheckpointingException(
        f"The {CONFIG_NAME} of {adapter.location!r} says {said}: write {expected} there."
    )


def _is_list_of(value: Any, field: str, kind: type) -> bool:
    """Whether a configuration's field is a list, or a single item."""
    if value is None:
        return True
    if isinstance(value, list):
        return all(type(item) is kind for item in value)
    return type(value) is kind and field not in ("modules_to_save", "target_parameters")


# --- Changes --------------------------------------------------------------------------------------


def _by_name_in_memory(
    adapter: Adapter, outputs: Sequence[OutputTensor], model: Mapping[str, Any] | None
) -> dict[str, OutputTensor]:
    """Return the outputs by the adapter's names for them."""
    shapes = {output.name: output.shape for output in outputs}
    names: Mapping[str, str] = {}
    if model and not _has_modules(shapes, adapter):
        names = names_in_memory(model, shapes)
    return {names.get(output.name, output.name): output for output in outputs}


def _has_modules(names: Iterable[str], adapter: Adapter) -> bool:
    """Whether tensors of those names are the adapter's targets.

    For an adapter, experts are one parameter.
    """
    modules = {_module_of(name.removesuffix(".0.down_proj.weight")) for name in names}
    for key in adapter.stored.manifest.key_index:
        matrix = _MATRIX.fullmatch(key.removeprefix(PREFIX).replace(".base_layer", ""))
        if matrix and matrix["module"] not in modules:
            return False
    return True


def _changes(adapter: Adapter, exported: Shapes) -> dict[str, Change]:
    """Return the changes by the name of the tensor.

    A matrix without its partner is taken for a tensor of its name, which the export does not have.
    """
    changes: defaultdict[str, Change] = defaultdict(Change)
    keys = adapter.stored.manifest.key_index
    for key in keys:
        matrix = _MATRIX.fullmatch(key)
        if matrix is None or _partner(matrix) not in keys:
            # PEFT saves the weight of an embedding together with its matrices.
            name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
            changes[name].replacement = key
        elif matrix["letter"] == "B":
            for name, product in _products(adapter, matrix, exported):
                changes[name].product = product
    return changes


def _partner(matrix: re.Match[str]) -> str:
    """Return the key of the other matrix of a product."""
    other = "B" if matrix["letter"] == "A" else "A"
    return f"{matrix['module']}.lora_{matrix['kind'] or ''}{other}{matrix['ending']}"


def _products(
    adapter: Adapter, matrix: re.Match[str], exported: Shapes
) -> Iterable[tuple[str, Product]]:
    """Return the products of a second matrix, by tensor name."""
    module = matrix["module"].removeprefix(PREFIX)
    block = module.replace(".base_layer", "")
    parameters = adapter.config.get("target_parameters") or ()
    b = matrix.string
    a = _partner(matrix)
    if parameters and f"{block}.weight" not in exported:
        return _expert_products(adapter, block, b, a, exported)
    weight = f"{module}.weight"
    scaled = weight if ends_with(weight, parameters) else module
    scaling = _scaling(adapter, scaled, adapter.stored.global_shape(a)[0])
    transposed = bool(matrix["kind"] or adapter.config.get("fan_in_fan_out"))
    return [(weight, Product(b, a, scaling, transposed))]


def _expert_products(
    adapter: Adapter, block: str, b: str, a: str, exported: Shapes
) -> Iterator[tuple[str, Product]]:
    """Yield the products of experts, whose matrices PEFT joins.

    The shapes of the matrices determine their parameter.
    """
    numbers = itertools.count()
    num_experts = next(n for n in numbers if f"{block}.{n}.down_proj.weight" not in exported)
    if num_experts == 0:
        raise CheckpointingException(
            f"The adapter {adapter.location!r} has matrices for {block!r}, and the export has no "
            "gate_proj, up_proj and down_proj of each expert there: merge it with "
            "merge_and_unload of PEFT."
        )
    shape_a = rank, columns = adapter.stored.global_shape(a)
    shape_b = adapter.stored.global_shape(b)
    parameter = _parameter_of(block, shape_a, shape_b, exported)
    if parameter is None or rank % num_experts != 0:
        raise CheckpointingException(
            f"The adapter {adapter.location!r} has matrices of shapes {shape_b} and {shape_a} for "
            f"{block!r}, and the export {num_experts} experts with projections of other shapes: it "
            "is of another model."
        )
    names = OF_EXPERTS[parameter]
    rows = shape_b[0] // len(names)
    if shape_b[0] == columns:
        _check_version(adapter, block, parameter)
    scaling = _scaling(adapter, f"{block}.{parameter}", rank // num_experts)
    product = Product(b, a, scaling, num_experts=num_experts)
    for (index, name), expert in itertools.product(enumerate(names), range(num_experts)):
        own = product._replace(first_row=index * rows, expert=expert)
        yield f"{block}.{expert}.{name}.weight", own


def _parameter_of(
    block: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...], exported: Shapes
) -> str | None:
    """Return the parameter of experts that matrices of two shapes fit."""
    for parameter, names in OF_EXPERTS.items():
        shape = exported.get(f"{block}.0.{names[0]}.weight", ())
        fits = shape[1:] == shape_a[1:] and shape_b == (shape[0] * len(names), shape_a[0])
        if fits:
            return parameter
    return None


def _check_version(adapter: Adapter, block: str, parameter: str) -> None:
    """Refuse ambiguous matrices of a PEFT version that had them transposed."""
    version = re.match(r"(\d+)\.(\d+)", str(adapter.config.get("peft_version")))
    if version is None or tuple(map(int, version.groups())) < _FIRST_VERSION:
        raise CheckpointingException(
            f"The matrices of {block!r} for {parameter} fit either way, and PEFT before 0.19 had "
            f"them transposed. The {CONFIG_NAME} of {adapter.location!r} must say a peft_version "
            "of 0.19 or newer."
        )


def _scaling(adapter: Adapter, module: str, rank: int) -> float:
    """Return the factor of a product.

    As in PEFT, the first patterns that the module matches count.
    """
    config = adapter.config
    try:
        r = _value_for(module, config.get("rank_pattern"), config.get("r"))
        alpha = _value_for(module, config.get("alpha_pattern"), config.get("lora_alpha"))
        scaling: float = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if r == rank and math.isfinite(scaling):
            return scaling
    except (re.error, AttributeError, TypeError, ArithmeticError):
        pass
    names = ("r", "rank_pattern", "lora_alpha", "alpha_pattern")
    fields = {name: config.get(name) for name in names}
    raise CheckpointingException(
        f"The {CONFIG_NAME} of the adapter {adapter.location!r} contradicts its matrices of rank "
        f"{rank} for {module!r}, or does not say how to scale them: {fields}. Correct it."
    )


def _value_for(module: str, by_pattern: Mapping[str, Any] | None, default: Any) -> Any:
    for pattern, value in (by_pattern or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


# --- Whether the export has it --------------------------------------------------------------------


def _check_saved(
    adapter: Adapter,
    changes: Mapping[str, Change],
    exported: Shapes,
) -> None:
    """Refuse an adapter that lacks tensors for exported modules to save."""
    if not changes:
        raise _incomplete(adapter, "target_modules", adapter.config.get("target_modules"))
    listed = adapter.config.get("modules_to_save") or ()
    saved = []
    for name, change in changes.items():
        if change.replacement is not None:
            saved.append(name)
    absent = []
    for module in listed:
        if not _is_in(module, saved):
            absent.append(module)
    # PEFT adds names for classifiers, of which a model has one.
    has_none = len(absent) == len(listed) > 0
    if has_none or any(_is_in(module, exported) for module in absent):
        raise _incomplete(adapter, "modules_to_save", absent)


def _incomplete(adapter: Adapter, field: str, value: object) -> CheckpointingException:
    return CheckpointingException(
        f"The adapter {adapter.location!r} has no tensors for {field}={value!r} of its "
        f"{CONFIG_NAME}: the file is not complete."
    )


def _is_in(module: str, names: Iterable[str]) -> bool:
    return any(f".{module}." in f".{name}" for name in names)


def _check_are_exported(
    adapter: Adapter,
    changes: Mapping[str, Change],
    exported: Shapes,
) -> None:
    unmatched = changes.keys() - exported.keys()
    if unmatched:
        near = did_you_mean(min(unmatched), list(exported))
        raise LoadMismatchError(
            f"The adapter {adapter.location!r} changes {summarize_keys(unmatched)}, not tensors "
            f"of the export{near}. Use `rules`, `family` or `rename` so that the export has the "
            "names of the model that the adapter is of, or use merge_and_unload of PEFT.",
            missing=unmatched,
        )


def _check_tied(
    adapter: Adapter,
    changes: Mapping[str, Change],
    outputs: Mapping[str, OutputTensor],
    model: Mapping[str, Any],
    tied: Collection[str],
) -> None:
    """Refuse a replaced embedding that is also the output layer.

    PEFT leaves the output layer as it is.
    """
    embeddings = _possible_embeddings(outputs, model)
    for name, change in changes.items():
        if change.replacement is None or change.product is not None:
            continue
        if name in embeddings or any(part.key in tied for part in outputs[name].mapped.parts):
            raise CheckpointingException(
                f"The adapter {adapter.location!r} has a {name!r} of its own, which is the model's "
                "output layer, too: PEFT leaves that as it was, so both are no longer one tensor. "
                "Export both, with tied='write' from a checkpoint that has both names, or use "
                "merge_and_unload of PEFT. If the model has no output layer, let its config.json "
                "say tie_word_embeddings=false."
            )


def _possible_embeddings(outputs: Mapping[str, OutputTensor], model: Mapping[str, Any]) -> set[str]:
    """Return the names of possible embeddings that are also the output layer."""
    text = text_config(model)
    if model.get("tie_word_embeddings", text.get("tie_word_embeddings")) is False:
        return set()
    counts = Counter(output.shape for output in outputs.values())
    vocabulary = text.get("vocab_size")
    embeddings = set()
    for name, output in outputs.items():
        shape = output.shape
        if len(shape) == 2 and shape[0] == vocabulary and counts[shape] == 1:
            embeddings.add(name)
    return embeddings


def _check_parameters(adapter: Adapter, changes: Mapping[str, Change]) -> None:
    """Refuse an adapter without matrices for a parameter that it lists."""
    for parameter in adapter.config.get("target_parameters") or ():
        first = OF_EXPERTS.get(parameter.rpartition(".")[2], (parameter,))[0]
        if not any(_is_for(parameter, first, name, change) for name, change in changes.items()):
            raise CheckpointingException(
                f"The adapter {adapter.location!r} has no tensors for {parameter!r}, of "
                f"target_parameters in its {CONFIG_NAME}: it is not complete, or they are no "
                "experts that can be merged here."
            )


def _is_for(parameter: str, first: str, name: str, change: Change) -> bool:
    """Whether a tensor's change is for a parameter.

    For experts, `first` is the first part of the parameter.
    """
    is_of_experts = change.product is not None and change.product.num_experts > 0
    return (is_of_experts and f".{first}." in name) or ends_with(name, [parameter])


def _check_shape(adapter: Adapter, output: OutputTensor, change: Change) -> None:
    shapes = set()
    if change.replacement is not None:
        shapes.add(adapter.stored.global_shape(change.replacement))
    if change.product is not None:
        shapes.add(_shape_of(adapter, output, change.product))
    if shapes != {output.shape} or not is_summed(FROM_NAME[output.mapped.dtype]):
        raise CheckpointingException(
            f"The adapter {adapter.location!r} is for {output.name!r} of shape "
            f"{' or '.join(map(str, shapes))}, and the export has {output.mapped.dtype} of "
            f"{output.shape}: it is of another model."
        )


def _shape_of(adapter: Adapter, output: OutputTensor, product: Product) -> tuple[int, ...]:
    if product.num_experts:
        # The shapes of experts have been compared.
        return output.shape
    (*rows, rank), (inner, *columns) = map(adapter.stored.global_shape, (product.b, product.a))
    shape = (*rows, *columns) if rank == inner else (*rows, rank, inner, *columns)
    if product.transposed:
        return shape[::-1]
    return shape
