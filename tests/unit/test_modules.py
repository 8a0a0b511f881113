from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import distckpt
from distckpt import (
    InvalidShardingError,
    LoadMismatchError,
    ShardedObject,
    ShardedTensor,
    modules,
)
from distckpt._models import dtensor
from distckpt.modules import load_sharded_state_dict, sharded_state_dict
from tests.support.reference import megatron_or_skip


class Counter(torch.nn.Module):
    """Buffers of both kinds, and extra state."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("kept", torch.full((2,), float(value)))
        self.register_buffer("scratch", torch.full((2,), float(value)), persistent=False)
        self.calls = value

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Column(torch.nn.Module):
    """A layer that has its part of a larger one, and says so."""

    def __init__(self, tp=(1, 3)):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 4))
        self.inner = torch.nn.Linear(4, 4)
        self.tp = tp
        self.asked = []

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        self.asked.append((prefix, sharded_offsets, metadata))
        return modules.make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp
        )


def linear_pair():
    """Two layers with tied weights."""
    net = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3, bias=False), "c": Counter(4)}
    )
    net["b"].weight = net["a"].weight
    return net


def whole_shard(key, tensor, **attributes):
    return ShardedTensor.from_rank_offsets(key, tensor, **{"replica_id": (0, 0), **attributes})


def test_all_that_a_module_keeps_is_described():
    net = linear_pair()
    state = sharded_state_dict(net, "net.")
    assert state == {
        "net.a.weight": whole_shard("net.a.weight", net["a"].weight),
        "net.a.bias": whole_shard("net.a.bias", net["a"].bias),
        "net.b.weight": whole_shard("net.b.weight", net["a"].weight),
        "net.c.kept": whole_shard("net.c.kept", net["c"].kept),
        "net.c._extra_state": ShardedObject(
            "net.c._extra_state", state["net.c._extra_state"].data, (1,), (0,), (0, 0)
        ),
    }
    assert state["net.c._extra_state"].data == {"calls": 4}


def test_prepended_axes_and_replica_ids_are_those_of_all_entries():
    net = linear_pair()
    state = sharded_state_dict(net, sharded_offsets=((1, 0, 2), (0, 5, 8)), replica_id=(0, 3))
    assert state["a.bias"] == ShardedTensor.from_rank_offsets(
        "a.bias", net["a"].bias, (0, 5, 8), (1, 0, 2), prepend_axis_num=2, replica_id=(0, 3)
    )
    extra = state["c._extra_state"]
    assert (extra.global_shape, extra.global_offset, extra.replica_id) == ((8, 2), (5, 0), (0, 3))
    with pytest.raises(InvalidShardingError, match=r"sharded_offsets .* for the axes 0 to 0"):
        sharded_state_dict(net, sharded_offsets=((1, 0, 2),))


def test_saving_and_loading_a_module(tmp_path):
    net = linear_pair()
    distckpt.save({"model": sharded_state_dict(net)}, tmp_path / "saved")
    expected = {
        name: tensor.clone()
        for name, tensor in net.state_dict().items()
        if name != "c._extra_state"
    }

    other = linear_pair()
    other["c"] = Counter(9)
    loaded = distckpt.load({"model": sharded_state_dict(other)}, tmp_path / "saved", strict="raise")
    assert load_sharded_state_dict(other, loaded["model"]) == (set(), set())
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in expected.items())
    assert other["b"].weight is other["a"].weight
    assert other["c"].calls == 4
    assert other["c"].scratch.tolist() == [9, 9]


def test_tied_weights_may_be_untied_and_tied_again(tmp_path):
    tied, untied = linear_pair(), linear_pair()
    untied["b"].weight = torch.nn.Parameter(torch.randn(3, 3))
    distckpt.save(sharded_state_dict(tied), tmp_path / "tied")
    load_sharded_state_dict(untied, distckpt.load(sharded_state_dict(untied), tmp_path / "tied"))
    assert torch.equal(untied["b"].weight, tied["a"].weight)
    assert torch.equal(untied["a"].weight, tied["a"].weight)

    # A state dict in which only one of the names was loaded is whole.
    values = {name: torch.ones_like(tensor) for name, tensor in tied.named_parameters()}
    values |= {"c.kept": torch.zeros(2), "c._extra_state": {"calls": 1}}
    assert "b.weight" not in values
    assert load_sharded_state_dict(tied, values) == (set(), set())
    assert torch.equal(tied["b"].weight, torch.ones(3, 3))


def test_modules_that_describe_themselves_are_asked():
    column = Column()
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 2), torch.nn.ModuleDict({"one": column, "two": column})
    )
    offsets, metadata = ((0, 1, 2),), {"key": "value"}
    state = sharded_state_dict(net, "m.", offsets, metadata)
    assert column.asked == [("m.1.one.", offsets, metadata), ("m.1.two.", offsets, metadata)]
    # What is below a module that was asked is its own business.
    assert sorted(state) == ["m.0.bias", "m.0.weight", "m.1.one.weight", "m.1.two.weight"]
    assert state["m.1.one.weight"].global_shape == (2, 6, 4)


def test_a_module_may_use_the_function_for_itself():
    class Own(Column):
        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = sharded_state_dict(self, prefix, sharded_offsets, metadata)
            return {**state, f"{prefix}more": whole_shard(f"{prefix}more", torch.ones(1))}

    net = Own()
    names = ["p.inner.bias", "p.inner.weight", "p.more", "p.weight"]
    assert sorted(net.sharded_state_dict("p.")) == names
    assert sorted(modules.sharded_state_dict_default(net, "p.")) == names
    assert sorted(sharded_state_dict(net, "p.")) == [name for name in names if name != "p.more"]


def test_default_asks_a_module_or_takes_its_state_as_copied():
    column, counter = Column(), Counter(1)
    net = torch.nn.ModuleDict({"column": column, "counter": counter})
    state = modules.sharded_state_dict_default(
        net, "n.", (), {"dp_cp_group": (2, 4)}, tp_group=(1, 3)
    )
    assert {name: shard.replica_id for name, shard in state.items()} == {
        "n.column.weight": (0, 0, 0),
        "n.counter.kept": (0, 1, 2),
        "n.counter._extra_state": (0, 1, 2),
    }
    assert column.asked == [("n.column.", (), {"dp_cp_group": (2, 4)})]


def test_names_do_not_depend_on_compiling_and_activation_checkpointing(tmp_path):
    def make(wrap):
        return torch.nn.Sequential(wrap(torch.nn.Linear(2, 2)), wrap(Column(tp=(0, 1))))

    plain = make(lambda module: module)
    distckpt.save(sharded_state_dict(plain), tmp_path / "saved")
    compiled = partial(torch.compile, backend="eager")
    for wrap in (checkpoint_wrapper, compiled, lambda module: compiled(checkpoint_wrapper(module))):
        net = make(wrap)
        state = sharded_state_dict(net)
        assert list(state) == list(sharded_state_dict(plain))
        assert (
            load_sharded_state_dict(net, distckpt.load(state, tmp_path / "saved"), strict=False)[1]
            == set()
        )
        assert torch.equal(next(net.parameters()), next(plain.parameters()))
    assert list(sharded_state_dict(compiled(plain))) == list(sharded_state_dict(plain))


def test_values_that_were_not_loaded_in_place_are_copied():
    net = torch.nn.Linear(2, 3)
    parameters = dict(net.named_parameters())
    values = {
        "x.weight": torch.ones(3, 2, dtype=torch.float64),
        "x.bias": torch.full((3,), 2.0),
        "y": torch.ones(1),
    }
    assert load_sharded_state_dict(net, values, "x.") == (set(), set())
    assert dict(net.named_parameters()) == parameters
    assert net.weight.tolist() == [[1, 1]] * 3
    assert net.bias.tolist() == [2, 2, 2]


def test_hooks_after_a_load_renew_what_was_made_of_parameters(tmp_path):
    """Megatron-FSDP computes with copies of its parameters, and renews them there."""
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)]
    distckpt.save({"model": models[0]}, tmp_path / "step")
    copies = []
    models[1][0].register_load_state_dict_post_hook(
        lambda module, _: copies.append(module.weight.detach().clone())
    )
    distckpt.load({"model": models[1]}, tmp_path / "step")
    (copy,) = copies
    assert torch.equal(copy, models[0][0].weight)


def test_what_does_not_fit_is_an_error():
    net = torch.nn.Linear(2, 3)
    before = net.weight.detach().clone()
    with pytest.raises(
        LoadMismatchError, match=r"Linear:\n  not loaded: 'bias'\n  not in the module: 'scale'\n"
    ) as caught:
        load_sharded_state_dict(net, {"weight": torch.ones(3, 2), "scale": torch.ones(1)})
    assert (caught.value.missing, caught.value.unexpected) == ({"bias"}, {"scale"})
    assert torch.equal(net.weight, before)
    with pytest.raises(
        LoadMismatchError, match=r"'weight' has shape \(3, 2\) on this rank, but \(2, 3\)"
    ):
        load_sharded_state_dict(net, {"weight": torch.ones(2, 3)}, strict=False)
    assert load_sharded_state_dict(net, {"weight": torch.ones(3, 2), "scale": 1}, strict=False) == (
        {"bias"},
        {"scale"},
    )
    assert net.weight.tolist() == [[1, 1]] * 3
    with pytest.raises(LoadMismatchError, match=r"'weight' is on the meta device.*to_empty"):
        load_sharded_state_dict(
            torch.nn.Linear(2, 3, device="meta"), {"weight": torch.ones(3, 2)}, strict=False
        )


def test_state_that_only_the_module_understands_is_handed_to_it():
    class Packed(torch.nn.Module):
        """Keeps one parameter, and stores it as two tensors that are no parameters."""

        def __init__(self, value):
            super().__init__()
            self.value = torch.nn.Parameter(torch.tensor(value))

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}low"], destination[f"{prefix}high"] = (
                self.value % 10,
                self.value // 10,
            )

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.value.data = state_dict[f"{prefix}low"] + 10 * state_dict[f"{prefix}high"]

    net = torch.nn.Sequential(Packed(0.0))
    load_sharded_state_dict(net, {"0.low": torch.tensor(7.0), "0.high": torch.tensor(4.0)})
    assert net[0].value.item() == 47


def in_order_of_indices(size, placements, mesh_shape, coordinate):
    """Divide indices the way torch divides tensors."""
    indices = torch.arange(size)
    for placement, parts, position in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_replicate():
            indices = placement._split_tensor(indices, parts, with_padding=False)[0][position]
    return indices.tolist()


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="PyTorch's own _StridedShard refuses uneven parts"
)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (3, 2), (2, 2, 2)])
def test_parts_hold_the_indices_that_torch_gives_them(mesh_shape):
    kinds = [
        Shard(0),
        Replicate(),
        _StridedShard(0, split_factor=2),
        _StridedShard(0, split_factor=3),
    ]
    for size, placements in itertools.product(
        range(0, 12, 2 if len(mesh_shape) > 2 else 1),
        itertools.product(kinds, repeat=len(mesh_shape)),
    ):
        splits = tuple(dtensor._splits("key", placements, mesh_shape))
        for coordinate in itertools.product(*map(range, mesh_shape)):
            runs, _ = dtensor._possible_runs((size, 4), splits, coordinate)[-1]
            assert runs[1] == ((0, 4),)
            found = [i for start, stop in runs[0] for i in range(start, stop)]
            assert found == in_order_of_indices(size, placements, mesh_shape, coordinate)


@pytest.fixture(scope="module")
def megatron():
    names = ["make_sharded_tensors_for_checkpoint", "make_sharded_object_for_checkpoint"]
    theirs = {name: getattr(megatron_or_skip("transformer.utils"), name) for name in names}
    names = ["make_tp_sharded_tensor_for_checkpoint", "make_sharded_tensor_for_checkpoint"]
    theirs |= {name: getattr(megatron_or_skip("utils"), name) for name in names}
    return SimpleNamespace(**theirs)


class Group:
    """A process group, as far as the functions look at it."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def facts(value):
    names = (
        "key",
        "replica_id",
        "local_shape",
        "global_shape",
        "global_offset",
        "axis_fragmentations",
        "prepend_axis_num",
        "allow_shape_mismatch",
    )
    return {name: getattr(value, name, None) for name in names} | {"data": id(value.data)}


@pytest.mark.parametrize("offsets", [(), ((0, 3, 8),), ((0, 3, 8), (1, 0, 2))])
def test_helpers_agree_with_megatron(megatron, one_rank, offsets):
    tensor, groups = torch.ones(2, 3), {"tp_group": Group(1, 4), "dp_cp_group": Group(2, 3)}
    calls = [
        ("make_tp_sharded_tensor_for_checkpoint", (tensor, "key"), {"prepend_offsets": offsets}),
        (
            "make_tp_sharded_tensor_for_checkpoint",
            (tensor, "key", 1),
            {"prepend_offsets": offsets, "replica_id": 7},
        ),
        (
            "make_tp_sharded_tensor_for_checkpoint",
            (tensor, "key"),
            {"prepend_offsets": offsets, "allow_shape_mismatch": True},
        ),
        ("make_sharded_tensor_for_checkpoint", (tensor, "key", offsets), {}),
        ("make_sharded_tensor_for_checkpoint", (tensor, "key", offsets), {"replica_id": (1, 2)}),
    ]
    for name, args, options in calls:
        expected = getattr(megatron, name)(*args, **options, **groups)
        assert facts(getattr(modules, name)(*args, **options, **groups)) == facts(expected)

    obj = object()
    expected = megatron.make_sharded_object_for_checkpoint(
        obj, "key", offsets, replica_id=(0, 1, 2)
    )
    assert facts(
        modules.make_sharded_object_for_checkpoint(obj, "key", offsets, (0, 1, 2))
    ) == facts(expected)
    assert facts(
        modules.make_sharded_object_for_checkpoint(obj, "key", offsets, **groups)
    ) == facts(expected)


def test_the_state_dict_of_a_layer_agrees_with_megatron(megatron, one_rank):
    state = {
        "up.weight": torch.ones(2, 3),
        "down.weight": torch.ones(3, 2),
        "norm": torch.ones(3),
        "_extra_state": None,
    }
    args = (state, "layer.", {"up.weight": 0, "down.weight": 1}, ((0, 1, 2),))
    groups = {"tp_group": Group(1, 2), "dp_cp_group": Group(1, 3)}
    ours = modules.make_sharded_tensors_for_checkpoint(*args, **groups)
    expected = megatron.make_sharded_tensors_for_checkpoint(*args, **groups)
    assert {name: facts(value) for name, value in ours.items()} == {
        name: facts(v) for name, v in expected.items()
    }
    pairs = modules.make_sharded_tensors_for_checkpoint(*args, tp_group=(1, 2), dp_cp_group=(1, 3))
    assert pairs == ours


@pytest.mark.skipif(torch.__version__ < "2.7", reason="distribute_tensor has no src_data_rank")
@pytest.mark.parametrize("rank", [0, 1])
def test_helpers_agree_with_megatron_on_fsdp_over_tensor_parallel(megatron, rank):
    """Megatron's tensor parallel layers hold plain parts, which FSDP2 makes DTensors of."""
    # Nothing is exchanged here, so one process can stand for each rank.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        options = {
            "tp_group": Group(1, 3),
            "dp_cp_group": mesh.get_group(),
            "prepend_offsets": ((0, 2, 5),),
        }
        part = distribute_tensor(
            torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)], src_data_rank=None
        )
        for name, args in (
            ("make_tp_sharded_tensor_for_checkpoint", (part, "key", 0)),
            ("make_tp_sharded_tensor_for_checkpoint", (part, "key", 1)),
            ("make_sharded_tensor_for_checkpoint", (part, "key")),
        ):
            expected = getattr(megatron, name)(*args, **options)
            assert facts(getattr(modules, name)(*args, **options)) == facts(expected)
    finally:
        dist.destroy_process_group()


def test_without_groups_all_ranks_have_copies():
    state = modules.make_sharded_tensors_for_checkpoint({"w": torch.ones(2)}, "", {"w": 0})
    assert state["w"] == ShardedTensor.from_rank_offsets(
        "w", state["w"].data, (0, 0, 1), replica_id=(0, 0, 0)
    )
    with pytest.raises(InvalidShardingError, match="axis 3"):
        modules.make_tp_sharded_tensor_for_checkpoint(torch.ones(2), "w", 3)


class Observer(torch.nn.Module):
    """Gets the shape of its range from what it has seen, as observers of torch.ao do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor([0.0]))
        self.register_buffer("count", torch.tensor(0))
        self.loaded = {}

    def see(self, low):
        self.low, self.count = low, self.count + 1

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.loaded = {name: tuple(value.shape) for name, value in state_dict.items()}
        if f"{prefix}low" in state_dict:
            self.low.resize_(state_dict[f"{prefix}low"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Stubborn(Observer):
    """Takes its state in a way of its own that does not change shapes."""

    def _load_from_state_dict(self, *args):
        torch.nn.Module._load_from_state_dict(self, *args)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor([0.0]))
        self.register_buffer("count", torch.tensor(0))


@pytest.mark.parametrize("name", ["model", "ema"])
def test_buffers_that_a_module_resizes_are_loaded_by_it(tmp_path, name):
    saved, loaded = (torch.nn.Sequential(torch.nn.Linear(2, 3), Observer()) for _ in range(2))
    saved[1].see(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    distckpt.save({name: saved}, tmp_path / "saved")
    distckpt.load({name: loaded}, tmp_path / "saved", strict="raise")
    assert torch.equal(loaded[1].low, saved[1].low)
    assert loaded[1].count == 1
    assert torch.equal(loaded[0].weight, saved[0].weight)
    # It gets all of its state at once, and that of no other module.
    assert loaded[1].loaded == {"1.low": (2, 2), "1.count": ()}
    for cls, text in (
        (Plain, "the number of axes differs"),
        (Stubborn, r"size mismatch for 1\.low"),
    ):
        other = torch.nn.Sequential(torch.nn.Linear(2, 3), cls())
        with pytest.raises(LoadMismatchError, match=text) as caught:
            distckpt.load({name: other}, tmp_path / "saved")
        assert any(key.endswith("1.low") for key in caught.value.unexpected)


@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization:DeprecationWarning", "ignore:Please use quant_min"
)
def test_a_model_with_fake_quantization_goes_on(tmp_path):
    quantization = pytest.importorskip("torch.ao.quantization")

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return quantization.prepare_qat(model)

    saved, loaded, by_torch = (make(seed) for seed in range(3))
    x = torch.randn(5, 4)
    saved(x)
    distckpt.save({"model": saved}, tmp_path / "saved")
    by_torch.load_state_dict(saved.state_dict())
    distckpt.load({"model": loaded}, tmp_path / "saved", strict="raise")
    assert torch.equal(loaded(x), by_torch(x))
    for key, value in by_torch.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
