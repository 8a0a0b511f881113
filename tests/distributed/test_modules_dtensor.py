"""Modules whose parameters are DTensors: saved under one mesh, loaded under every other one.

The oracle is the plain module: its tensors before they were divided, and `DTensor.full_tensor()`
after loading.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import distckpt
from distckpt.modules import load_sharded_state_dict, sharded_state_dict
from tests.support import parallel_modules
from tests.support.harness import error_of, run
from tests.support.parallel_modules import fsdp, hsdp, plain, tp
from tests.support.reference import fsdp2_trains

try:
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
except ImportError:
    ShardOrderEntry = None


class Scaled(torch.nn.Module):
    """A parameter smaller than the number of ranks, buffers of both kinds, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("running", torch.randn(5, 2))
        self.register_buffer("seen", torch.randint(1000, ()))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.calls = int(torch.randint(1000, ()))

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


class Net(torch.nn.Module):
    """Sizes that 2, 3 and 4 do not divide, and tied weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(5, 6)
        self.up = torch.nn.Linear(6, 9)
        self.down = torch.nn.Linear(9, 6)
        self.scaled = Scaled()
        self.head = torch.nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight


def fsdp_columns(net: Net) -> None:
    # Along another axis than the first FSDP2 wants parts of one size.
    even = {net.embedding.weight} if dist.get_world_size() in (2, 3) else set()
    fully_shard(net, shard_placement_fn=lambda p: Shard(1) if p in even else Shard(0))


def tp_beside_copies(net: Net) -> None:
    """Tensor parallel on a part of the mesh, as it is under DistributedDataParallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_over_tp(net: Net) -> None:
    parallel_modules.fsdp_over_tp(net)
    assert any(isinstance(p, _StridedShard) for p in net.up.weight.placements)


def strided(net: Net) -> None:
    """A placement that gives a rank several places of a tensor: every other piece of rows, and of
    columns.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    divided = {
        "up": [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)],
        "down": [_StridedShard(1, split_factor=2), Replicate()],
        "embedding": [Shard(0), _StridedShard(0, split_factor=2)],
    }
    for name, placements in divided.items():
        module = getattr(net, name)
        module.weight = torch.nn.Parameter(_divided(module.weight.detach(), mesh, placements))
    net.head.weight = net.embedding.weight


def _divided(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    # Without src_data_rank each rank takes its part itself; sending strided parts needs them to be
    # of one size.
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


FOUR_RANKS = [plain, fsdp, hsdp, tp, tp_beside_copies, fsdp_over_tp, strided]
FEWER_RANKS = [plain, fsdp, fsdp_columns, tp]


def full_state(net: Net) -> dict[str, torch.Tensor]:
    whole = {k: v for k, v in net.state_dict().items() if isinstance(v, torch.Tensor)}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in whole.items()}


def check_loaded(net: Net, reference: Net) -> None:
    expected, found = full_state(reference), full_state(net)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert net.scaled.calls == reference.scaled.calls


def load_into(layout: Callable[[Net], None], path: str) -> Net:
    net = Net(seed=2)
    layout(net)
    state = distckpt.load({"model": sharded_state_dict(net)}, path, strict="raise")
    assert load_sharded_state_dict(net, state["model"]) == (set(), set())
    assert net.head.weight is net.embedding.weight
    return net


def save_under_all(rank: int, folder: str) -> None:
    for layout in FOUR_RANKS:
        net = Net(seed=1)
        layout(net)
        distckpt.save(
            {"model": sharded_state_dict(net)},
            f"{folder}/{layout.__name__}",
            validate_replicas=True,
        )


def load_under(
    rank: int, folder: str, layouts: list[Callable[[Net], None]], first: int, step: int
) -> None:
    """Load what each mesh saved under layouts: of all pairs every `step`-th from number `first`."""
    pairs = list(itertools.product(layouts, FOUR_RANKS))
    for layout, source in pairs[first::step]:
        check_loaded(load_into(layout, f"{folder}/{source.__name__}"), Net(seed=1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(save_under_all, 4, str(folder))
    return folder


@fsdp2_trains
@pytest.mark.parametrize(
    ("num_ranks", "layouts", "first", "step"),
    [
        (4, FOUR_RANKS, 0, 2),
        pytest.param(4, FOUR_RANKS, 1, 2, marks=pytest.mark.slow),
        pytest.param(3, FEWER_RANKS, 0, 1, marks=pytest.mark.slow),
        (2, FEWER_RANKS, 0, 1),
    ],
)
def test_what_one_mesh_saved_every_other_one_loads(saved, num_ranks, layouts, first, step):
    run(load_under, num_ranks, str(saved), layouts, first, step)


@fsdp2_trains
def test_a_process_without_a_group_loads_all(saved):
    for source in FOUR_RANKS:
        check_loaded(load_into(plain, str(saved / source.__name__)), Net(seed=1))


@fsdp2_trains
@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_each_byte_is_saved_once_and_tied_weights_are_one_tensor(saved, layout):
    num_bytes: dict[str, int] = {}
    for file in (saved / layout.__name__ / "tensors").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(key)
                num_bytes[key] = num_bytes.get(key, 0) + tensor.numel() * tensor.element_size()
    expected = {
        k: v.numel() * v.element_size()
        for k, v in full_state(Net(seed=1)).items()
        if k != "head.weight"
    }
    assert num_bytes == expected


@fsdp2_trains
@pytest.mark.parametrize("layout", [fsdp, fsdp_over_tp, strided])
def test_export_gives_the_plain_module(saved, layout, tmp_path):
    report = distckpt.consolidate(saved / layout.__name__, tmp_path / "export")
    expected = {k: v for k, v in full_state(Net(seed=1)).items() if k != "head.weight"}
    with safe_open(tmp_path / "export" / report.files[0], "pt") as opened:
        assert set(opened.keys()) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(opened.get_tensor(name), tensor), name


def describe_in_use(rank: int) -> list[bool]:
    """After a forward pass FSDP leaves the parameters of the outermost module whole, until the
    backward pass.
    """
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2), torch.nn.ReLU()
    )
    fully_shard(net[0])
    fully_shard(net, reshard_after_forward=False)
    before = sharded_state_dict(net)
    net(torch.ones(1, 4))
    assert not isinstance(net[2].weight, DTensor)
    after = sharded_state_dict(net)
    assert isinstance(net[2].weight, DTensor)
    return [after[name] == shard for name, shard in before.items()]


@fsdp2_trains
def test_a_module_in_use_is_described_like_any_other():
    assert run(describe_in_use, 2) == [[True] * 4] * 2


def describe_uneven(rank: int) -> dict[str, tuple]:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    full = torch.arange(7 * 3.0).reshape(7, 3)
    layer = torch.nn.Linear(3, 7, bias=False)
    layer.weight = torch.nn.Parameter(full)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    shard = sharded_state_dict(layer)["weight"]
    held = full.numpy()[shard.global_slice()]
    return shard.global_offset, shard.local_shape, bool((shard.data.detach().numpy() == held).all())


@fsdp2_trains
def test_uneven_parts_of_fsdp_over_tensor_parallel_lie_where_fsdp_put_them():
    """The placements alone would have the rows of the last two ranks the other way round."""
    described = run(describe_uneven, 6)
    # Tensor parallel ranks hold rows 0 to 3 and 4 to 6, of which each data parallel rank has a
    # third.
    assert [(offset[0], shape[0]) for offset, shape, _ in described if shape[0]] == [
        (0, 2), (4, 1), (2, 2), (5, 1), (6, 1),
    ]  # fmt: skip
    assert described[4][1] == (0, 3)
    assert all(is_equal for *_, is_equal in described)


def _noted(rank: int, folder: str) -> bool:
    """Parts as Megatron-FSDP makes them: the last axis of its mesh divides first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._shard_order = [1, 0]
    full = np.random.default_rng(0).standard_normal((8, 3), np.float32)
    # By rank: the order alone tells the place of even parts, uneven ones are noted.
    bounds = {"even": [(0, 2), (4, 6), (2, 4), (6, 8)], "uneven": [(0, 5), (6, 8), (5, 6), (8, 8)]}
    model = torch.nn.ParameterDict()
    for name, ranks in bounds.items():
        start, stop = ranks[rank]
        local = torch.from_numpy(full[start:stop].copy())
        model[name] = torch.nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)] * 2, shape=(8, 3), stride=(3, 1))
        )
        if name == "uneven":
            chunk = ChunkStorageMetadata(torch.Size((start, 0)), local.shape)
            model[name]._local_tensor.__create_chunk_list__ = lambda chunk=chunk: [chunk]
    optimizer = torch.optim.AdamW(model.values())
    for param in model.values():
        optimizer.state[param] = {"exp_avg": param.detach() * 2, "step": torch.tensor(3.0)}
    distckpt.save({"model": model, "optimizer": optimizer}, folder)
    stored = distckpt.open(folder).read_tensors()
    for name in bounds:
        np.testing.assert_array_equal(stored[name].numpy(), full)
        np.testing.assert_array_equal(stored[f"optimizer.state.exp_avg.{name}"].numpy(), full * 2)
    for param in model.values():
        param._local_tensor.detach().zero_()
        optimizer.state[param]["exp_avg"].zero_()
    distckpt.load({"model": model, "optimizer": optimizer}, folder)
    for name, ranks in bounds.items():
        own = full[slice(*ranks[rank])]
        state = optimizer.state[model[name]]["exp_avg"]
        np.testing.assert_array_equal(model[name]._local_tensor.detach().numpy(), own)
        np.testing.assert_array_equal(state._local_tensor.numpy(), own * 2)
    return True


def test_parts_of_megatron_fsdp_lie_where_it_put_them(tmp_path):
    assert all(run(_noted, 4, str(tmp_path / "step")))


def _ordered(rank: int, folder: str) -> bool:
    """A tensor divided by the last axis of its mesh first, as its specification says."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(24.0).view(8, 3)
    first, second = mesh.get_coordinate()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    same = DTensor.from_local(torch.zeros(2, 3), mesh, placements, shape=(8, 3), stride=(3, 1))
    dtensor = DTensor.from_local(
        full.chunk(2)[second].chunk(2)[first].clone(), mesh, [Shard(0)] * 2, run_check=False
    )
    dtensor._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    assert torch.equal(dtensor.full_tensor(), full)
    distckpt.save({"value": dtensor}, folder)
    assert torch.equal(distckpt.open(folder).read("value"), full)
    local = dtensor.to_local().clone()
    dtensor.to_local().zero_()
    distckpt.load(
        {
            "value": dtensor,
        },
        folder,
    )
    distckpt.load({"value": same}, folder)
    return torch.equal(dtensor.to_local(), local) and torch.equal(same.to_local(), local)


@pytest.mark.skipif(ShardOrderEntry is None, reason="this torch knows one order only")
def test_parts_lie_in_the_order_that_their_specification_notes(tmp_path):
    assert all(run(_ordered, 4, str(tmp_path / "step")))


def refuse(rank: int) -> list[BaseException | None]:
    mesh = init_device_mesh("cpu", (2,))
    partial = torch.nn.Module()
    partial.total = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    wrong = torch.nn.Module()
    wrong.weight = torch.nn.Parameter(
        DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size((8,)), stride=(1,))
    )
    return [error_of(sharded_state_dict, module) for module in (partial, wrong)]


def test_dtensors_that_are_no_parts_are_refused():
    for partial, wrong in run(refuse, 2):
        assert isinstance(partial, distckpt.InvalidShardingError)
        assert "'total'" in str(partial)
        assert "redistribute" in str(partial)
        assert isinstance(wrong, distckpt.InvalidShardingError)
        assert "'weight'" in str(wrong)
        assert "(8,)" in str(wrong)


def on_one_rank_only(rank: int, folder: str) -> list[str]:
    """A pipeline: each rank has a layer of its own, on a mesh of its own."""
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])]
    stage, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    weights = [torch.full((3, 2), float(i)) for i in range(2)]
    stage.weight = torch.nn.Parameter(distribute_tensor(weights[rank], meshes[rank], [Shard(0)]))
    other.weight = torch.nn.Parameter(
        DTensor.from_local(torch.empty(0), meshes[1 - rank], [Shard(0)], run_check=False)
    )
    names = [f"stage{rank}.", f"stage{1 - rank}."]
    state = {**sharded_state_dict(stage, names[0], replica_id=0)}
    left_out = sharded_state_dict(other, names[1], replica_id=0)
    distckpt.save(state, folder)
    stage.weight.to_local().detach().zero_()
    load_sharded_state_dict(stage, distckpt.load(state, folder), names[0])
    assert torch.equal(stage.weight.full_tensor(), weights[rank])
    return sorted(left_out)


def test_pipeline_stages_say_which_copy_they_have(tmp_path):
    assert run(on_one_rank_only, 2, str(tmp_path / "saved")) == [["stage1.bias"], ["stage0.bias"]]
    assert {k: v.shape for k, v in distckpt.open(tmp_path / "saved").tensors.items()} == {
        f"stage{i}.{name}": shape
        for i in range(2)
        for name, shape in (("weight", (3, 2)), ("bias", (3,)))
    }


def _in_another_order(rank: int, path: str) -> None:
    """torch counts ranks from the lowest of a process group on, wherever they are in a mesh."""
    mesh = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    table, net = torch.randn(8, 12), torch.nn.Sequential(torch.nn.Linear(8, 4))
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    parallelize_module(net, mesh["tp"], {"0": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    placements = [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)]]
    state = {
        f"table.{number}": distribute_tensor(table, mesh, placement)
        for number, placement in enumerate(placements)
    }
    for value in state.values():
        assert torch.equal(value.full_tensor(), table)

    distckpt.save({"model": net, **state}, path)

    content = distckpt.open(path)
    for name, value in expected.items():
        assert torch.equal(content.read(name), value), name
    for name in state:
        assert torch.equal(content.read(name), table), name


def test_ranks_may_be_in_any_order_in_a_mesh(tmp_path):
    run(_in_another_order, 4, str(tmp_path / "step"))


def _emptied(rank: int, path: str) -> None:
    """The last of four ranks has no rows of five, and FSDP2 leaves it no columns either."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(10, 5)) for _ in range(2)]
    expected = nets[0].state_dict()["0.weight"].clone()
    for net in nets:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(
            net, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None
        )
    distckpt.save({"model": nets[0]}, path)
    assert torch.equal(distckpt.open(path).read("0.weight"), expected)
    distckpt.load({"model": nets[1]}, path)
    local = [net[0].weight.to_local() for net in nets]
    assert torch.equal(*local)


@fsdp2_trains
def test_a_part_may_be_empty_along_all_axes(tmp_path):
    run(_emptied, 4, str(tmp_path / "step"))
