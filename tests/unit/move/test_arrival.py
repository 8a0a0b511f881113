"""`verify(source, live=record_loader(...))`: engines that something else has updated.

The oracle is the loader: a second engine of the same kind, whose loader has taken the stored
tensors, has the bits that the first one should have. Which stored tensor an element of memory comes
from is found by negating one stored tensor after the other.
"""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import distckpt
from tests.support.disk import flip
from tests.support.engine_loaders import MODELS, Llama, stored_values, tensors_of

BF16, F32 = torch.bfloat16, torch.float32
LAYOUTS = [(0, 1), (0, 2), (1, 2)]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(INTEGERS[tensor.itemsize])


def negated(values, key):
    return {**values, key: (-values[key].float()).to(values[key].dtype)}


def with_special_values(values, generator):
    """Put NaNs with payloads, infinities, both zeros and subnormal numbers between values."""
    for tensor in values.values():
        flat = bits(tensor).flatten()
        for _ in range(flat.numel() // 9):
            flat[generator.randrange(len(flat))] = generator.getrandbits(8 * tensor.itemsize - 1)
        if tensor.itemsize == 2:
            flat[0] = generator.choice([-0x8000, 0x7F81, 0x7FC1, -1, 0x7F80, 1])
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    return values


class Engine:
    """An engine that holds the stored tensors of a directory, and its oracle."""

    def __init__(self, name, layout, folder, generator):
        self.model, self.good, self.other = (MODELS[name](*layout) for _ in range(3))
        specs = self.model.specs
        self.stored = with_special_values(stored_values(specs, 1), generator)
        save_file(self.stored, folder / "model.safetensors")
        self.folder = folder
        self.target = distckpt.record_loader(self.model.load_weights, folder)
        self.good.load_weights(iter(self.stored.items()))
        self.other.load_weights(iter(stored_values(specs, 2).items()))
        self.sources = self._find_sources(MODELS[name], layout)
        self.reset()

    def _find_sources(self, model, layout):
        """Find the stored tensor of each element: {(tensor, key): mask}."""
        plain = stored_values(self.model.specs, 3)
        before, after = model(*layout), model(*layout)
        before.load_weights(iter(plain.items()))
        sources = {}
        for key in plain:
            after.load_weights(iter(negated(plain, key).items()))
            for (name, one), (_, two) in zip(tensors_of(before), tensors_of(after), strict=True):
                sources[name, key] = bits(one) != bits(two)
        return sources

    def reset(self):
        for (_, mine), (_, good) in zip(tensors_of(self.model), tensors_of(self.good), strict=True):
            bits(mine).copy_(bits(good))

    def expected(self):
        """Count the elements that differ, by stored tensor."""
        counts = {}
        tensors = zip(tensors_of(self.model), tensors_of(self.good), strict=True)
        for (name, mine), (_, good) in tensors:
            differs = bits(mine) != bits(good)
            for key, stored in self.stored.items():
                found = differs & self.sources[name, key]
                if stored.dtype != mine.dtype and mine.is_floating_point():
                    found &= ~(mine.float().isnan() & good.float().isnan())
                if found.any():
                    counts[key] = counts.get(key, 0) + int(found.sum())
        return counts

    def found(self):
        report = distckpt.verify(self.folder, live=self.target)
        counts = {}
        for problem in report.problems:
            counts[problem.key] = counts.get(problem.key, 0) + problem.num_differing
            assert problem.num_differing
        lines = report.table().splitlines()[1 : len(counts) + 1]
        starts = [(line.split()[0], line.split()[2]) for line in lines]
        assert starts == [(str(n), f"{key}:") for key, n in counts.items()]
        assert report.is_whole == (not counts)
        return counts

    def damage(self, generator):
        """Change memory as updates go wrong."""
        number = generator.randrange(len(list(tensors_of(self.model))))
        name, tensor = list(tensors_of(self.model))[number]
        stale = list(tensors_of(self.other))[number][1]
        flat, old = bits(tensor).view(-1), bits(stale).view(-1)
        first = generator.randrange(len(flat))
        last = generator.randint(first, len(flat))
        kind = generator.choice(["bit", "bit", "bit", "stale", "rows", "zero", "nan", "roll"])
        one = torch.tensor(1).to(flat.dtype)
        sign = one << (8 * flat.itemsize - 1)
        if kind == "bit":
            flat[first] ^= one << generator.randrange(8 * flat.itemsize)
        elif kind == "stale":
            flat[first:last] = old[first:last]
        elif kind == "rows":
            rows = bits(tensor).view(tensor.shape[0], -1)
            order = torch.tensor(generator.sample(range(len(rows)), len(rows)))
            rows.copy_(rows[order])
        elif kind == "zero":
            flat[first] = 0
            flat[first] ^= generator.randrange(2) * sign
        elif kind == "nan":
            exponents = {torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
            flat[first] = exponents.get(tensor.dtype, 0x78) + generator.randint(1, 127)
        else:
            flat.copy_(flat.roll(1))
        return name, kind


@pytest.mark.parametrize(
    "num_faults", [12, pytest.param(310, marks=pytest.mark.slow)], ids=["some", "10,000"]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp1", "rank0", "rank1"])
@pytest.mark.parametrize("name", MODELS)
def test_all_faults_are_found_and_none_is_invented(name, layout, num_faults, tmp_path):
    generator = random.Random(f"{name} {layout} {num_faults}")
    engine = Engine(name, layout, tmp_path, generator)
    assert engine.found() == {}
    for _ in range(num_faults):
        damaged = engine.damage(generator)
        assert engine.found() == engine.expected(), damaged
        engine.reset()
    assert engine.found() == {}


# --- Tensors that cannot be compared --------------------------------------------------------------


def reasons_of(report):
    return {problem.key: problem.message for problem in report.not_compared}


def saved(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return tensors


class Parts(nn.Module):
    """A loader of tables: names in memory, and how stored tensors get there."""

    def __init__(self, shapes, load):
        super().__init__()
        for name, (shape, dtype) in shapes.items():
            value = nn.Parameter(torch.full(shape, 7).to(dtype), requires_grad=False)
            self.register_parameter(name, value)
        self.load = load

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in self.load:
                self.load[name](self, tensor)


def whole_into(name):
    return lambda model, tensor: model.get_parameter(name).data.copy_(tensor)


def test_tensors_that_are_loaded_nowhere_are_named(tmp_path):
    stored = saved(tmp_path, {name: torch.randn(4, 2) for name in ("a", "b", "A_log", "inv_freq")})
    model = Parts({"x": ((4, 2), F32), "cache_scale": ((3,), F32)}, {"a": whole_into("x")})
    given = {name: ((4, 2), F32) for name in ("a", "b", "inv_freq")}
    target = distckpt.record_loader(model.load_weights, given)
    model.load_weights(stored.items())

    report = distckpt.verify(tmp_path, live=target)

    assert report.is_whole
    assert report.num_keys == 1
    reasons = reasons_of(report)
    assert reasons.keys() == {"b", "inv_freq", "A_log", "cache_scale"}
    assert reasons["A_log"] == "no loader was recorded with it"
    assert "no loader leaves it" in reasons["b"]
    assert reasons["cache_scale"].startswith("3 elements of the model's tensor")
    for name in reasons:
        assert any(f"  {name}: not compared: " in line for line in report.table().splitlines())


def test_a_part_that_one_process_holds_is_named(tmp_path):
    model = Llama(1, 2)
    stored = saved(tmp_path, stored_values(model.specs))
    target = distckpt.record_loader(model.load_weights, tmp_path)
    model.load_weights(stored.items())

    reasons = reasons_of(distckpt.verify(tmp_path, live=target))

    assert "hold 128 of 256 elements" in reasons["attn.q_proj.weight"]
    assert "norm.weight" not in reasons


def test_rows_that_are_held_twice_do_not_stand_for_rows_that_are_not_held(tmp_path):
    def load(model, tensor):
        model.x.data[:6].copy_(tensor[:6])
        model.x.data[6:].copy_(tensor[2:8])

    model = Parts({"x": ((12, 2), F32)}, {"a": load})
    stored = saved(tmp_path, {"a": torch.randn(10, 2)})
    target = distckpt.record_loader(model.load_weights, tmp_path)
    model.load_weights(stored.items())

    report = distckpt.verify(tmp_path, live=target)
    assert "hold 16 of 20 elements" in reasons_of(report)["a"]

    model.x.data[7, 1] += 1  # the second copy of row 3
    (problem,) = distckpt.verify(tmp_path, live=target).problems
    assert problem.message.startswith("1 of 12 elements differ from those in memory, the first at")
    assert "[3, 1], in the model's 'x'" in problem.message


def test_tied_names_are_compared_once_and_unequal_ones_are_named(tmp_path):
    model = Parts({"x": ((4, 2), F32)}, {"a": whole_into("x"), "b": whole_into("x")})
    stored = saved(tmp_path, {"a": torch.randn(4, 2), "b": torch.randn(4, 2)})
    target = distckpt.record_loader(model.load_weights, tmp_path)
    model.load_weights(stored.items())

    assert reasons_of(distckpt.verify(tmp_path, live=target)).keys() == {"a"}
    model.x.data.copy_(stored["a"])
    assert {p.key for p in distckpt.verify(tmp_path, live=target).problems} == {"b"}


class Buffered(nn.Module):
    """Its loader copies through memory of its own; the model keeps one of two."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(3, 4)
        self.listed = [torch.zeros(4, 3)]

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "a":
                staged = torch.empty(4, 3)
                staged.copy_(tensor)
                self.kept.copy_(staged.t())
            else:
                self.listed[0].copy_(tensor)


def test_buffers_of_the_loader_are_not_the_model(tmp_path):
    model = Buffered()
    stored = saved(tmp_path, {"a": torch.randn(4, 3), "b": torch.randn(4, 3)})
    target = distckpt.record_loader(model.load_weights, tmp_path)
    model.load_weights(stored.items())

    report = distckpt.verify(tmp_path, live=target)
    assert report.is_whole
    assert "attribute of a model" in reasons_of(report)["b"]

    model.kept[2, 3] = -0.0
    (problem,) = distckpt.verify(tmp_path, live=target).problems
    assert "the first at [3, 2], in the model's 'kept'" in problem.message


def test_a_source_of_another_dtype_is_converted_as_a_sender_does(tmp_path):
    model = Llama()
    exact = {}
    for name, value in stored_values(model.specs).items():
        exact[name] = torch.randn(value.shape)
    saved(tmp_path, exact)
    target = distckpt.record_loader(model.load_weights, model.specs)
    sent = {name: value.to(model.specs[name][1]) for name, value in exact.items()}
    model.load_weights(sent.items())

    assert distckpt.verify(tmp_path, live=target).is_whole


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_are_not_taken_for_values(dtype, tmp_path):
    model = Parts({"x": ((4, 2), dtype)}, {"a": whole_into("x")})
    saved(tmp_path, {"a": torch.ones(4, 2)})
    target = distckpt.record_loader(model.load_weights, {"a": ((4, 2), dtype)})
    model.load_weights([("a", torch.ones(4, 2).to(dtype))])

    (problem,) = distckpt.verify(tmp_path, live=target).problems
    assert "in memory, F32 of (4, 2) in the checkpoint" in problem.message


def test_an_engine_that_has_moved_its_parameters_is_refused(tmp_path):
    model = Parts({"x": ((4, 2), F32)}, {"a": whole_into("x")})
    saved(tmp_path, {"a": torch.ones(4, 2)})
    target = distckpt.record_loader(model.load_weights, tmp_path)
    model.x.data = model.x.data.clone()
    with pytest.raises(distckpt.InvalidShardingError, match="replaced the memory of 'x'"):
        distckpt.verify(tmp_path, live=target)


def test_a_damaged_source_is_told_from_a_difference(tmp_path):
    weight = distckpt.ShardedTensor.from_rank_offsets("a", torch.ones(4, 2))
    distckpt.save({"a": weight}, tmp_path / "step")
    model = Parts({"x": ((4, 2), F32)}, {"a": whole_into("x")})
    target = distckpt.record_loader(model.load_weights, tmp_path / "step")
    model.load_weights([("a", torch.ones(4, 2))])
    assert distckpt.verify(tmp_path / "step", live={"engine": target}).is_whole
    flip(next((tmp_path / "step").rglob("shard*.safetensors")), -3)

    (problem,) = distckpt.verify(tmp_path / "step", live={"engine": target}).problems
    assert "Checksum mismatch" in problem.message


def test_scalars_and_empty_tensors_are_compared(tmp_path):
    model = Parts(
        {"x": ((), BF16), "y": ((0, 3), F32)}, {"a": whole_into("x"), "b": whole_into("y")}
    )
    stored = saved(tmp_path, {"a": torch.tensor(1.5), "b": torch.zeros(0, 3)})
    target = distckpt.record_loader(model.load_weights, tmp_path)
    model.load_weights(stored.items())

    report = distckpt.verify(tmp_path, live=target)
    assert report.is_whole, report.problems
    model.x.data.fill_(1.25)
    assert {p.key for p in distckpt.verify(tmp_path, live=target).problems} == {"a"}
