"""The names that users import, those of Megatron Core among them, and the order of their
arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from pathlib import Path

import pytest

import distckpt
from distckpt import StrictHandling, mapping
from distckpt.megatron import serialization

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_and_lists_everything_public():
    assert distckpt.__all__ == sorted(set(distckpt.__all__))
    submodules = {module.name for module in pkgutil.iter_modules(distckpt.__path__)}
    public = {name for name in dir(distckpt) if not name.startswith("_")} - submodules
    assert public - {"annotations", "importlib", "TYPE_CHECKING", "Any"} == set(distckpt.__all__)


def test_type_checkers_see_the_names_that_programs_get():
    block = next(
        node
        for node in ast.parse(Path(distckpt.__file__).read_text()).body
        if isinstance(node, ast.If)
    )
    imports = [(node.module, name.name) for node in block.body for name in node.names]
    assert sorted(name for _, name in imports) == distckpt.__all__
    for module, name in imports:
        assert getattr(distckpt, name) is getattr(importlib.import_module(module), name)


def test_other_names_are_public_modules_or_errors():
    assert distckpt.hf is importlib.import_module("distckpt.hf")
    with pytest.raises(AttributeError, match="module 'distckpt' has no attribute 'nonsense'"):
        distckpt.nonsense  # noqa: B018


def undocumented_parts(name, value):
    """Return what lacks a docstring: the value, and the public methods and properties of a class
    (or their bases').
    """
    if inspect.isfunction(value):
        return [] if value.__doc__ else [name]
    parts = [
        attribute
        for attribute, member in vars(value).items()
        if not attribute.startswith("_")
        and (callable(member) or isinstance(member, property | classmethod))
    ]
    # A dataclass without a docstring is given its signature for one.
    is_documented = value.__doc__ and not value.__doc__.startswith(f"{value.__name__}(")
    undocumented = [f"{name}.{part}" for part in parts if not inspect.getdoc(getattr(value, part))]
    return undocumented + ([] if is_documented else [name])


@pytest.mark.parametrize("name", distckpt.__all__)
def test_every_name_is_importable_and_documented(name):
    value = getattr(distckpt, name)
    assert inspect.isfunction(value) or inspect.isclass(value)
    assert undocumented_parts(name, value) == []
    assert value.__module__.startswith("distckpt")
    assert "._" not in value.__module__


def public_modules():
    found = [module.name for module in pkgutil.walk_packages(distckpt.__path__, "distckpt.")]
    return [name for name in found if not any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", public_modules())
def test_public_modules_list_their_names(name):
    module = importlib.import_module(name)
    if any(getattr(value, "__module__", None) == name for value in vars(module).values()):
        assert module.__all__ == sorted(set(module.__all__))
        assert [public for public in module.__all__ if not hasattr(module, public)] == []


@pytest.mark.parametrize("name", ["distckpt", *public_modules()])
def test_public_names_say_a_public_module_and_have_types(name):
    """Those of a class that has moved are found in its new home."""
    module = importlib.import_module(name)
    for value in (getattr(module, public) for public in getattr(module, "__all__", ())):
        assert "._" not in getattr(value, "__module__", "")
        members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
        for member in members:
            if inspect.isclass(member) or inspect.isfunction(member):
                typing.get_type_hints(member)


@pytest.mark.parametrize("name", public_modules())
def test_public_modules_document_what_they_define(name):
    module = importlib.import_module(name)
    assert module.__doc__
    undocumented = [
        part
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == name
        for part in undocumented_parts(attribute, value)
    ]
    assert undocumented == []


def test_the_version_is_that_of_the_distribution():
    (declared,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert distckpt.__version__ == declared


# What programs written for Megatron Core import from its package, by submodule.
MEGATRON_NAMES = {
    "": [
        "LocalNonpersistentObject",
        "ShardedObject",
        "ShardedTensor",
        "check_is_distributed_checkpoint",
        "load",
        "load_common_state_dict",
        "load_content_metadata",
        "load_plain_tensors",
        "load_tensors_metadata",
        "remove_sharded_tensors",
        "save",
    ],
    "core": [
        "CheckpointingConfig",
        "CheckpointingException",
        "check_is_distributed_checkpoint",
        "maybe_load_config",
        "save_config",
    ],
    "dict_utils": [
        "dict_list_map_inplace",
        "dict_list_map_outplace",
        "dict_map",
        "dict_map_with_key",
        "diff",
        "extract_matching_values",
        "inspect_types",
        "map_reduce",
        "merge",
        "nested_items_iter",
        "nested_values",
    ],
    "mapping": [
        "CommonStateDict",
        "FactoryBuildFn",
        "FactoryMergeFn",
        "LocalNonpersistentObject",
        "ReplicaId",
        "ShardedBase",
        "ShardedObject",
        "ShardedStateDict",
        "ShardedTensor",
        "ShardedTensorFactory",
        "StateDict",
        "apply_factories",
        "apply_factory_merges",
        "is_main_replica",
    ],
    "optimizer": [
        "KEEP_VARS_HINT",
        "get_optim_param_to_id_map",
        "get_param_id_to_sharded_param_map",
        "make_sharded_optimizer_tensor",
        "optim_state_to_sharding_state",
    ],
    "serialization": [
        "get_default_load_sharded_strategy",
        "get_default_save_sharded_strategy",
        "load",
        "load_common_state_dict",
        "load_content_metadata",
        "load_plain_tensors",
        "load_sharded_metadata",
        "load_tensors_metadata",
        "remove_sharded_tensors",
        "save",
    ],
    "strategies.base": [
        "LoadShardedStrategy",
        "SaveShardedStrategy",
        "StrategyAction",
        "get_default_strategy",
        "register_default_strategy",
    ],
    "strategies.fully_parallel": [
        "FullyParallelLoadStrategyWrapper",
        "FullyParallelSaveStrategyWrapper",
    ],
    "utils": [
        "_clean_metadata_for_serialization",
        "_sharded_object_id",
        "_sharded_tensor_shard_id",
        "add_prefix_for_sharding",
        "apply_prefix_mapping",
        "debug_time",
        "extract_nonpersistent",
        "extract_sharded_base",
        "extract_sharded_tensors",
        "extract_sharded_tensors_and_factories",
        "force_all_tensors_to_non_fp8",
        "logger_stack",
        "replace_prefix_for_sharding",
        "zip_strict",
    ],
    "validation": [
        "StrictHandling",
        "determine_global_metadata",
        "parse_strict_flag",
        "validate_integrity_and_strict_load",
        "validate_sharding_integrity",
        "verify_checkpoint",
    ],
}


@pytest.mark.parametrize("submodule", MEGATRON_NAMES)
def test_programs_written_for_megatron_find_their_names(submodule):
    module = importlib.import_module(f"distckpt.megatron.{submodule}".rstrip("."))
    absent = [name for name in MEGATRON_NAMES[submodule] if not hasattr(module, name)]
    assert absent == []


def parameters_of(function):
    """Return the names of the arguments that can be positional, and those that cannot."""
    kinds = inspect.signature(function).parameters.values()
    positional = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, [p.name for p in kinds if p.kind is p.KEYWORD_ONLY]


def defaults_of(function):
    return {
        p.name: p.default
        for p in inspect.signature(function).parameters.values()
        if p.default is not p.empty
    }


def test_save_takes_arguments_in_megatrons_order():
    positional, keyword_only = parameters_of(distckpt.save)
    assert positional == [
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "validate_access_integrity",
        "async_sharded_save",
        "preprocess_common_before_consistancy_check",
        "content_metadata",
        "async_strategy",
        "verify_integrity",
    ]
    assert {"common_strategy", "overwrite", "process_group", "validate_replicas"} <= set(
        keyword_only
    )
    defaults = defaults_of(distckpt.save)
    assert defaults["validate_access_integrity"] is True
    assert defaults["async_sharded_save"] is False
    assert defaults["sharded_strategy"] is None
    assert defaults["overwrite"] is False


def test_load_takes_arguments_in_megatrons_order():
    positional, keyword_only = parameters_of(distckpt.load)
    assert positional == [
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "validate_access_integrity",
        "strict",
        "verify_integrity",
        "process_group",
    ]
    assert {"allow_dtype_cast", "common_strategy", "verify"} <= set(keyword_only)
    defaults = defaults_of(distckpt.load)
    assert defaults["strict"] is StrictHandling.ASSUME_OK_UNEXPECTED
    assert defaults["validate_access_integrity"] is True
    assert defaults["verify_integrity"] is False
    assert defaults["process_group"] is None


def test_the_verbs_of_the_package_are_those_of_serialization():
    for name in ("load", "save", "load_common_state_dict", "load_tensors_metadata"):
        assert getattr(distckpt, name) is getattr(serialization, name)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (
            mapping.ShardedTensor,
            "key data dtype local_shape global_shape global_offset axis_fragmentations "
            "replica_id prepend_axis_num allow_shape_mismatch flattened_range",
        ),
        (mapping.ShardedObject, "key data global_shape global_offset replica_id"),
        (
            mapping.ShardedTensorFactory,
            "key data build_fn merge_fn replica_id flattened_range",
        ),
    ],
)
def test_fields_have_megatrons_names_and_order(cls, names):
    assert [field.name for field in dataclasses.fields(cls)] == names.split()


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (
            mapping.ShardedTensor,
            "from_rank_offsets from_rank_offsets_flat global_coordinates global_slice "
            "has_regular_grid init_data local_chunk_offset_in_global local_coordinates "
            "max_allowed_chunks narrow validate_metadata_integrity without_data",
        ),
        (mapping.ShardedObject, "empty_from_unique_key unique_key without_data"),
        (mapping.ShardedTensorFactory, "build without_data"),
        (mapping.LocalNonpersistentObject, "unwrap"),
    ],
)
def test_classes_have_megatrons_methods(cls, names):
    assert [name for name in names.split() if not hasattr(cls, name)] == []


def test_strict_modes_are_megatrons():
    names = ["assume_ok_unexpected", "ignore_all", "log_all", "log_unexpected"]
    names += ["raise_all", "raise_unexpected", "return_all", "return_unexpected"]
    assert sorted(mode.value for mode in StrictHandling) == names
    assert all(mode.name == mode.value.upper() for mode in StrictHandling)


def test_errors_are_found_under_the_standard_ones_too():
    assert issubclass(distckpt.InvalidShardingError, ValueError)
    assert issubclass(distckpt.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(distckpt.CheckpointExistsError, FileExistsError)
    assert issubclass(distckpt.LoadMismatchError, LookupError)
    assert issubclass(distckpt.UnsupportedObjectError, TypeError)
    errors = [getattr(distckpt, name) for name in distckpt.__all__ if name.endswith("Error")]
    assert len(errors) == 7
    assert all(issubclass(error, distckpt.CheckpointingException) for error in errors)
