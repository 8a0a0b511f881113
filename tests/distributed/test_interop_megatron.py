"""Megatron Core's GPT model, saved and loaded through distckpt as it is, and checkpoints that
Megatron wrote.

Every element of the model has a value that follows from its key and its place in the global tensor,
so any layout can be checked alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import distckpt
from distckpt import torch_dist
from distckpt.megatron import exchange_utils, tensor_aware_state_dict
from distckpt.megatron.interop import register_types
from distckpt.megatron.strategies import checkpointable
from distckpt.megatron.strategies import torch as strategies_of_torch
from distckpt.megatron.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from distckpt.megatron.validation import StrictHandling
from tests.support import harness
from tests.support.harness import error_of
from tests.support.megatron_gpt import (
    TIMEOUT,
    fill,
    leaves,
    local_part,
    make_model,
    megatron,
    needs_megatron,
    request_of,
    save_with_megatron,
    whole,
)

pytestmark = needs_megatron


def wrong_keys(model):
    return [
        shard.key
        for shard in leaves(model.sharded_state_dict())
        if not torch.equal(shard.data, local_part(shard))
    ]


def save_through_distckpt(rank, path):
    model = make_model(2, 1)
    fill(model)
    register_types()
    args = argparse.Namespace(backend=megatron(".transformer.enums").AttnBackend.auto)
    state = {**request_of(model), "iteration": 7, "args": args}
    before = {key: id(value) for key, value in state["model"].items()}
    distckpt.save(state, path)
    return {key: id(value) for key, value in state["model"].items()} == before, len(
        list(leaves(state))
    )


def load_into(rank, path, tp, pp):
    """Load a checkpoint under another layout; tell what is wrong with the weights then."""
    warnings.simplefilter("ignore")
    register_types()
    model = make_model(tp, pp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    loaded, missing, unexpected = distckpt.megatron.load(
        request_of(model), path, strict=StrictHandling.RETURN_ALL
    )
    model.load_state_dict(loaded["model"])
    return (
        wrong_keys(model),
        loaded["iteration"],
        sorted(missing),
        sorted(unexpected),
        len(list(model.parameters())),
    )


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("gpt") / "checkpoint")
    unchanged = run(save_through_distckpt, 2, path, group_timeout=TIMEOUT)
    assert [kept for kept, _ in unchanged] == [True, True]
    assert all(count > 20 for _, count in unchanged)
    return path


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 1)])
def test_gpt_saved_at_tp2_loads_in_other_layouts(run, saved, tp, pp):
    for wrong, iteration, missing, unexpected, count in run(
        load_into, tp * pp, saved, tp, pp, group_timeout=TIMEOUT
    ):
        assert (wrong, iteration, missing, unexpected) == ([], 7, [], [])
        assert count > 10


def export_together(rank, source, target):
    torch_dist.export(source, target)


def load_with_megatron(rank, path, tp, pp):
    warnings.simplefilter("ignore")
    model, checkpointing = make_model(tp, pp), megatron(".dist_checkpointing")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    loaded = checkpointing.load(request_of(model), path)
    model.load_state_dict(loaded["model"])
    return wrong_keys(model), loaded["iteration"], loaded["args"].backend.name


def test_what_is_exported_loads_with_megatron(run, saved, tmp_path):
    path = str(tmp_path / "exported")
    run(export_together, 2, saved, path)
    assert sorted(os.listdir(path)) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "common.pt",
        "metadata.json",
    ]
    for outcome in run(load_with_megatron, 2, path, 1, 2, group_timeout=TIMEOUT):
        assert outcome == ([], 7, "auto")


ROWS = torch.arange(8 * 3.0).reshape(8, 3)


def save_as_megatron_fsdp(rank, path):
    """Save as training scripts do with `--ckpt-format fsdp_dtensor`: uneven DTensors, and what goes
    with them.
    """
    warnings.simplefilter("ignore")
    uneven = megatron(".distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
    local = ROWS[:5] if rank == 0 else ROWS[5:]
    mesh = init_device_mesh("cpu", (2,))

    def shard(tensor):
        return DTensor.from_local(
            tensor.clone(), mesh, [Shard(0)], run_check=False, shape=(8, 3), stride=(3, 1)
        )

    state = {
        "model": {"module.w": shard(local)},
        "optimizer": {
            "state": {"module.w": {"exp_avg": shard(-local)}},
            "param_to_group_meta": {"module.w": {"lr": 0.1}},
        },
        "args": argparse.Namespace(dtype=torch.bfloat16),
        "iteration": 7,
    }
    dcp.save(uneven.preprocess_state_dict_for_uneven_dtensor(state), checkpoint_id=path)


def test_directories_of_megatron_fsdp_load_by_their_names(run, tmp_path):
    path = str(tmp_path / "fsdp")
    run(save_as_megatron_fsdp, 2, path, group_timeout=TIMEOUT)
    parts = [
        distckpt.ShardedTensor.from_rank_offsets("model.module.w", torch.zeros(2, 3), (0, i, 4))
        for i in range(4)
    ]
    moments = distckpt.ShardedTensor.from_rank_offsets(
        "optimizer.state.module.w.exp_avg", torch.zeros(8, 3)
    )
    loaded = distckpt.megatron.load({"parts": parts, "moments": moments}, path, strict="raise_all")
    assert torch.equal(torch.cat(loaded["parts"]), ROWS)
    assert torch.equal(loaded["moments"], -ROWS)
    assert (loaded["iteration"], loaded["args"].dtype) == (7, torch.bfloat16)
    assert loaded["optimizer"]["param_to_group_meta"]["module.w"]["lr"] == 0.1


@pytest.fixture(scope="module")
def saved_by_megatron(run, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("torch_dist") / "checkpoint")
    names, _ = run(save_with_megatron, 2, path, group_timeout=TIMEOUT)
    assert {".metadata", "metadata.json"} < set(names)
    return path


def load_what_megatron_saved(rank, path):
    """Load everything but the model: objects by their cells, and common state."""
    warnings.simplefilter("ignore")
    refused = str(error_of(distckpt.load, {}, path))
    register_types()
    asked = {
        "rng": distckpt.ShardedObject("rng", None, (2,), (1,)),
        "flags": distckpt.ShardedObject("a/flags", None, (1, 1), (0, 0)),
        "hidden": distckpt.ShardedObject("hidden", None, (1,), (0,)),
    }
    loaded = distckpt.load(asked, path, validate_access_integrity=False)
    loaded["hidden"] = loaded["hidden"].read()
    loaded["flags"] = loaded["flags"].tolist()
    # Classes that the parent may not have imported.
    args = loaded["args"]
    args.backend, args.mode, args.config = (
        args.backend.name,
        args.mode.name,
        (type(args.config).__name__, args.config.lr),
    )
    return loaded, distckpt.megatron.load_content_metadata(path), refused


WHAT_MEGATRON_SAVED = {
    "rng": {"rank": 1},
    "flags": [0, 1, 2],
    "hidden": b"state",
    "iteration": 7,
    "args": argparse.Namespace(
        dtype=torch.bfloat16,
        backend="auto",
        betas=(0.9, 0.95),
        mode="DISABLED",
        config=("OptimizerConfig", 0.5),
    ),
    "optimizer": {"groups": [{"lr": 0.1}]},
}


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_gpt_that_megatron_saved_loads(run, saved_by_megatron, tp, pp):
    for wrong, iteration, missing, unexpected, _ in run(
        load_into, tp * pp, saved_by_megatron, tp, pp, group_timeout=TIMEOUT
    ):
        assert (wrong, iteration, missing, unexpected) == ([], 7, ["a/flags", "hidden", "rng"], [])


def test_objects_and_common_state_that_megatron_saved_load(saved_by_megatron):
    # Types are not registered in a new process.
    ((loaded, content_metadata, refused),) = harness.run(
        load_what_megatron_saved, 1, saved_by_megatron
    )
    assert loaded == WHAT_MEGATRON_SAVED
    assert content_metadata == {"layout": "plain"}
    assert "common.pt" in refused
    assert "needs 'megatron.core." in refused
    assert "register_types" in refused


def convert_together(rank, source, target):
    warnings.simplefilter("ignore")
    register_types()
    distckpt.reshard(source, target)
    return load_what_megatron_saved(rank, target)[0]


def test_conversion_by_two_ranks(run, saved_by_megatron, tmp_path):
    target = str(tmp_path / "converted")
    assert run(convert_together, 2, saved_by_megatron, target) == [WHAT_MEGATRON_SAVED] * 2
    assert distckpt.megatron.serialization.load_sharded_metadata(
        target
    ) == distckpt.megatron.serialization.load_sharded_metadata(saved_by_megatron)
    converted = distckpt.megatron.load_plain_tensors(target)
    assert [
        key
        for key, tensor in converted.items()
        if not torch.equal(tensor, whole(key, tensor.shape))
    ] == []
    assert converted.keys() == distckpt.megatron.load_tensors_metadata(saved_by_megatron).keys()


def test_consolidation_of_what_megatron_saved(saved_by_megatron, tmp_path):
    distckpt.consolidate(saved_by_megatron, str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == distckpt.megatron.load_tensors_metadata(saved_by_megatron).keys()
    assert [
        key for key, tensor in exported.items() if not torch.equal(tensor, whole(key, tensor.shape))
    ] == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [(os.unlink, "missing"), (lambda path: os.truncate(path, 100), "cut off")],
)
def test_damage_to_what_megatron_saved(saved_by_megatron, tmp_path, damage, problem):
    copy = shutil.copytree(saved_by_megatron, tmp_path / "copy")
    damage(copy / "__1_0.distcp")
    with pytest.raises(distckpt.CorruptCheckpointError, match=rf"__1_0\.distcp.*{problem}"):
        distckpt.load({}, copy)


# ---- names that are Megatron's own, with the objects of distckpt


def sharded(package, rank, value, more=()):
    """A state dict of the objects of a package: halves, copies, a factory, an object for each rank,
    and what is not stored.
    """

    def tensor(key, data, *offsets, replica_id=0):
        return package.ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica_id)

    def build(key, data, replica_id, flattened_range):
        return [
            tensor(f"{key}.{i}", part, replica_id=replica_id)
            for i, part in enumerate(data.split(1))
        ]

    return {
        "half": tensor("half", torch.full((2,), value), (0, rank, 2)),
        "list": [
            tensor("copy", torch.full((3,), value), replica_id=rank),
            package.ShardedTensorFactory(
                "built", torch.full((2,), value), build, torch.cat, replica_id=rank
            ),
            package.ShardedObject("object", [value], (2,), (rank,)),
        ],
        "mine": package.LocalNonpersistentObject(rank),
        **{key: tensor(key, torch.zeros(1), replica_id=rank) for key in more},
    }


def use_local_checkpoint(rank):
    """Fill state dicts of distckpt's objects from one of Megatron's in memory, in every mode."""
    warnings.simplefilter("ignore")
    package = "megatron.core.dist_checkpointing"
    theirs = importlib.import_module(f"{package}.mapping")
    preprocess = importlib.import_module(f"{package}.state_dict_utils").save_preprocess
    kept, _ = preprocess(sharded(theirs, rank, 1.0))
    local = tensor_aware_state_dict.MCoreTensorAwareStateDict(
        common={"step": 3}, sharded_state_dict=kept
    )
    loaded = [
        local.to_state_dict(sharded(distckpt.mapping, rank, 0.0), strict=mode)
        for mode in StrictHandling
    ]
    more = sharded(distckpt.mapping, rank, 0.0, ["more"])
    mode = StrictHandling.RAISE_UNEXPECTED
    refused = error_of(local.to_state_dict, more, "atomic", strict=mode)
    whole = {
        "a": distckpt.ShardedTensor.from_rank_offsets_flat(
            "flat", torch.zeros(2), (4,), flattened_range=slice(0, 2)
        )
    }
    return loaded, refused, error_of(local.to_state_dict, whole)


def test_a_local_checkpoint_of_megatron_fills_objects_of_distckpt(run):
    for rank, (loaded, refused, flat) in enumerate(run(use_local_checkpoint, 2)):
        assert len(loaded) == len(StrictHandling)
        for state in loaded:
            tensors = [state["half"], *state["list"][:2]]
            assert [tensor.tolist() for tensor in tensors] == [[1, 1], [1, 1, 1], [1, 1]]
            assert (state["list"][2], state["mine"], state["step"]) == ([1], rank, 3)
        assert isinstance(refused, distckpt.CheckpointingException)
        assert "Unexpected keys" in str(refused)
        assert "more" in str(refused)
        assert isinstance(flat, distckpt.CheckpointingException)
        assert "'flat'" in str(flat)


def use_forwarded_functions(rank):
    warnings.simplefilter("ignore")
    state = sharded(distckpt.mapping, rank, 1.0)
    del state["list"][1], state["mine"]
    FullyParallelSaveStrategyWrapper(None).apply_saving_parallelization(state)
    distribution = exchange_utils.determine_main_replica_uniform_distribution(state, None)
    made = checkpointable.CheckpointableShardedTensor.from_sh_ten(state["half"])
    assert isinstance(made, checkpointable.CheckpointableShardedTensor)
    assert type(made).__mro__[1].__module__.startswith("megatron.")
    converted = strategies_of_torch.mcore_to_pyt_state_dict({"a": [state["half"]]}, False)
    return (
        {type(value).__module__.partition(".")[0] for value in leaves(state)},
        state["list"][0].replica_id,
        {key for key, *_ in distribution.main_rank_for_shard},
        list(converted),
    )


def test_functions_of_megatron_take_objects_of_distckpt(run):
    results = run(use_forwarded_functions, 2)
    for packages, _, keys, converted in results:
        assert packages == {"distckpt"}
        assert keys == {"copy", "half"}
        assert converted == ["a"]
    assert sorted(replica_id for _, replica_id, _, _ in results) == [0, 1]
