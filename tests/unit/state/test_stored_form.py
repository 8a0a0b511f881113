"""Tensors that are stored in another form, and those that cannot be stored, through `save` and
`load`.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

import distckpt
from distckpt import LoadMismatchError, ShardedTensor, UnsupportedObjectError


def shard(tensor, *offsets, **kwargs):
    return ShardedTensor.from_rank_offsets("w", tensor, *offsets, **kwargs)


def save_and_load(saved, wanted, path):
    distckpt.save(saved, path)
    return distckpt.load(wanted, path)


# ---- Complex numbers


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128], ids=str)
def test_complex_numbers_are_stored_as_pairs_and_reshard(tmp_path, dtype):
    real = torch.randn(4, 6, 2).to(torch.float16 if dtype == torch.complex32 else torch.float64)
    whole = torch.view_as_complex(real)
    saved = {str(i): shard(part, (1, i, 2)) for i, part in enumerate(whole.chunk(2, dim=1))}
    columns = torch.zeros(6, 4, dtype=dtype).t()  # of another memory order
    flat = torch.zeros(7, dtype=dtype)
    wanted = {
        "columns": shard(columns),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "w", flat, (4, 6), flattened_range=slice(5, 12), replica_id=1
        ),
        "new": shard(whole[:2], (0, 1, 2), replica_id=1).without_data(),
    }
    loaded = save_and_load(saved, wanted, tmp_path / "c")
    assert loaded["columns"] is columns
    assert torch.equal(torch.view_as_real(columns.contiguous()), real)
    assert torch.equal(torch.view_as_real(flat), real.view(24, 2)[5:12])
    assert (loaded["new"].dtype, torch.view_as_real(loaded["new"]).tolist()) == (
        dtype,
        real[2:].tolist(),
    )
    assert torch.equal(distckpt.open(tmp_path / "c").read_tensors()["w"], real)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 3)], ids=str)
@pytest.mark.parametrize("stored", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("wanted", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_converted_as_real_ones_are(tmp_path, stored, wanted, shape):
    values = torch.randn(shape, dtype=torch.complex64).to(stored)
    target = torch.full(shape, 7j, dtype=wanted)
    distckpt.save({"w": shard(values)}, tmp_path / "c")
    if wanted.itemsize < stored.itemsize:
        with pytest.raises(LoadMismatchError, match="allow_dtype_cast=True"):
            distckpt.load({"w": shard(target)}, tmp_path / "c")
    loaded = distckpt.load({"w": shard(target)}, tmp_path / "c", allow_dtype_cast=True)
    assert loaded["w"] is target
    assert torch.equal(target, values.to(wanted))
    if wanted.itemsize >= stored.itemsize:
        new = ShardedTensor.from_rank_offsets("w", torch.zeros(shape, dtype=wanted)).without_data()
        assert torch.equal(distckpt.load({"w": new}, tmp_path / "c")["w"], target)


def test_a_part_of_single_precision_is_loaded_into_double(tmp_path):
    whole = torch.randn(6, 4, dtype=torch.complex64)
    flat, rows = (torch.zeros(shape, dtype=torch.complex128) for shape in (7, (3, 4)))
    of_flat = ShardedTensor.from_rank_offsets_flat("w", flat, (6, 4), flattened_range=slice(2, 9))
    save_and_load({"w": shard(whole)}, {"rows": shard(rows, (0, 1, 2))}, tmp_path / "c")
    distckpt.load({"flat": of_flat}, tmp_path / "c")
    assert torch.equal(rows, whole[3:].to(torch.complex128))
    assert torch.equal(flat, whole.flatten()[2:9].to(torch.complex128))


def test_a_conjugate_view_is_saved_and_filled(tmp_path):
    values, target = (
        torch.randn(3, dtype=torch.complex128),
        torch.zeros(3, dtype=torch.complex128).conj(),
    )
    save_and_load({"w": shard(values.conj())}, {"w": shard(target)}, tmp_path / "c")
    assert torch.equal(target, values.conj().resolve_conj())


# ---- Tensors made of others


class Quantized(torch.Tensor):
    """int8 codes and a scale per row."""

    @staticmethod
    def __new__(cls, codes, scale, note):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale, note):
        self.codes, self.scale, self.note = codes, scale, note

    def __tensor_flatten__(self):
        return ["codes", "scale"], (self.note, self.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.slice.Tensor, torch.ops.aten.detach.default):
            raise NotImplementedError(func)
        inner = [func(part, *args[1:], **(kwargs or {})) for part in (args[0].codes, args[0].scale)]
        return return_and_correct_aliasing(func, args, kwargs or {}, cls(*inner, args[0].note))


class Turned(Quantized):
    """The same with codes that are stored the other way round."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        rows = super().__torch_dispatch__(func, types, args, kwargs)
        rows.codes = args[0].codes[:, : rows.shape[0]]
        return rows


def quantized(rows, columns=4, cls=Quantized, note="symmetric", fill=None):
    codes = (
        torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        if fill is None
        else torch.full((rows, columns), fill, dtype=torch.int8)
    )
    return cls(codes, torch.rand(rows, 1), note)


def test_inner_tensors_are_stored_and_filled_under_another_layout(tmp_path):
    halves = [quantized(4), quantized(4)]
    whole = quantized(8, fill=0)
    saved = {
        str(i): shard(torch.nn.Parameter(half, requires_grad=False), (0, i, 2))
        for i, half in enumerate(halves)
    }
    loaded = save_and_load(saved, {"w": shard(whole)}, tmp_path / "c")
    assert loaded["w"] is whole
    assert torch.equal(whole.codes, torch.cat([half.codes for half in halves]))
    assert torch.equal(whole.scale, torch.cat([half.scale for half in halves]))
    assert set(distckpt.open(tmp_path / "c").read_tensors()) == {"w.codes", "w.scale"}


def test_what_belongs_to_it_must_be_the_same(tmp_path):
    distckpt.save({"w": shard(quantized(4))}, tmp_path / "c")
    for other in (quantized(4, note="asymmetric"), quantized(4, cls=Turned)):
        with pytest.raises(
            LoadMismatchError, match=r"'w' was saved as .*Quantized \('symmetric', shape\)"
        ):
            distckpt.load({"w": shard(other)}, tmp_path / "c")
    with pytest.raises(LoadMismatchError, match=r"'w'"):
        distckpt.load({"w": shard(torch.zeros(4, 4))}, tmp_path / "c")


def test_inner_tensors_whose_division_is_unknown_are_refused_by_key(tmp_path):
    turned, packed = (
        quantized(4, cls=Turned),
        Quantized(torch.zeros(4, 4, dtype=torch.int8), torch.ones(1), ""),
    )
    for tensor, name in ((turned, "codes"), (packed, "scale")):
        with pytest.raises(
            distckpt.InvalidShardingError, match=f"'w' is a .* inner tensor '{name}'.*dequantize"
        ):
            distckpt.save({"w": shard(tensor, (0, 0, 2))}, tmp_path / "c")
    # Whole, they are stored as they are.
    distckpt.save(
        {"turned": shard(turned), "packed": ShardedTensor.from_rank_offsets("p", packed)},
        tmp_path / "c",
    )


class Compressing(torch.optim.SGD):
    """Keeps a state of two tensors that count as one."""

    def step(self):
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("seen", quantized(*param.shape, fill=0)).codes.add_(1)


def test_the_state_of_an_optimizer_is_loaded_into_what_it_has(tmp_path):
    def make(num_steps):
        model = torch.nn.Linear(4, 8, bias=False)
        optimizer = Compressing(model.parameters())
        for _ in range(num_steps):
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, used = make(3), make(1)
    distckpt.save(saved, tmp_path / "c")
    distckpt.load(used, tmp_path / "c")
    expected, loaded = (
        state["optimizer"].state[state["model"].weight]["seen"] for state in (saved, used)
    )
    assert torch.equal(loaded.codes, expected.codes)
    assert torch.equal(loaded.scale, expected.scale)
    with pytest.raises(LoadMismatchError, match=r"'optimizer\.state\.seen\.weight' .* make a step"):
        distckpt.load(make(0), tmp_path / "c")


# ---- Elements that share memory


def test_expanded_tensors_are_filled_where_that_gives_the_stored_values(tmp_path):
    row = torch.tensor([1.0, float("nan"), -0.0])
    stored = {
        "same": row.expand(4, 3),
        "differing": torch.arange(12.0).view(4, 3),
        "scalar": torch.tensor(2.0).expand(5),
    }
    distckpt.save(
        {name: ShardedTensor.from_rank_offsets(name, value) for name, value in stored.items()},
        tmp_path / "c",
    )

    def load(name, target):
        distckpt.load({"w": ShardedTensor.from_rank_offsets(name, target)}, tmp_path / "c")
        return target

    assert torch.equal(
        load("same", torch.zeros(3).expand(4, 3))[2].view(torch.int32), row.view(torch.int32)
    )
    assert load("scalar", torch.zeros(1).expand(5)).tolist() == [2.0] * 5
    assert load("differing", torch.zeros(12).as_strided((4, 3), (1, 4)))[3, 1] == 10
    for overlapping in (torch.zeros(3).expand(4, 3), torch.zeros(6).as_strided((4, 3), (1, 1))):
        with pytest.raises(LoadMismatchError, match=r"'differing': several elements .* clone\(\)"):
            load("differing", overlapping)


# ---- What has no elements to store


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda: torch.ones(3).to_sparse(), "to_dense"),
        (lambda: torch.ones(3).to_mkldnn(), "to_dense"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "offsets",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "offsets"),
        (lambda: torch.nn.LazyLinear(3).weight, "call it once"),
        (lambda: torch.empty(3, device="meta"), "to_empty"),
        (freed, "fully_shard"),
    ],
    ids=["sparse", "mkldnn", "jagged", "nested", "lazy", "meta", "freed"],
)
def test_what_cannot_be_stored_is_refused_by_key_with_the_way_out(tmp_path, make, way_out):
    distckpt.save({"w": shard(torch.ones(3))}, tmp_path / "stored")
    for call in (
        lambda: distckpt.save({"w": shard(make())}, tmp_path / "c"),
        lambda: distckpt.async_save({"w": shard(make())}, tmp_path / "c").result(),
        lambda: distckpt.load({"w": shard(make())}, tmp_path / "stored"),
    ):
        with pytest.raises(
            (UnsupportedObjectError, distckpt.InvalidShardingError), match=f"'w'.*{way_out}"
        ):
            call()
    assert not (tmp_path / "c").exists()
