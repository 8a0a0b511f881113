"""Statistics that saves store: of every layout they are those of numpy, and none is out of date."""

from __future__ import annotations

import contextlib
import io
import json
import math

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, SaveOptions, ShardedObject, ShardedTensor
from distckpt._io import block_stats
from distckpt.cli import main
from distckpt.rules import Rename
from tests.support.cli_command import call_error
from tests.support.harness import error_of
from tests.support.large_states import look_in_windows
from tests.support.layouts import even_part, flat_part

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, -3.0)


def _special(size, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    return values


def content():
    """Tensors by key; their first axis has an even number of rows."""
    numbers = torch.Generator().manual_seed(3)
    return {
        "wide": torch.randn(48, 700, generator=numbers),
        "bf16": _special(4096, torch.bfloat16).view(64, 64),
        "half": _special(400, torch.float16).view(4, 100),
        "fp8": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(16, 16),
        "complex": torch.randn(6, 3, generator=numbers, dtype=torch.complex64),
        "double": torch.tensor([1e300, -1e300, 5e299, 0.0], dtype=torch.float64),
        "int8": torch.arange(-128, 128).to(torch.int8),
        "int64": torch.arange(-(2**40), 2**40, 2**36),
        "mask": torch.arange(10) > 6,
        "nan": torch.full((8, 2), math.nan),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


def expected_of(tensor):
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = real.float() if real.dtype.itemsize < 4 else real
    numbers = numbers.double().numpy().ravel()
    finite = numbers[np.isfinite(numbers)]
    return (
        [np.isnan(numbers).sum(), np.isinf(numbers).sum(), (finite == 0).sum()],
        [math.hypot(*finite), *((f(finite) if len(finite) else math.nan) for f in FIGURES)],
    )


FIGURES = (lambda x: float(np.mean(x / 4) * 4), np.min, np.max)


def shown(path, *options):
    """Return what `distckpt stats` shows of a checkpoint."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["stats", str(path), "--json", *options])
    return json.loads(printed.getvalue())


def check(path, tensors, *options):
    outcome = shown(path, *options)
    assert outcome["from_save"]
    found = {each["key"]: each for each in outcome["tensors"]}
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        stats = found[key]
        counts, values = expected_of(tensor)
        assert [stats[name] for name in ("num_nan", "num_infinite", "num_zero")] == counts, key
        assert (stats["shape"], stats["num_elements"]) == ([*tensor.shape], tensor.numel())
        # Means of many numbers around 0 lose digits.
        nearly = pytest.approx(values, rel=2e-6, abs=1e-7, nan_ok=True)
        assert [float(stats[name]) for name in ("norm", "mean", "min", "max")] == nearly, key


def state_of(layout, rank, num_ranks, tensors):
    if layout == "flat":
        return {key: _flat_shard(key, tensor, rank, num_ranks) for key, tensor in tensors.items()}
    state = {}
    for key, tensor in tensors.items():
        if layout == "columns" and tensor.dim() == 2 and tensor.shape[1] % num_ranks == 0:
            part = tensor.chunk(num_ranks, 1)[rank]
            state[key] = ShardedTensor.from_rank_offsets(key, part, (1, rank, num_ranks))
        elif layout == "rows" and tensor.dim() and tensor.numel():
            part = tensor[even_part(len(tensor), num_ranks, rank)]
            state[key] = ShardedTensor.from_rank_offsets(key, part, (0, rank, num_ranks))
        else:
            state[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    return state


def _flat_shard(key, tensor, rank, num_ranks):
    """As ZeRO-1 has it: a stretch of the flattened tensor, whatever its rows."""
    if not tensor.numel():
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    part = flat_part(tensor.numel(), num_ranks, rank)
    flat = tensor.reshape(-1)[part].clone()
    shape = tuple(tensor.shape) or (1,)
    if not tensor.dim():
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    return ShardedTensor.from_rank_offsets_flat(key, flat, shape, flattened_range=part)


def _saved(rank, num_ranks, layout, path, way):
    tensors = content()
    state = state_of(layout, rank, num_ranks, tensors)
    state |= {"object": ShardedObject("object", [1], (1,), (0,), replica_id=rank), "step": 3}
    if way == "save":
        distckpt.save(state, path, stats=True)
    elif way == "async_save":
        handle = distckpt.async_save(state, path, stats=True, fingerprint=True)
        for shard in state.values():
            if isinstance(shard, ShardedTensor):
                # What is stored is what was there when the call returned.
                shard.data.zero_()
        handle.result()
    else:
        options = SaveOptions(stats=True)
        with CheckpointManager(path, options=options, async_save=False) as manager:
            manager.save(1, state)


@pytest.mark.parametrize("way", ["save", "async_save"])
@pytest.mark.parametrize("layout", ["rows", "columns", "replicated", "flat"])
def test_statistics_are_those_of_numpy_in_every_layout(run, tmp_path, layout, way):
    run(_saved, 2, 2, layout, str(tmp_path / "step"), way)

    check(tmp_path / "step", content())
    assert distckpt.verify(tmp_path / "step").is_whole


@pytest.mark.parametrize(("window", "block"), [(1 << 22, 1 << 18), (1000, 64)])
def test_one_process_stores_the_same(tmp_path, monkeypatch, window, block):
    look_in_windows(monkeypatch, window, block)
    _saved(0, 1, "rows", str(tmp_path / "run"), "manager")

    check(tmp_path / "run" / "step_00000001", content())


def _saved_twice(rank, path):
    """With the plan of the first save, and then with that of a checkpoint that is loaded."""
    tensors = content()
    for number in (1, 2):
        state = state_of("rows", rank, 2, tensors)
        distckpt.save(state, f"{path}/{number}", stats=True)
        tensors["wide"] *= 3
        tensors["wide"][5, 7] = math.nan
    distckpt.load(state, f"{path}/2")
    state["wide"].data.fill_(1.0)
    distckpt.save(state, f"{path}/3", stats=True)


def test_saves_with_a_plan_that_is_kept_store_what_is_there(run, tmp_path):
    run(_saved_twice, 2, str(tmp_path))

    later = content()["wide"] * 3
    later[5, 7] = math.nan
    check(tmp_path / "1", content())
    check(tmp_path / "2", content() | {"wide": later})
    check(tmp_path / "3", content() | {"wide": torch.ones(48, 700)})


def test_copies_keep_the_statistics_of_what_stays_as_it_is(tmp_path):
    tensors = content()
    distckpt.save(state_of("rows", 0, 1, tensors), tmp_path / "step", stats=True)

    distckpt.reshard(tmp_path / "step", tmp_path / "divided", num_ranks=3, grids={"wide": (4, 1)})
    distckpt.reshard(
        tmp_path / "step",
        tmp_path / "other",
        rules=[Rename("scalar", "renamed")],
        dtype={"wide": torch.float64},
    )

    check(tmp_path / "divided", tensors)
    tensors["renamed"] = tensors.pop("scalar")
    check(tmp_path / "other", {k: v for k, v in tensors.items() if k != "wide"}, "--keys", "!wide")
    assert not shown(tmp_path / "other")["from_save"]


def test_the_statistics_of_what_remains_stay(tmp_path):
    tensors = content()
    distckpt.save(state_of("rows", 0, 1, tensors), tmp_path / "step", stats=True)

    removed = [key for key in tensors if key.startswith("int")]
    distckpt.megatron.serialization.remove_sharded_tensors(str(tmp_path / "step"), "int")

    check(tmp_path / "step", {k: v for k, v in tensors.items() if k not in removed})


def test_a_tensor_of_which_parts_are_not_saved_has_none(tmp_path, capsys):
    part = ShardedTensor.from_rank_offsets("part", torch.ones(4, 2), (0, 0, 2))
    whole = ShardedTensor.from_rank_offsets("whole", torch.ones(4, 2))
    path = tmp_path / "step"
    distckpt.save({"a": part, "b": whole}, path, stats=True, validate_access_integrity=False)

    assert "'part' is not stored completely" in call_error(capsys, "stats", path, code=2)
    check(path, {"whole": torch.ones(4, 2)}, "--keys", "whole")


def test_a_save_without_the_option_stores_none(tmp_path):
    state = state_of("rows", 0, 1, content())
    distckpt.save(state, tmp_path / "without")
    distckpt.save(state, tmp_path / "with", stats=True)

    assert not shown(tmp_path / "without")["from_save"]
    sizes = [
        (tmp_path / name / "manifest.safetensors").stat().st_size for name in ("without", "with")
    ]
    assert sizes[0] + 32 * len(content()) < sizes[1] < sizes[0] + 35 * len(content()) + 300


def _different_options(rank, path):
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=rank)
    return str(error_of(distckpt.save, {"w": shard}, path, stats=rank == 0))


def test_all_ranks_give_the_same(run, tmp_path):
    for text in run(_different_options, 2, str(tmp_path / "step")):
        assert "the same stats" in text


@pytest.mark.parametrize("key", content())
def test_what_an_accelerator_computes_is_what_numpy_does(key):
    """The arithmetic of accelerators, on tensors of this machine."""
    tensor = content()[key]
    if tensor.dtype.itemsize == 1:
        pytest.skip("counted by the same code everywhere")
    stats = block_stats.stats_on_device(tensor)
    counts, values = expected_of(tensor)
    assert [stats.num_nan, stats.num_infinite, stats.num_zero] == counts
    found = [stats.norm, stats.mean, stats.low, stats.high]
    assert found == pytest.approx(values, rel=1e-9, abs=1e-9, nan_ok=True)
