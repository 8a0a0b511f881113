"""Tensors on a GPU in every verb, in one process; the same runs without a GPU, see conftest.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from distckpt._base.threads import NUM_THREADS
from distckpt.streaming import save_safetensors_streaming
from distckpt.tensors import to_host

PATIENCE = 120.0


def test_there_is_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the tests of tests/gpu have run without one")


def whole(tensors):
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def on(device, array):
    """Copy an array to a device."""
    return torch.from_numpy(array.copy()).to(device)


def numbers(*shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


ROWS = numbers(60, 40)
BIG = numbers(3000, 4001)
"""48 MB, which is more than the page-locked windows of all threads hold."""
COMPLEX = (ROWS + 1j * ROWS[::-1]).astype(np.complex64)
CASES = {
    "big": (BIG, lambda x: x, lambda x: x),
    "big columns": (BIG, lambda x: x[:, 7:2000], lambda x: x[:, 7:2000]),
    "rows": (ROWS, lambda x: x[3:50:2], lambda x: x[3:50:2]),
    "columns": (ROWS, lambda x: x[:, 5:9], lambda x: x[:, 5:9]),
    "transposed": (ROWS, lambda x: x.t(), lambda x: x.T),
    "expanded": (ROWS[0], lambda x: x.expand(3, 40), lambda x: np.broadcast_to(x, (3, 40))),
    "conjugated": (COMPLEX, lambda x: x.conj(), lambda x: x.conj()),
    "negated": (COMPLEX, lambda x: x.conj().imag, lambda x: -x.imag),
    "half": (ROWS.astype(np.float16), lambda x: x, lambda x: x),
    "flags": (ROWS % 3 == 0, lambda x: x[1:], lambda x: x[1:]),
    "scalar": (np.array(7, np.int64), lambda x: x, lambda x: x),
    "empty": (numbers(0, 4), lambda x: x, lambda x: x),
}
"""What is in memory, a view of it by torch, and the same one by numpy."""


def made(device):
    """Return the tensors of all cases on a device, and their values."""
    tensors = {key: view(on(device, base)) for key, (base, view, _) in CASES.items()}
    return tensors, {
        key: np.ascontiguousarray(view(base)) for key, (base, _, view) in CASES.items()
    }


def stored(folder):
    """Return the bytes of each key, as the format of safetensors says."""
    found = {}
    for path in Path(folder).rglob("*.safetensors"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header.pop("__metadata__", None)
        found |= {
            key: content[8 + size :][slice(*entry["data_offsets"])] for key, entry in header.items()
        }
    return found


def assert_stored(folder, expected):
    """The keys of a checkpoint of one rank and one file are those of its tensors."""
    found = stored(Path(folder) / "tensors")
    assert {key: value.tobytes() for key, value in expected.items()} == {
        key: found[key] for key in expected
    }


def empty(value, device):
    return torch.full(value.shape, 99, dtype=torch.from_numpy(value).dtype, device=device)


def assert_same(tensors, expected):
    for key, value in expected.items():
        np.testing.assert_array_equal(
            tensors[key].resolve_conj().resolve_neg().cpu().numpy(), value, err_msg=key
        )


# --- Save and load --------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_all_kinds_of_memory_are_saved(place, tmp_path, durable):
    tensors, expected = made(place.device)
    distckpt.save(whole({**tensors, "host": torch.ones(5)}), tmp_path / "c", durable=durable)
    assert_stored(tmp_path / "c", {**expected, "host": np.ones(5, np.float32)})


@pytest.mark.parametrize("verify", [True, False])
def test_all_are_loaded_into_memory_of_all_kinds(place, tmp_path, verify):
    expected = {key: np.ascontiguousarray(view(base)) for key, (base, _, view) in CASES.items()}
    distckpt.save(
        whole({key: torch.from_numpy(value) for key, value in expected.items()}), tmp_path / "c"
    )
    targets = {key: empty(value, place.device) for key, value in expected.items()}
    # Targets that are not contiguous, and one in host memory.
    targets["big"] = empty(BIG.T.copy(), place.device).t()
    targets["rows"] = empty(numbers(24, 80), place.device)[:, ::2]
    targets["half"] = empty(expected["half"], "cpu")
    distckpt.load(whole(targets), tmp_path / "c", verify=verify)
    assert_same(targets, expected)


def test_parts_and_other_dtypes_of_plain_files_are_loaded(place, tmp_path):
    values = torch.from_numpy(BIG)
    save_file({"a": values, "b": values.bfloat16()}, tmp_path / "model.safetensors")
    columns = torch.zeros(3000, 2000, device=place.device)
    half = torch.zeros(3000, 4001, device=place.device, dtype=torch.bfloat16)
    state = {
        "a": ShardedTensor("a", columns, torch.float32, (3000, 2000), (3000, 4001), (0, 17), None)
    }
    state["b"] = ShardedTensor.from_rank_offsets("b", half)
    distckpt.load(state, tmp_path, validate_access_integrity=False)
    assert_same(
        {"a": columns, "b": half.float()},
        {"a": BIG[:, 17:2017], "b": values.bfloat16().float().numpy()},
    )


def test_quantized_values_are_loaded(place, tmp_path):
    codes = torch.from_numpy(numbers(128, 256) % 100).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 4.0]])
    save_file({"w.weight": codes, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    target = torch.zeros(128, 256, device=place.device)
    distckpt.load(whole({"w.weight": target}), tmp_path)
    assert_same({"w": target}, {"w": codes.float().numpy() * np.repeat(scales.numpy(), 128, 1)})


def test_two_keys_with_one_memory_are_loaded(place, tmp_path):
    tied = on(place.device, ROWS)
    distckpt.save(whole({"in": tied, "out": tied}), tmp_path / "c")
    target = torch.zeros_like(tied)
    distckpt.load(whole({"in": target, "out": target}), tmp_path / "c")
    assert_same({"out": target}, {"out": ROWS})


def test_a_model_and_its_optimizer_go_on_as_before(place, tmp_path):
    def trained(seed, num_steps):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(place.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return step(model, optimizer, num_steps)

    def step(model, optimizer, num_steps):
        for _ in range(num_steps):
            model(torch.ones(3, 8, device=place.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(1, 3)
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other, its_optimizer = trained(2, 1)
    distckpt.load({"model": other, "optimizer": its_optimizer}, tmp_path / "c")
    expected, found = (
        step(*pair, 2)[0].state_dict() for pair in ((model, optimizer), (other, its_optimizer))
    )
    assert all(
        torch.equal(found[key], value) and value.device.type == place.device.type
        for key, value in expected.items()
    )


def test_a_manager_saves_and_resumes(place, tmp_path):
    rows = on(place.device, ROWS)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, whole({"rows": rows}))
        rows.zero_()
    with CheckpointManager(tmp_path) as manager:
        manager.load(whole({"rows": rows}))
    assert_same({"rows": rows}, {"rows": ROWS})


def test_tensors_are_written_as_they_come(place, tmp_path):
    tensors, expected = made(place.device)
    for each in (tensors, expected):
        del each["conjugated"]  # not every release of safetensors has complex numbers
    announced = [(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()]
    save_safetensors_streaming(tensors.items(), tmp_path / "model.safetensors", announced)
    found = stored(tmp_path)
    assert {key: found[key] for key in expected} == {
        key: value.tobytes() for key, value in expected.items()
    }
    assert_same({key: to_host(tensor) for key, tensor in tensors.items()}, expected)


# --- In the background ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_inflight_bytes", [None, 16 << 20])
def test_training_goes_on_with_tensors_that_are_being_saved(place, tmp_path, max_inflight_bytes):
    tensors, expected = made(place.device)
    distckpt.reserve_staging_memory(whole(tensors)).result(PATIENCE)
    handle = distckpt.async_save(
        whole(tensors), tmp_path / "c", max_inflight_bytes=max_inflight_bytes
    )
    if max_inflight_bytes is not None:
        assert handle.staged.wait(PATIENCE)
    for key, tensor in tensors.items():
        if key not in ("expanded", "conjugated", "negated"):
            tensor.zero_()
    handle.result(PATIENCE)
    assert_stored(tmp_path / "c", expected)


def test_later_calls_take_no_more_page_locked_memory(place, tmp_path):
    tensors, expected = made(place.device)
    counts = []
    for number in range(5):
        distckpt.async_save(whole(tensors), tmp_path / f"a{number}").result(PATIENCE)
        distckpt.save(whole(tensors), tmp_path / f"b{number}")
        distckpt.load(
            whole({"big": tensors["big"]}), tmp_path / f"b{number}", validate_access_integrity=False
        )
        counts.append(place.num_pinned_blocks())
    # In the first round a thread may have found nothing to do.
    assert counts[-1] <= counts[0] + NUM_THREADS
    assert_stored(tmp_path / "b4", expected)


def test_waits_for_the_device_do_not_grow_with_the_number_of_tensors(place, tmp_path):
    counts = []
    for num_tensors in (2, 200):
        rows = on(place.device, ROWS)
        state = whole({str(i): rows + i for i in range(num_tensors)})
        with place.counting_waits() as waits:
            distckpt.async_save(state, tmp_path / str(num_tensors)).result(PATIENCE)
            distckpt.load(state, tmp_path / str(num_tensors))
        counts.append(len(waits))
    assert counts[1] <= counts[0]


# --- Streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "save", [distckpt.save, lambda *args: distckpt.async_save(*args).result(PATIENCE)]
)
def test_work_that_was_queued_before_a_save_is_in_it(place, tmp_path, save):
    with place.stream():
        rows = torch.zeros(60, 40, device=place.device)
        ready = on(place.device, ROWS)
        place.keep_busy()
        rows.copy_(ready)
        save(whole({"rows": rows, "columns": rows[:, 5:9]}), tmp_path / "c")
    assert_stored(tmp_path / "c", {"rows": ROWS, "columns": np.ascontiguousarray(ROWS[:, 5:9])})


def test_work_that_was_queued_before_a_load_does_not_overwrite_it(place, tmp_path):
    distckpt.save(
        whole({"rows": torch.from_numpy(ROWS), "big": torch.from_numpy(BIG)}), tmp_path / "c"
    )
    with place.stream():
        targets = {
            key: torch.zeros(value.shape, device=place.device)
            for key, value in (("rows", ROWS), ("big", BIG))
        }
        place.keep_busy()
        for target in targets.values():
            target.fill_(9)
        distckpt.load(whole(targets), tmp_path / "c")
        doubled = {key: target * 2 for key, target in targets.items()}
    # Without waiting for the stream above: the load is done when it returns.
    with place.stream():
        tripled = {key: target * 3 for key, target in targets.items()}
    if place.is_cuda:
        torch.cuda.synchronize()
    assert_same(doubled, {"rows": ROWS * 2, "big": BIG * 2})
    assert_same(tripled, {"rows": ROWS * 3, "big": BIG * 3})


def test_work_that_is_queued_after_a_background_save_is_not_in_it(place, tmp_path):
    with place.stream():
        big = on(place.device, BIG)
        place.keep_busy()
        handle = distckpt.async_save(whole({"big": big}), tmp_path / "c")
        big.mul_(2)
        handle.result(PATIENCE)
    assert_stored(tmp_path / "c", {"big": BIG})
