"""Asynchronous saves in one process: what was there when the call returned is what is saved,
whatever happens then.
"""

from __future__ import annotations

import concurrent.futures
import gc
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

import distckpt
from distckpt import CheckpointExistsError, CheckpointingException, ShardedObject, ShardedTensor
from distckpt.strategies.base import SaveShardedStrategy
from tests.support.disk import tree_of
from tests.support.reference import skip_where_safetensors_lacks
from tests.support.slow_device import SlowDevice, put_tensors_on
from tests.support.states import bits, whole

pytestmark = pytest.mark.usefixtures("no_saves_left")

PATIENCE = 200.0


class Gate:
    """Holds background saves up: their `progress` waits until the gate is opened."""

    def __init__(self):
        self.reached = threading.Event()
        self._open = threading.Event()

    def progress(self, num_bytes, total_bytes):
        self.reached.set()
        assert self._open.wait(PATIENCE)

    def open(self):
        self._open.set()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


def stored(path):
    """Return the stored tensors by key, as another library reads the files."""
    tensors = {}
    for file in sorted((Path(path) / "tensors").iterdir()):
        tensors.update(load_file(file))
    return tensors


# --- Mutation right after return: each function makes tensors, and what changes them --------------


def add_in_place():
    t = torch.arange(3000.0)
    return {"t": t}, lambda: t.add_(1)


def resize():
    t = torch.arange(3000.0)
    return {"t": t}, lambda: t.resize_(7).zero_()


def free_the_storage():
    t = torch.arange(300000.0)
    return {"t": t}, lambda: t.untyped_storage().resize_(0)


def swap_data():
    t = torch.nn.Parameter(torch.arange(3000.0))
    return {"t": t}, lambda: setattr(t, "data", torch.zeros(3000))


def zero_dimensional():
    t = torch.tensor(4.25)
    return {"t": t}, lambda: t.fill_(0)


def views_of_one_storage():
    base = torch.arange(4000.0)
    return {
        "a": base[:1500],
        "b": base[1000:3000],
        "c": base.view(40, 100).t(),
    }, lambda: base.zero_()


def memory_shared_with_numpy():
    array = np.arange(3000, dtype=np.int64)
    return {"t": torch.from_numpy(array)}, lambda: array.fill(-1)


def memory_shared_between_processes():
    t = torch.arange(3000.0).share_memory_()
    return {"t": t}, lambda: t.zero_()


def strided_and_conjugated():
    t = torch.arange(3000, dtype=torch.float32).view(30, 100)
    z = torch.complex(torch.arange(50.0), torch.ones(50))
    return {"t": t[::2, ::3], "z": z.conj()}, lambda: (t.zero_(), z.zero_())


def small_types():
    tensors = {
        "b": torch.arange(999).bfloat16(),
        "f": torch.arange(99).to(torch.float8_e4m3fn),
        "o": torch.ones(9) > 0,
    }
    return tensors, lambda: [t.view(torch.uint8).zero_() for t in tensors.values()]


def larger_than_one_unit():
    t = torch.arange(3_000_000, dtype=torch.int64)
    return {"t": t}, lambda: t.zero_()


MUTATIONS = [
    add_in_place,
    resize,
    free_the_storage,
    swap_data,
    zero_dimensional,
    views_of_one_storage,
    memory_shared_with_numpy,
    memory_shared_between_processes,
    strided_and_conjugated,
    small_types,
    larger_than_one_unit,
]


@pytest.mark.parametrize("make", MUTATIONS, ids=lambda make: make.__name__)
def test_what_happens_to_tensors_after_the_call_is_not_saved(make, tmp_path, gate):
    tensors, mutate = make()
    skip_where_safetensors_lacks(*(tensor.dtype for tensor in tensors.values()))
    expected = {key: bits(tensor.clone()) for key, tensor in tensors.items()}
    # The first save fills new memory, the second one memory that holds something else.
    first = distckpt.async_save(
        {key: whole(key, torch.zeros_like(t)) for key, t in tensors.items()}, tmp_path / "first"
    )
    first.result(PATIENCE)
    handle = distckpt.async_save(
        {k: whole(k, t) for k, t in tensors.items()}, tmp_path / "c", progress=gate.progress
    )
    assert handle.staged.is_set()
    assert not handle.done()
    mutate()
    assert not all(
        tensor.untyped_storage().size() and bits(tensor) == expected[key]
        for key, tensor in tensors.items()
    )
    gate.open()
    report = handle.result(PATIENCE)
    assert report.location == str(tmp_path / "c")
    assert {k: bits(t) for k, t in stored(tmp_path / "c").items()} == expected
    assert distckpt.verify(tmp_path / "c").is_whole


def test_freed_tensors(tmp_path, gate):
    tensors = [torch.full((50_000,), float(i)) for i in range(4)]
    state = {str(i): whole(str(i), tensor) for i, tensor in enumerate(tensors)}
    handle = distckpt.async_save(state, tmp_path / "c", progress=gate.progress)
    del tensors, state
    gc.collect()
    others = [torch.full((50_000,), -1.0) for _ in range(8)]
    gate.open()
    handle.result(PATIENCE)
    assert {key: t.unique().tolist() for key, t in stored(tmp_path / "c").items()} == {
        str(i): [i] for i in range(4)
    }
    assert len(others) == 8


def test_objects_and_common_state_are_copied(tmp_path, gate):
    rng, lists, array, tensor = {"seed": [1, 2]}, [1, [2]], np.arange(5), torch.arange(4)
    state = {
        "rng": ShardedObject("rng", rng, (1,), (0,)),
        "lists": lists,
        "array": array,
        "tensor": tensor,
    }
    handle = distckpt.async_save(
        state, tmp_path / "c", content_metadata={"lists": lists}, progress=gate.progress
    )
    rng["seed"].append(3)
    lists[1].append(3)
    array += 1
    tensor.zero_()
    gate.open()
    handle.result(PATIENCE)
    loaded = distckpt.load({"rng": ShardedObject("rng", None, (1,), (0,))}, tmp_path / "c")
    assert loaded["rng"] == {"seed": [1, 2]}
    assert loaded["lists"] == [1, [2]]
    assert loaded["array"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["tensor"].tolist() == [0, 1, 2, 3]
    assert distckpt.open(tmp_path / "c").metadata == {"lists": [1, [2]]}


def test_the_same_bytes_as_a_blocking_save(tmp_path):
    state = {
        "a": whole("a", torch.randn(100, 7)),
        "b": whole("b", torch.arange(9)),
        "c": [1, {"d": None}],
    }
    distckpt.save(state, tmp_path / "blocking")
    distckpt.async_save(state, tmp_path / "async").result(PATIENCE)
    assert tree_of(tmp_path / "async") == tree_of(tmp_path / "blocking")


# --- Several saves --------------------------------------------------------------------------------


def test_saves_in_flight_follow_each_other(tmp_path, gate):
    value = torch.zeros(200_000)
    handles = []
    for step in range(2):
        value.fill_(step)
        handles.append(
            distckpt.async_save(
                {"v": whole("v", value)}, tmp_path / str(step), progress=gate.progress
            )
        )
    value.fill_(-1)
    assert [handle.done() for handle in handles] == [False, False]
    assert gate.reached.wait(PATIENCE)
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []
    with pytest.raises(TimeoutError, match="goes on in the background"):
        handles[0].result(timeout=0.01)
    gate.open()
    for step, handle in enumerate(handles):
        handle.result(PATIENCE)
        assert stored(tmp_path / str(step))["v"].unique().tolist() == [step]


def test_a_third_save_waits_for_memory(tmp_path, gate):
    value = torch.zeros(1000)
    state = {"v": whole("v", value)}
    handles = [
        distckpt.async_save(state, tmp_path / str(i), progress=gate.progress) for i in range(2)
    ]
    assert gate.reached.wait(PATIENCE)
    with pytest.raises(CheckpointingException, match="neither was done within"):
        distckpt.async_save(state, tmp_path / "impatient", timeout=0.05)
    third: list[distckpt.SaveHandle] = []
    thread = threading.Thread(
        target=lambda: third.append(distckpt.async_save(state, tmp_path / "2"))
    )
    thread.start()
    gate.open()
    thread.join(PATIENCE)
    for handle in handles + third:
        handle.result(PATIENCE)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "read",
    [
        lambda path: distckpt.load({"v": whole("v", torch.zeros(3))}, path),
        lambda path: distckpt.open(path).read_tensors(),
    ],
)
def test_loading_waits_for_the_save_of_that_path(read, tmp_path, gate):
    handle = distckpt.async_save(
        {"v": whole("v", torch.ones(3))}, tmp_path / "c", progress=gate.progress
    )
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    loaded = read(f"{tmp_path}/x/../c")
    assert loaded["v"].tolist() == [1, 1, 1]
    assert handle.done()
    opener.join()


def test_blocking_saves_and_background_saves_side_by_side(tmp_path, gate):
    handle = distckpt.async_save(
        {"v": whole("v", torch.ones(3))}, tmp_path / "a", progress=gate.progress
    )
    distckpt.save({"v": whole("v", torch.zeros(3))}, tmp_path / "b")
    assert distckpt.megatron.check_is_distributed_checkpoint(tmp_path / "b")
    assert not handle.done()
    gate.open()
    handle.result(PATIENCE)


# --- Memory ---------------------------------------------------------------------------------------


def test_limited_memory_stages_in_waves(tmp_path, gate):
    """What does not fit is copied while files are written; no tensor may change before `staged`."""
    rows = torch.arange(6 << 20, dtype=torch.int64).view(12, -1)
    state = {str(i): whole(str(i), row) for i, row in enumerate(rows)}
    handle = distckpt.async_save(
        state, tmp_path / "c", max_inflight_bytes=16 << 20, progress=gate.progress
    )
    assert gate.reached.wait(PATIENCE)
    assert not handle.staged.is_set()
    gate.open()
    assert handle.staged.wait(PATIENCE)
    rows.fill_(-1)
    handle.result(PATIENCE)
    found = stored(tmp_path / "c")
    expected = torch.arange(6 << 20, dtype=torch.int64).view(12, -1)
    for i in range(12):
        assert torch.equal(found[str(i)], expected[i])


def test_a_limit_that_is_large_enough_stages_at_once(tmp_path, gate):
    state = {"v": whole("v", torch.ones(1000))}
    handle = distckpt.async_save(
        state, tmp_path / "c", max_inflight_bytes=64 << 20, progress=gate.progress
    )
    assert handle.staged.is_set()


def test_staged_is_set_when_a_save_fails(tmp_path):
    def progress(num_bytes, total_bytes):
        raise ValueError("no more of this")

    state = {"v": whole("v", torch.ones(8 << 20))}
    handle = distckpt.async_save(
        state, tmp_path / "c", max_inflight_bytes=16 << 20, progress=progress
    )
    assert handle.staged.wait(PATIENCE)
    with pytest.raises(ValueError, match="no more of this"):
        handle.result(PATIENCE)
    assert os.listdir(tmp_path) == []


def test_tensors_on_a_device_are_copied_into_pinned_memory(tmp_path, gate, monkeypatch):
    """The device is a made-up one, on which all tensors are while they are staged."""
    blocker = distckpt.async_save({}, tmp_path / "blocker", progress=gate.progress)
    assert gate.reached.wait(PATIENCE)
    device = SlowDevice()
    big, column = torch.arange(3_000_000.0), torch.arange(200.0).view(20, 10)
    expected = {"big": big.clone(), "column": column[:, 3].clone(), "scalar": torch.tensor(3.5)}
    with monkeypatch.context() as patch:
        put_tensors_on(device, patch)
        state = {"big": whole("big", big), "column": whole("column", column[:, 3])}
        handle = distckpt.async_save(
            {**state, "scalar": whole("scalar", torch.tensor(3.5))}, tmp_path / "c"
        )
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert device.num_copied_bytes == num_bytes == sum(high - low for low, high, _ in device.pinned)
    big.zero_()
    column.zero_()
    gate.open()
    for each in (blocker, handle):
        each.result(PATIENCE)
    found = stored(tmp_path / "c")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def open_things():
    process = psutil.Process()
    return (
        process.num_fds(),
        {thread.name for thread in threading.enumerate()},
        # Other tests have shared memory meanwhile.
        sum(map_.path.startswith("/dev/shm") for map_ in process.memory_maps(grouped=False)),
    )


def test_many_saves_leave_nothing_behind(tmp_path):
    value = torch.zeros(1 << 20)
    process = psutil.Process()
    seen = []
    for number in range(100):
        value.fill_(number)
        handle = distckpt.async_save(
            {"v": whole("v", value)}, tmp_path / "c", overwrite=True, durable=False
        )
        if number in (30, 99):
            handle.result(PATIENCE)
            gc.collect()
            seen.append((open_things(), process.memory_info().rss))
    assert seen[0][0] == seen[1][0]
    assert seen[1][1] - seen[0][1] < 4 << 20, "less than one more copy of the data"
    assert os.listdir(tmp_path) == ["c"]
    assert stored(tmp_path / "c")["v"].unique().tolist() == [99]


# --- Memory that is there before the first save ---------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("limit", [None, 16 << 20])
def test_a_save_into_reserved_memory_saves_the_same_bytes(limit, waits, tmp_path):
    tensors = {"a": torch.arange(6_000_000.0), "b": torch.arange(20.0).view(4, 5)[:, 1:3]}
    reserved = distckpt.reserve_staging_memory(
        {k: whole(k, t) for k, t in tensors.items()}, max_inflight_bytes=limit
    )
    if waits:
        assert reserved.result(PATIENCE) == (
            sum(t.nbytes for t in tensors.values()) if limit is None else 32
        )
    for attempt in range(2):
        state = {key: whole(key, tensor + attempt) for key, tensor in tensors.items()}
        handle = distckpt.async_save(state, tmp_path / f"{attempt}", max_inflight_bytes=limit)
        assert handle.staged.wait(PATIENCE)
        for shard in state.values():
            shard.data.zero_()
        assert handle.result(PATIENCE).plan_reused
        found = stored(tmp_path / f"{attempt}")
        assert {key: bits(t) for key, t in found.items()} == {
            k: bits(t + attempt) for k, t in tensors.items()
        }


def test_what_changes_after_memory_was_reserved_is_saved_as_it_is(tmp_path):
    tensor = torch.arange(3000.0)
    state = {"t": whole("t", tensor), "step": 1}
    for size in (3000, 7, 5000):
        distckpt.reserve_staging_memory(state)
        state = {
            "t": whole("t", torch.arange(size) + 0.5),
            "more": whole("more", torch.ones(size)),
            "step": size,
        }
        distckpt.async_save(state, tmp_path / "c", overwrite=True).result(PATIENCE)
        assert torch.equal(stored(tmp_path / "c")["t"], torch.arange(size) + 0.5)
        assert distckpt.open(tmp_path / "c").common_state["step"] == size
    assert os.listdir(tmp_path) == ["c"], "to reserve memory writes nothing"


def test_page_locked_memory_is_reserved_or_else_taken_by_the_save(tmp_path, monkeypatch, caplog):
    device = SlowDevice()
    tensor = torch.arange(3_000_000.0)
    expected = tensor.clone()
    with monkeypatch.context() as patch:
        put_tensors_on(device, patch)
        patch.setattr(device, "pinned_memory", lambda num_bytes: 1 / 0)
        refused = distckpt.reserve_staging_memory({"t": whole("t", tensor)})
        assert isinstance(refused.exception(PATIENCE), ZeroDivisionError)
        assert "memory for background saves cannot be reserved: ZeroDivisionError" in caplog.text
        patch.undo()
        put_tensors_on(device, patch)
        assert (
            distckpt.reserve_staging_memory({"t": whole("t", tensor)}).result(PATIENCE)
            == tensor.nbytes
        )
        assert len(device.pinned) == 1
        assert device.num_copied_bytes == 0
        handle = distckpt.async_save({"t": whole("t", tensor)}, tmp_path / "c")
        assert len(device.pinned) == 1
    tensor.zero_()
    handle.result(PATIENCE)
    assert torch.equal(stored(tmp_path / "c")["t"], expected)


def test_page_locked_memory_is_in_blocks_that_torch_need_not_round_up_much(tmp_path, monkeypatch):
    """torch takes a power of two for each."""
    device = SlowDevice()
    big = torch.arange(70 << 20, dtype=torch.uint8).view(-1, 1024)
    tensors = {
        "big": big,
        "columns": big[:, 3:7],
        "small": torch.arange(5.0),
        "empty": torch.ones(0),
    }
    expected = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    with monkeypatch.context() as patch:
        put_tensors_on(device, patch)
        handle = distckpt.async_save(
            {key: whole(key, tensor) for key, tensor in tensors.items()}, tmp_path / "c"
        )
    big.zero_()
    handle.result(PATIENCE)
    sizes = [high - low for low, high, _ in device.pinned]
    assert sum(sizes) == sum(tensor.nbytes for tensor in expected.values())
    assert sum(1 << (size - 1).bit_length() for size in sizes) < 1.1 * sum(sizes)
    found = stored(tmp_path / "c")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("is_on_device", [True, False])
def test_copies_of_some_tensors_are_written_in_other_units_than_they_were_made_in(
    tmp_path, monkeypatch, is_on_device
):
    """What fits is copied from the end; what is before it shifts where units begin when the file is
    written.
    """
    draw = np.random.default_rng(0)
    sizes = {"a": 43_000_003, "b": 21_000_001, "c": 5, "d": 37_000_007}
    tensors = {
        key: torch.from_numpy(draw.integers(0, 256, size, np.uint8)) for key, size in sizes.items()
    }
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    with monkeypatch.context() as patch:
        if is_on_device:
            device = SlowDevice()
            put_tensors_on(device, patch)
        state = {key: whole(key, tensor) for key, tensor in tensors.items()}
        handle = distckpt.async_save(state, tmp_path / "c", max_inflight_bytes=80 << 20)
        assert handle.staged.wait(PATIENCE)
    for tensor in tensors.values():
        tensor.zero_()
    handle.result(PATIENCE)
    found = stored(tmp_path / "c")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_memory_of_a_save_from_the_host_is_not_used_for_tensors_on_a_device(tmp_path, monkeypatch):
    tensor = torch.arange(3_000_000.0)
    distckpt.async_save({"t": whole("t", tensor)}, tmp_path / "c").result(PATIENCE)
    device = SlowDevice()
    with monkeypatch.context() as patch:
        put_tensors_on(device, patch)
        distckpt.async_save({"t": whole("t", tensor)}, tmp_path / "d").result(PATIENCE)
    assert tensor.nbytes in [high - low for low, high, _ in device.pinned], (
        "beside the windows for writing objects"
    )
    assert torch.equal(stored(tmp_path / "d")["t"], tensor)


@pytest.mark.parametrize(
    "verb", [distckpt.reserve_staging_memory, lambda state: distckpt.async_save(state, "unused")]
)
@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"t": whole("t", torch.ones(4, device="meta"))}, "meta"),
        (
            {"t": ShardedTensor.from_rank_offsets("t", torch.ones(4), (0, 1, 2))},
            "no rank holds element",
        ),
        ({"o": object()}, "cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_when_memory_is_reserved(
    state, error, verb, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointingException, match=error):
        verb(state)
    assert os.listdir() == []


# --- Errors ---------------------------------------------------------------------------------------


def test_what_is_wrong_with_the_state_dict_is_raised_at_once(tmp_path):
    with pytest.raises(distckpt.InvalidShardingError):
        distckpt.async_save(
            {"v": ShardedTensor.from_rank_offsets("v", torch.ones(3), (0, 0, 2))}, tmp_path / "c"
        )
    with pytest.raises(distckpt.UnsupportedObjectError):
        distckpt.async_save({"v": object()}, tmp_path / "c")
    distckpt.save({"v": 1}, tmp_path / "there")
    with pytest.raises(CheckpointExistsError):
        distckpt.async_save({"v": 1}, tmp_path / "there")


def failing_save(path):
    """Start a save that finds something in its way when it is to be committed."""

    def progress(num_bytes, total_bytes):
        path.mkdir(exist_ok=True)
        (path / "metadata.json").write_text("of another program")

    return distckpt.async_save({"v": 1}, path, progress=progress)


def test_result_raises_and_then_nothing_else_does(tmp_path, caplog):
    handle = failing_save(tmp_path / "c")
    for _ in range(2):
        with pytest.raises(CheckpointExistsError, match="already holds a complete checkpoint"):
            handle.result(PATIENCE)
    assert f"the background save to {tmp_path}/c failed: CheckpointExistsError" in caplog.text
    distckpt.async_save({"v": 1}, tmp_path / "d").result(PATIENCE)


def test_a_handle_is_a_future_that_cannot_be_cancelled(gate, tmp_path):
    handle = distckpt.async_save(
        {"v": whole("v", torch.ones(3))}, tmp_path / "c", progress=gate.progress
    )
    assert not handle.cancel()
    assert concurrent.futures.wait([handle], timeout=0).not_done == {handle}
    gate.open()
    assert handle.exception(PATIENCE) is None
    failed = failing_save(tmp_path / "d")
    assert isinstance(failed.exception(PATIENCE), CheckpointExistsError)
    distckpt.save({"v": 1}, tmp_path / "e")


@pytest.mark.parametrize("verb", [distckpt.save, distckpt.async_save])
def test_an_error_that_nobody_asked_for_surfaces_once(verb, tmp_path):
    failing_save(tmp_path / "c")
    failing_save(tmp_path / "d")
    distckpt._io.background.wait_for_all()
    with pytest.raises(CheckpointExistsError, match="already holds a complete checkpoint"):
        verb({"v": 1}, tmp_path / "e")
    verb({"v": 2}, tmp_path / "f")
    distckpt._io.background.wait_for_all()
    # The save that raised it is not lost with it.
    assert distckpt.load({}, tmp_path / "e") == {"v": 1}
    assert distckpt.load({}, tmp_path / "f") == {"v": 2}


@pytest.mark.parametrize("verb", [distckpt.save, distckpt.async_save])
def test_an_error_that_nobody_asked_for_stays_until_a_save_succeeds(verb, tmp_path):
    distckpt.save({"v": 0}, tmp_path / "there")
    failing_save(tmp_path / "c")
    distckpt._io.background.wait_for_all()
    with pytest.raises(CheckpointExistsError, match="there"):
        verb({"v": 1}, tmp_path / "there")
    with pytest.raises(CheckpointExistsError, match="/c'"):
        verb({"v": 1}, tmp_path / "e")
    verb({"v": 2}, tmp_path / "f")
    distckpt._io.background.wait_for_all()
    assert sorted(os.listdir(tmp_path)) == ["c", "e", "f", "there"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_ends_the_work_in_the_background_is_raised(error, tmp_path):
    def progress(num_bytes, total_bytes):
        raise error

    handle = distckpt.async_save(
        {"v": whole("v", torch.ones(3))}, tmp_path / "c", progress=progress
    )
    with pytest.raises(error):
        handle.result(PATIENCE)
    assert os.listdir(tmp_path) == []
    distckpt.async_save({"v": 1}, tmp_path / "d").result(PATIENCE)


class OwnFormat(SaveShardedStrategy):
    """A strategy that knows nothing of staging."""

    backend, version = "own", 1

    def save(self, sharded_state_dict, checkpoint_dir):
        values = sorted(
            float(s.data.sum()) for s in sharded_state_dict.values() if isinstance(s, ShardedTensor)
        )
        Path(checkpoint_dir, "sums.txt").write_text(repr(values))


def test_a_strategy_that_cannot_stage_is_done_on_return(tmp_path, caplog):
    handle = distckpt.async_save(
        {"v": whole("v", torch.ones(3))}, tmp_path / "c", strategy=OwnFormat()
    )
    assert handle.done()
    assert handle.staged.is_set()
    assert handle.result().location == str(tmp_path / "c")
    assert (tmp_path / "c" / "sums.txt").read_text() == "[3.0]"
    assert "cannot stage data" in caplog.text


def test_an_object_store(gate):
    value = torch.arange(100.0)
    handle = distckpt.async_save(
        {"v": whole("v", value)}, "memory://async/c", progress=gate.progress
    )
    value.zero_()
    gate.open()
    handle.result(PATIENCE)
    loaded = distckpt.load({"v": whole("v", torch.zeros(100))}, "memory://async/c")
    assert loaded["v"].tolist() == list(range(100))
