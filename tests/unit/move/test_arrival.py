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
from tests.support.engine_loaders import MODELS, EngineModel, Llama, stored_values, tensors_of

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
        assert [line.split()[:2] for line in lines] == [[k, str(n)] for k, n in counts.items()]
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
