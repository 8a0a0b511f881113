"""Programs written for torch.distributed.checkpoint on several ranks, with that module's import
changed.

The oracle is torch.distributed.checkpoint: the same program run with it must end with the same
values.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import distckpt
from distckpt import InvalidShardingError, LoadMismatchError, UnsupportedObjectError
from tests.support.example_programs import run_preloaded
from tests.support.harness import error_of, launched, run, sum_over_ranks
from tests.support.parallel_modules import fsdp, fsdp_over_tp, hsdp, plain
from tests.support.reference import fsdp2_trains
from tests.support.states import numbered

TORCH, OURS = "torch.distributed.checkpoint", "distckpt.dcp"
ORACLE = (TORCH, TORCH)
ROADS = [(OURS, OURS), (TORCH, OURS), ORACLE]
"""Who saves and who loads. Torch comes last: its warnings are no errors from then on."""


def library(name):
    if name == TORCH:
        warnings.simplefilter("ignore")
    return importlib.import_module(name)


def save_with_both(rank, save, folder, *args):
    return {name: save(rank, name, f"{folder}/{name}", *args) for name in (OURS, TORCH)}


def load_each_way(rank, load, folder, *args):
    return {road: load(rank, road[1], f"{folder}/{road[0]}", *args) for road in ROADS}


def loaded_like_torch(load, num_ranks, folder, *args):
    """Return what torch has loaded of its own, by rank, after comparing it with what was loaded in
    other ways.
    """
    loaded = run(load_each_way, num_ranks, load, str(folder), *args)
    oracle = [found[ORACLE] for found in loaded]
    for road in ROADS:
        assert differences([found[road] for found in loaded], oracle) == [], road
    return oracle


def without_dtensors(value):
    """Return a value without DTensors, to be compared and sent."""
    if isinstance(value, dict):
        return {key: without_dtensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_dtensors(item) for item in value]
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def differences(one, other, path="state"):
    """List where two nested values differ."""
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        only = [f"{path}.{key}" for key in one.keys() ^ other.keys()]
        return only + [
            bad
            for key in one
            if key in other
            for bad in differences(one[key], other[key], f"{path}.{key}")
        ]
    if isinstance(one, list | tuple):
        only = [] if len(one) == len(other) else [path]
        pairs = enumerate(zip(one, other, strict=False))
        return only + [bad for i, pair in pairs for bad in differences(*pair, f"{path}.{i}")]
    same = (
        torch.equal(one, other) and one.dtype == other.dtype
        if isinstance(one, torch.Tensor)
        else one == other
    )
    return [] if same else [path]


# ---- a model and its optimizer


class Net(torch.nn.Module):
    """Sizes that 2 and 4 do not divide, and tied weights."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 6)
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embedding(tokens)).relu()))


class AppState(Stateful):
    """As in PyTorch's recipe for distributed checkpoints."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def trained(layout, seed, lr=0.01, steps=2):
    torch.manual_seed(seed)
    net = Net()
    layout(net)
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=lr, foreach=False
    )
    for step in range(steps):
        net.seen += 1
        net(torch.arange(7) + step - step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def values_of(net, optimizer):
    """Return what training goes on with, by name, whatever the layout."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    moments = {names[id(p)]: without_dtensors(dict(state)) for p, state in optimizer.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"model": without_dtensors(dict(net.state_dict())), "moments": moments, "groups": groups}


def save_app(rank, name, path, layout):
    net, optimizer = trained(layout, seed=1)
    library(name).save({"app": AppState(net, optimizer)}, checkpoint_id=path)
    return values_of(net, optimizer)


def load_app(rank, name, path, layout):
    net, optimizer = trained(layout, seed=2, lr=0.5, steps=0)
    state = {"app": AppState(net, optimizer)}
    library(name).load(state_dict=state, checkpoint_id=path)
    assert isinstance(state["app"], AppState)
    return values_of(net, optimizer)


@fsdp2_trains
@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((4, fsdp), (2, fsdp)),
        pytest.param((4, fsdp_over_tp), (4, hsdp), marks=pytest.mark.slow),
        ((4, hsdp), (1, plain)),
    ],
)
def test_the_app_state_of_the_recipe_moves_to_another_layout(tmp_path, saving, loading):
    saved = run(save_with_both, saving[0], save_app, str(tmp_path), saving[1])
    assert all(differences(of_rank[OURS], of_rank[TORCH]) == [] for of_rank in saved)
    oracle = loaded_like_torch(load_app, loading[0], tmp_path, loading[1])
    assert differences(oracle[0], saved[0][TORCH]) == [], "the oracle itself"
    assert oracle[0]["moments"]["up.weight"]["exp_avg_sq"].count_nonzero()


# ---- full state dicts, which only rank 0 has


def save_full(rank, name, path):
    net, optimizer = trained(fsdp, seed=1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = (
        get_model_state_dict(net, options=options),
        get_optimizer_state_dict(net, optimizer, options=options),
    )
    assert bool(model) == (rank == 0)
    library(name).save({"model": model, "optim": optim}, checkpoint_id=path)
    return values_of(net, optimizer)


def load_full(rank, name, path):
    """Load on rank 0 into a state dict of whole tensors, and let PyTorch divide them."""
    net, optimizer = trained(fsdp, seed=2, lr=0.5, steps=1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(net, options=options),
        "optim": get_optimizer_state_dict(net, optimizer, options=options),
    }
    library(name).load(state, checkpoint_id=path)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, state["model"], options=options)
    set_optimizer_state_dict(net, optimizer, state["optim"], options=options)
    return values_of(net, optimizer)


@fsdp2_trains
def test_full_state_dicts_go_both_ways(tmp_path):
    saved = run(save_with_both, 4, save_full, str(tmp_path))[0]
    oracle = loaded_like_torch(load_full, 2, tmp_path)
    assert differences(oracle[0]["moments"], saved[TORCH]["moments"]) == [], "the oracle itself"


# ---- all that a state dict may hold, and what only some ranks have


def mixed_state(rank, size, fill):
    """Return DTensors on meshes of all and of some ranks, lists, objects, and entries of each
    rank's own.
    """
    mesh, half = init_device_mesh("cpu", (size,)), DeviceMesh("cpu", list(range(size // 2, size)))

    def tensor(*shape):
        return numbered(*shape) if fill else torch.zeros(shape)

    state = {
        "tp": {
            "columns": distribute_tensor(tensor(6, 9), mesh, [Shard(1)]),
            "copied": distribute_tensor(tensor(5), mesh, [Replicate()]),
        },
        "stages": {"last": distribute_tensor(tensor(7, 3), half, [Shard(0)])},
        "list": [
            tensor(3),
            "text" if fill else None,
            {"deep": [tensor(2, 2), (1, 2.5) if fill else ()]},
            [1, 2],
        ],
        "objects": {
            "numbers": [1, 2, 3] if fill else [],
            "none": None if fill else 1,
            "nested": {"flag": fill},
        },
        "loader": {
            f"dp_rank_{rank}": {
                "position": 10 + rank if fill else 0,
                "buffer": tensor(4) * (rank + 1),
            }
        },
        "half": tensor(8).bfloat16() if fill else tensor(8),
    }
    if rank >= size // 2:
        state["stages"]["plain"] = tensor(4)
    return state


def save_mixed(rank, name, path, size):
    library(name).save(mixed_state(rank, size, fill=True), checkpoint_id=path)


def load_mixed(rank, name, path, size):
    state = mixed_state(rank, size, fill=False)
    before = state["list"][2]["deep"][0]
    library(name).load(state, checkpoint_id=path)
    assert state["list"][2]["deep"][0] is before, "tensors are filled in place"
    last = state["stages"].pop("last")
    return without_dtensors(state), last.to_local().clone()


@pytest.mark.parametrize("size", [2, 4])
def test_mixed_state_and_what_only_some_ranks_have(tmp_path, size):
    run(save_with_both, 4, save_mixed, str(tmp_path), 4)
    state, last = loaded_like_torch(load_mixed, size, tmp_path, size)[-1]
    assert state["loader"][f"dp_rank_{size - 1}"]["position"] == 9 + size
    assert state["half"].dtype == torch.float32
    assert last.count_nonzero() == last.numel()


def test_entries_of_one_rank_are_no_difference_in_common_state(tmp_path):
    with launched(save_mixed, 2, OURS, str(tmp_path / "saved"), 2) as launch:
        assert [outcome.warnings_logged for outcome in launch.outcomes()] == [[], []]
    common = distckpt.open(tmp_path / "saved").common_state
    assert common["objects"] == {"numbers": [1, 2, 3], "none": None, "nested": {"flag": True}}
    assert "loader" not in common


# ---- groups


def save_in_halves(rank, path):
    """Each half of the ranks saves its copy of a tensor that the mesh copies to both, as
    HYBRID_SHARD is saved.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor = distribute_tensor(numbered(5, 2), mesh, [Replicate(), Shard(0)])
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = {"weight": tensor, "plain": numbered(3), "half": rank // 2}
    library(OURS).save(state, checkpoint_id=f"{path}/{rank // 2}", process_group=halves[rank // 2])
    return sum_over_ranks(1)


def test_a_part_of_the_ranks_saves_its_copy(tmp_path):
    assert run(save_in_halves, 4, str(tmp_path)) == [4] * 4
    for half in (0, 1):
        tensors = distckpt.open(tmp_path / str(half)).read_tensors()
        assert torch.equal(tensors["weight"], numbered(5, 2))
        assert torch.equal(tensors["plain"], numbered(3))
        assert distckpt.open(tmp_path / str(half)).common_state == {"half": half}


def save_and_load_without_the_others(rank, path):
    dcp = library(OURS)
    if rank == 1:
        dcp.save({"plain": numbered(3), "rank": rank}, checkpoint_id=path, no_dist=True)
        dcp.async_save({"plain": numbered(4)}, checkpoint_id=f"{path}-async", no_dist=True).result()
        state = {"plain": torch.zeros(3), "rank": None}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        assert state["rank"] == 1
        assert torch.equal(state["plain"], numbered(3))
    return sum_over_ranks(1)


def test_one_rank_saves_and_loads_alone(tmp_path):
    assert run(save_and_load_without_the_others, 2, str(tmp_path / "alone")) == [2, 2]


# ---- sharded tensors of FSDP1


def torch_sharded(rank, fill):
    """Return rows 0-2 on rank 0 and 3-4 on rank 1 as what was there before DTensors."""
    first, last = ((0, 3), (3, 5))[rank]
    rows = (numbered(5, 4) if fill else torch.zeros(5, 4))[first:last].clone()
    shard = LocalShard.from_tensor_and_offsets(rows, [first, 0], rank)
    return init_from_local_shards([shard], 5, 4)


def save_and_load_torch_sharded(rank, path):
    warnings.simplefilter("ignore")
    library(TORCH).save({"rows": torch_sharded(rank, fill=True)}, checkpoint_id=f"{path}/torch")
    library(OURS).save({"rows": torch_sharded(rank, fill=True)}, checkpoint_id=f"{path}/ours")
    filled = []
    for name in ("torch", "ours"):
        state = {"rows": torch_sharded(rank, fill=False)}
        library(OURS).load(state, checkpoint_id=f"{path}/{name}")
        filled.append(state["rows"].local_shards()[0].tensor)
    return filled


def test_sharded_tensors_of_fsdp1(tmp_path):
    for rank, tensors in enumerate(run(save_and_load_torch_sharded, 2, str(tmp_path))):
        expected = numbered(5, 4)[:3] if rank == 0 else numbered(5, 4)[3:]
        assert all(torch.equal(tensor, expected) for tensor in tensors)
    assert torch.equal(distckpt.open(tmp_path / "ours").read_tensors()["rows"], numbered(5, 4))


# ---- asynchronous saves


def save_and_change_at_once(rank, path):
    mesh = init_device_mesh("cpu", (2,))
    divided, whole, values = (
        distribute_tensor(numbered(6, 3), mesh, [Shard(0)]),
        numbered(4),
        [1, 2, 3],
    )
    future = library(OURS).async_save(
        {"w": {"divided": divided, "whole": whole}, "values": values}, checkpoint_id=path
    )
    divided.zero_()
    whole.zero_()
    values.clear()
    return future.result(timeout=60).location, future.done(), future.exception()


def test_what_changes_after_an_async_save_has_returned_is_saved_as_it_was(tmp_path):
    path = str(tmp_path / "saved")
    assert run(save_and_change_at_once, 2, path) == [(path, True, None)] * 2
    tensors = distckpt.open(path).read_tensors()
    assert torch.equal(tensors["w.divided"], numbered(6, 3))
    assert torch.equal(tensors["w.whole"], numbered(4))
    assert distckpt.open(path).common_state == {"values": [1, 2, 3]}


def fail_in_the_background(rank, path):
    dcp = library(OURS)
    future = dcp.async_save({"w": numbered(4)}, checkpoint_id=f"{path}/file/saved")
    errors = [future.exception(timeout=60), error_of(future.result)]
    # The error was asked for, so the next save does not raise it.
    dcp.save({"w": numbered(4)}, checkpoint_id=f"{path}/saved")
    return [type(error).__name__ for error in errors]


def test_the_future_of_a_failing_save_has_its_error(tmp_path):
    (tmp_path / "file").write_text("no directory")
    assert run(fail_in_the_background, 2, str(tmp_path)) == [["RankFailedError"] * 2] * 2
    assert distckpt.megatron.check_is_distributed_checkpoint(str(tmp_path / "saved"))


# ---- errors


class Unknown:
    pass


def errors_of_saving(rank, path):
    dcp, mesh = library(OURS), init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(numbered(2), mesh, [Partial()], run_check=False)
    states = [
        {"model": {"sum": partial}},
        {"settings": {"unknown": Unknown()}},
        {"a": {"b": 1}, "a.b": 2},
    ]
    found = [error_of(dcp.save, state, checkpoint_id=path) for state in states]
    return [(type(error), str(error)) for error in found], sum_over_ranks(1)


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path):
    for errors, total in run(errors_of_saving, 2, str(tmp_path / "never")):
        assert [kind for kind, _ in errors] == [
            InvalidShardingError,
            UnsupportedObjectError,
            InvalidShardingError,
        ]
        messages = [message for _, message in errors]
        assert "model.sum" in messages[0]
        assert "redistribute" in messages[0]
        assert "register_object_type" in messages[1]
        assert "'a.b'" in messages[2]
        assert total == 2
    assert os.listdir(tmp_path) == []


def errors_of_loading(rank, path):
    """Only rank 1 asks for what is not there; both must hear of it, and keep what they have."""
    dcp = library(OURS)
    target = torch.zeros(3)
    state = {
        "model": {"weight": target},
        "step": 0,
        **({"model.weihgt": torch.zeros(3)} if rank else {}),
    }
    errors = [error_of(dcp.load, state, checkpoint_id=path)]
    errors.append(error_of(dcp.load, {"step": torch.zeros(())}, checkpoint_id=path))
    errors.append(error_of(dcp.load, {"model": {"weight": None}}, checkpoint_id=path))
    errors.append(error_of(dcp.load, {"model": {"weight": torch.zeros(4)}}, checkpoint_id=path))
    return [(type(e), str(e)) for e in errors], target.tolist(), state["step"], sum_over_ranks(1)


def test_what_is_not_stored_as_asked_for_is_refused_on_every_rank(tmp_path):
    library(OURS).save(
        {"model": {"weight": numbered(3)}, "step": 7}, checkpoint_id=tmp_path / "saved"
    )
    for errors, target, step, total in run(errors_of_loading, 2, str(tmp_path / "saved")):
        assert [kind for kind, _ in errors] == [LoadMismatchError] * 4
        absent, as_tensor, as_object, shape = (message for _, message in errors)
        assert "'model.weihgt' (did you mean 'model.weight'?)" in absent
        assert "allow_partial_load=True" in absent
        assert "'step' is of type int" in as_tensor
        assert "'model.weight' is a tensor" in as_object
        assert "global shape (3,)" in shape
        assert (target, step, total) == ([0.0] * 3, 0, 2)


# ---- the example


@fsdp2_trains
def test_the_example_resumes_from_what_either_library_saved(tmp_path):
    work_dir = tmp_path / "work"
    output = run_preloaded("from_dcp.py", work_dir)
    for name in ("by_torch", "by_distckpt"):
        assert f"Resumed on 2 from what was saved {name}: " in output, output
    assert "Both ended with 28 tensors, all equal." in output, output
    losses = {
        name: json.loads((work_dir / f"losses_{name}.json").read_text())
        for name in ("None", "by_distckpt")
    }
    assert losses["None"][-1] < losses["None"][0], (
        "the model did not learn, so equal losses would say little"
    )
    assert losses["by_distckpt"] == pytest.approx(losses["None"][4:], rel=1e-4)
