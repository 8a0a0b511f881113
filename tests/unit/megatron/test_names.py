"""The names that programs for Megatron Core import, and the order of their arguments."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

from distckpt import mapping, megatron
from distckpt.megatron import serialization
from distckpt.megatron.validation import StrictHandling
from tests.support.reference import megatron_or_skip

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
        "AsyncSaveShardedStrategy",
        "LoadCommonStrategy",
        "LoadShardedStrategy",
        "SaveCommonStrategy",
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
    positional, keyword_only = parameters_of(megatron.save)
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
    assert {"common_strategy", "overwrite", "process_group"} == set(keyword_only)
    defaults = defaults_of(megatron.save)
    assert defaults["validate_access_integrity"] is True
    assert defaults["async_sharded_save"] is False
    assert defaults["sharded_strategy"] is None
    assert defaults["overwrite"] is False


def test_load_takes_arguments_in_megatrons_order():
    positional, keyword_only = parameters_of(megatron.load)
    assert positional == [
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "validate_access_integrity",
        "strict",
        "verify_integrity",
        "process_group",
    ]
    assert {"common_strategy", "rules", "family"} == set(keyword_only)
    defaults = defaults_of(megatron.load)
    assert defaults["strict"] is StrictHandling.ASSUME_OK_UNEXPECTED
    assert defaults["validate_access_integrity"] is True
    assert defaults["verify_integrity"] is False
    assert defaults["process_group"] is None


def test_the_verbs_of_the_package_are_those_of_serialization():
    for name in megatron.__all__:
        if hasattr(serialization, name):
            assert getattr(megatron, name) is getattr(serialization, name)


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


INTERNAL = {
    "dict_utils": {"U", "V"},
    "exchange_utils": {"T"},
    "serialization": {"get_default_save_common_strategy"},
    "strategies.common": {"register_default_common_strategies"},
    "strategies.fully_parallel": {"T"},
    "strategies.torch": {"register_default_torch_strategies"},
    "validation": {"validate_sharded_objects_handling", "verify_checkpoint_and_load_strategy"},
}
"""What only Megatron's own modules use, in some versions."""


def test_every_name_of_the_installed_megatron_is_there():
    theirs = megatron_or_skip("dist_checkpointing")
    found = pkgutil.walk_packages(theirs.__path__)
    for path in ["", *(module.name for module in found)]:
        name = f"{theirs.__name__}.{path}".rstrip(".")
        module = importlib.import_module(name)
        own = importlib.import_module(f"distckpt.megatron.{path}".rstrip("."))
        defined = {
            public
            for public, value in vars(module).items()
            if not public.startswith("_") and getattr(value, "__module__", None) == name
        }
        absent = {public for public in defined if not hasattr(own, public)}
        assert absent <= INTERNAL.get(path, set()), path


@pytest.mark.parametrize("verb", ["save", "load"])
def test_the_positional_arguments_of_the_installed_megatron_are_taken(verb):
    theirs = megatron_or_skip("dist_checkpointing")
    positional, keywords = parameters_of(getattr(megatron, verb))
    given, _ = parameters_of(getattr(theirs, verb))
    assert set(given) <= {*positional, *keywords}
    without_common = [name for name in given if name != "common_strategy"]
    assert positional[: len(without_common)] == without_common


def test_modules_are_there_without_an_import_of_each():
    code = (
        "from distckpt import megatron as d; d.dict_utils.merge, d.validation.StrictHandling, "
        "d.strategies.torch.TorchDistSaveShardedStrategy, d.strategies.fully_parallel"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for package in (megatron, megatron.strategies):
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = package.nonsense
