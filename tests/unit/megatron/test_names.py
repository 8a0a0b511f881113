"""The names that programs for Megatron Core import, and the order of their arguments."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch

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
    "strategies.base": {"async_calls", "default_strategies"},
    "serialization": {"get_default_save_common_strategy"},
    "strategies.filesystem_async": {"WriteBucket"},
    "strategies.common": {"register_default_common_strategies"},
    "strategies.fully_parallel": {"T"},
    "strategies.torch": {"MSC_PREFIX", "register_default_torch_strategies"},
    "tensor_aware_state_dict": {"logger"},
    "validation": {"validate_sharded_objects_handling", "verify_checkpoint_and_load_strategy"},
}
"""What only Megatron's own modules use, in some versions."""


def test_every_name_of_the_installed_megatron_is_there():
    for path, module, own in modules_of_both():
        absent = {name for name in names_in(module) if not hasattr(own, name)}
        if path.startswith("strategies."):
            absent.discard("logger")
        assert absent <= INTERNAL.get(path, set()), path


def modules_of_both():
    """Yield each module of the installed Megatron, with its path, beside that of distckpt."""
    theirs = megatron_or_skip("dist_checkpointing")
    prefix = f"{theirs.__name__}."
    found = [module.name for module in pkgutil.walk_packages(theirs.__path__, prefix)]
    assert f"{prefix}strategies.torch" in found
    for name in [theirs.__name__, *found]:
        path = name.removeprefix(theirs.__name__).removeprefix(".")
        own = importlib.import_module(f"distckpt.megatron.{path}".rstrip("."))
        yield path, importlib.import_module(name), own


def names_in(module):
    """Return the public names that the code of a module assigns or defines, constants included."""
    names = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


OTHER_ARGUMENTS = {
    "serialization.load",
    "serialization.load_sharded_metadata",
    "serialization.save",
}
"""What lost the argument `common_strategy`, as in newer versions of Megatron."""


def argument_names(function):
    """Return the names of the arguments of a function; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return None
    return [parameter.name for parameter in parameters]


def other_arguments(where, own, theirs):
    """Return functions and methods below a name whose first arguments are not Megatron's."""
    if inspect.isclass(theirs):
        methods = [
            name
            for name, value in vars(theirs).items()
            if inspect.isroutine(value) and (not name.startswith("_") or name == "__del__")
        ]
        return [
            other
            for name in methods
            for other in other_arguments(
                f"{where}.{name}", getattr(own, name, None), getattr(theirs, name)
            )
        ]
    if not inspect.isroutine(theirs):
        return []
    if own is None:
        # Other methods are steps of Megatron's own format.
        return [where] if where.endswith("__del__") else []
    names, wanted = argument_names(own), argument_names(theirs)
    are_same = names is None or wanted is None or names[: len(wanted)] == wanted
    return [] if are_same else [where]


def test_arguments_have_the_names_and_order_of_the_installed_megatron():
    others = set()
    for path, module, own in modules_of_both():
        for name in names_in(module):
            if hasattr(own, name):
                where = f"{path}.{name}"
                others.update(other_arguments(where, getattr(own, name), getattr(module, name)))
    assert others == OTHER_ARGUMENTS


def test_names_of_newer_releases_are_there():
    validation = importlib.import_module("distckpt.megatron.validation")
    fully_parallel = importlib.import_module("distckpt.megatron.strategies.fully_parallel")
    torch_strategies = importlib.import_module("distckpt.megatron.strategies.torch")
    assert validation.INTEGRITY_FNAME == "integrity.json"
    assert serialization.COMMON_STATE_FNAME == "common.pt"
    load = fully_parallel.FullyParallelLoadStrategyWrapper.load
    assert argument_names(load)[-1] == "async_strategy"
    for name in ("nvrx", "mcore"):
        assert torch_strategies.get_async_strategy(name)[0] == name


def test_the_backend_of_common_state_is_in_the_marker_where_it_is_another_one(tmp_path):
    config = megatron.core.CheckpointingConfig("torch_dist")
    assert (config.common_backend, config.common_backend_version) == ("torch", 1)
    megatron.core.save_config(config, tmp_path)
    assert "common_backend" not in (tmp_path / "metadata.json").read_text()
    assert megatron.core.maybe_load_config(tmp_path) == config
    other = megatron.core.CheckpointingConfig("torch_dist", 1, "zarr", 2)
    megatron.core.save_config(other, tmp_path)
    assert megatron.core.maybe_load_config(tmp_path) == other


SHARDED = ["ShardedTensor", "ShardedObject", "ShardedTensorFactory", "LocalNonpersistentObject"]


def made_by(module):
    """Return an object of each sharded class of a module."""
    data = torch.ones(2)
    return {
        "ShardedTensor": module.ShardedTensor.from_rank_offsets("weight", data),
        "ShardedObject": module.ShardedObject("state", 1, (1,), (0,)),
        "ShardedTensorFactory": module.ShardedTensorFactory("fused", data, dict, sum),
        "LocalNonpersistentObject": module.LocalNonpersistentObject(3),
    }


@pytest.mark.parametrize("name", SHARDED)
def test_classes_answer_for_megatrons_objects_and_megatrons_for_ours(name):
    theirs = megatron_or_skip("dist_checkpointing.mapping")
    for made, module in ((made_by(mapping), theirs), (made_by(theirs), mapping)):
        kinds = [other for other in SHARDED if isinstance(made[name], getattr(module, other))]
        assert kinds == [name]
        assert isinstance(made[name], module.ShardedBase) == (name != SHARDED[-1])
        copied = copy.deepcopy(made[name])
        assert type(copied) is type(made[name])
    assert not isinstance(data := torch.ones(2), mapping.ShardedTensor), data


def test_classes_that_a_program_derives_do_not_answer_for_megatrons_objects():
    theirs = megatron_or_skip("dist_checkpointing.mapping")

    class Own(mapping.ShardedTensor):
        pass

    assert not isinstance(made_by(theirs)["ShardedTensor"], Own)
    own = Own.from_rank_offsets("weight", torch.ones(2))
    assert isinstance(own, mapping.ShardedTensor)
    assert isinstance(own, theirs.ShardedTensor)


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
