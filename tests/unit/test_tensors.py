from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from distckpt.tensors import (
    apply_gather_functions,
    as_torch_dtype,
    broadcast_tensor,
    chunk_tensor_by_memory,
    estimate_array_nbytes,
    estimate_available_memory,
    flatten_for_broadcast,
    is_gcs_path,
    parse_gcs_path,
    read_process_array,
    reshard,
    to_host,
    unflatten_from_broadcast,
)

KIB = 1024


def write_tree(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def available(tmp_path, files):
    write_tree(tmp_path, files)
    return estimate_available_memory(proc=str(tmp_path / "proc"), cgroups=str(tmp_path / "cg"))


MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemFree: 100 kB\nMemAvailable:   3000 kB\n"}
V2 = MEMINFO | {"proc/self/cgroup": "0::/job/step\n"}
V1 = MEMINFO | {"proc/self/cgroup": "9:cpu,cpuacct:/other\n4:memory:/job/step\n0::/\n"}


def group(path, limit, usage, cache=0, *, v1=False):
    names = (
        ["memory.limit_in_bytes", "memory.usage_in_bytes"]
        if v1
        else ["memory.max", "memory.current"]
    )
    stat = f"anon 5\n{'total_' if v1 else ''}inactive_file {cache}\n"
    return {
        f"cg/{path}/{names[0]}": f"{limit}\n",
        f"cg/{path}/{names[1]}": f"{usage}\n",
        f"cg/{path}/memory.stat": stat,
    }


UNLIMITED_V1 = 9223372036854771712
AVAILABLE_MEMORY = {
    "machine alone": (MEMINFO, 3000 * KIB),
    "v2 limit": (V2 | group("job/step", 900, 300), 600),
    "v2 without limit": (V2 | group("job/step", "max", 300), 3000 * KIB),
    "v2 limit of the parent": (V2 | group("job/step", "max", 300) | group("job", 800, 700), 100),
    "v2 tightest of both": (V2 | group("job/step", 400, 390) | group("job", 800, 700), 10),
    "v2 file cache can be dropped": (V2 | group("job/step", 900, 800, cache=500), 600),
    "v2 container that is its own root": (V2 | group("", 500, 100), 400),
    "v2 beside v1": (V2 | group("unified/job/step", 900, 300), 600),
    "v1 limit": (V1 | group("memory/job/step", 900, 300, cache=50, v1=True), 650),
    "v1 container that is its own root": (V1 | group("memory", 900, 300, v1=True), 600),
    "v1 without limit": (V1 | group("memory/job/step", UNLIMITED_V1, 300, v1=True), 3000 * KIB),
    "above its limit": (V2 | group("job/step", 900, 1000), 0),
}


@pytest.mark.parametrize(("files", "expected"), AVAILABLE_MEMORY.values(), ids=AVAILABLE_MEMORY)
def test_available_memory_is_what_machine_and_limits_leave(files, expected, tmp_path):
    assert available(tmp_path, files) == expected


def test_available_memory_of_this_machine():
    psutil = pytest.importorskip("psutil")
    assert 0 < estimate_available_memory() <= psutil.virtual_memory().total


def test_available_memory_without_proc(tmp_path):
    assert available(tmp_path, {}) > 1 << 20


def test_size_of_arrays():
    for tensor in (
        torch.zeros(3, 5, dtype=torch.int16),
        torch.zeros(()),
        torch.zeros(0, 4),
        torch.zeros(2).to("meta"),
    ):
        assert estimate_array_nbytes(tensor) == tensor.nbytes
    assert estimate_array_nbytes(torch.zeros(4).expand(3, 4)) == 48
    assert estimate_array_nbytes(np.zeros((3, 5), np.complex128)) == 240
    for dtype in (
        torch.bfloat16,
        "bfloat16",
        "torch.bfloat16",
        "BF16",
        np.dtype(np.float16),
        np.float16,
    ):
        assert estimate_array_nbytes(SimpleNamespace(shape=(3, 5), dtype=dtype)) == 30
    with pytest.raises(TypeError, match="list"):
        estimate_array_nbytes([1, 2])


def test_dtypes_by_name():
    assert as_torch_dtype("F8_E4M3") is as_torch_dtype("float8_e4m3fn") is torch.float8_e4m3fn
    assert as_torch_dtype(np.int64) is torch.int64
    for name in ("float13", "Tensor", "nn", ""):
        with pytest.raises(ValueError, match="has no dtype"):
            as_torch_dtype(name)


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64]


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 30),
    st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
)
def test_chunks_are_views_within_the_limit_in_flattened_order(shape, dtype, extra, kind):
    tensor = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    if kind == "transposed":
        tensor = tensor.permute(tuple(reversed(range(len(shape)))))
    elif kind == "sliced" and shape:
        tensor = tensor[..., ::2]
    elif kind == "expanded":
        tensor = tensor.expand(2, *shape)
    limit = dtype.itemsize + extra
    chunks = chunk_tensor_by_memory(tensor, limit)
    assert all(chunk.nbytes <= limit and chunk.ndim == tensor.ndim for chunk in chunks)
    assert all(
        chunk.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        for chunk in chunks
    )
    assert torch.equal(torch.cat([chunk.flatten() for chunk in chunks]), tensor.flatten())


def test_chunks_are_as_large_as_rows_allow():
    tensor = torch.zeros(10, 4)
    assert [tuple(chunk.shape) for chunk in chunk_tensor_by_memory(tensor, 50)] == [(3, 4)] * 3 + [
        (1, 4)
    ]
    assert [tuple(chunk.shape) for chunk in chunk_tensor_by_memory(tensor[:1], 12)] == [
        (1, 3),
        (1, 1),
    ]
    assert chunk_tensor_by_memory(tensor, 160)[0] is tensor


@pytest.mark.parametrize("limit", [-1, 0, 3])
def test_a_limit_below_one_element_is_refused(limit):
    for tensor in (torch.zeros(4), torch.zeros(()), torch.zeros(0)):
        with pytest.raises(ValueError, match=f"limit of {limit} bytes"):
            chunk_tensor_by_memory(tensor, limit)


UNTOUCHED = [
    torch.tensor([300]),
    torch.tensor([True]),
    torch.tensor([1j]),
    torch.tensor([1.5]).to(torch.float8_e4m3fn),
]


@pytest.mark.parametrize("float_dtype", [torch.bfloat16, "bfloat16", "BF16"])
def test_to_host_casts_floats_only(float_dtype):
    source = torch.tensor([1.0, 2.5], requires_grad=True)
    host = to_host(source, float_dtype)
    assert host.dtype == torch.bfloat16
    assert host.tolist() == [1.0, 2.5]
    assert not host.requires_grad
    for tensor in UNTOUCHED:
        assert to_host(tensor, float_dtype).dtype == tensor.dtype


def test_to_host_without_anything_to_do_copies_nothing():
    tensor = torch.arange(3.0)
    assert to_host(tensor).data_ptr() == tensor.data_ptr()
    assert to_host(tensor, np.dtype(np.float64), cpu_offload=False).dtype == torch.float64
    with pytest.raises(ValueError, match="int32"):
        to_host(tensor, torch.int32)


def test_to_host_casts_before_it_moves():
    moved = []

    class OnDevice(torch.Tensor):
        def cpu(self):
            moved.append(self.dtype)
            return super().cpu()

    to_host(torch.zeros(3).as_subclass(OnDevice), torch.bfloat16)
    assert moved == [torch.bfloat16]


def test_reading_places_then_calls_back_then_casts(tmp_path):
    stored = {"w": torch.arange(6.0).reshape(2, 3), "step": torch.tensor([3])}
    save_file(stored, tmp_path / "x.safetensors")
    seen = []

    def place(tensor):
        seen.append("place")
        return tensor[1:]

    def callback(tensor, key):
        seen.append((key, tuple(tensor.shape), tensor.dtype))
        return tensor * 2

    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        for source in (stored, file):
            key, tensor, num_mismatches = read_process_array(
                "w", {"w": place}, False, source, callback, torch.bfloat16
            )
            assert (key, num_mismatches, tensor.dtype, tensor.tolist()) == (
                "w",
                0,
                torch.bfloat16,
                [[6, 8, 10]],
            )
        assert seen == ["place", ("w", (1, 3), torch.float32)] * 2
        assert (
            read_process_array("step", None, False, file, dtype="bfloat16")[1].dtype == torch.int64
        )


@pytest.mark.parametrize("shard_fns", [{}, {"w": None}, {"weight": lambda tensor: tensor}])
def test_reading_counts_tensors_without_a_function_or_refuses_them(shard_fns):
    source = {"w": torch.arange(3.0)}
    key, tensor, num_mismatches = read_process_array("w", shard_fns, True, source)
    assert (key, num_mismatches) == ("w", 1)
    assert torch.equal(tensor, source["w"])
    with pytest.raises(ValueError, match="no function for 'w'"):
        read_process_array("w", shard_fns, False, source)


def test_reshard_leaves_a_plain_tensor_or_refuses_it():
    tensor = torch.zeros(2, 3)
    assert reshard(tensor, None) is tensor
    with pytest.raises(TypeError, match=r"give \(mesh, placements\)"):
        reshard(tensor, ["Shard(0)"])


NESTED = {"b": {"x": 1, "empty": {}, 0: [2, {"y": (3, 4)}, []]}, "a.c": None, ("t",): 5}


def test_flatten_and_back():
    flat = flatten_for_broadcast(NESTED)
    assert flat == {
        ("b", "x"): 1,
        ("b", 0, 0): 2,
        ("b", 0, 1, "y"): (3, 4),
        ("a.c",): None,
        (("t",),): 5,
    }
    assert next(iter(flat)) == ("b", "x")
    back = unflatten_from_broadcast(
        {position: str(leaf) for position, leaf in flat.items()}, NESTED
    )
    assert back == {
        "b": {"x": "1", "empty": {}, 0: ["2", {"y": "(3, 4)"}, []]},
        "a.c": "None",
        ("t",): "5",
    }
    assert unflatten_from_broadcast(flat, NESTED) == NESTED
    assert unflatten_from_broadcast(flat, NESTED)["b"] is not NESTED["b"]


def test_unflatten_refuses_other_leaves():
    flat = flatten_for_broadcast(NESTED)
    flat[("b", "z")] = flat.pop(("b", "x"))
    with pytest.raises(ValueError, match=r"lacking 'b.x', unexpected 'b.z'"):
        unflatten_from_broadcast(flat, NESTED)


class Sharded:
    """What a DTensor looks like."""

    def __init__(self, tensor):
        self.tensor = tensor

    def full_tensor(self):
        return self.tensor


def test_gathering_everything_or_nothing():
    sharded, plain = Sharded(torch.ones(2)), torch.zeros(2)
    state = {"m": {"w": sharded, "b": plain}, "steps": [sharded, 5]}
    gathered = apply_gather_functions(state, True, False, False)
    assert gathered == {"m": {"w": sharded.tensor, "b": plain}, "steps": [sharded.tensor, 5]}
    assert state["m"]["w"] is sharded
    assert apply_gather_functions(state, False, False, False) == state


def test_gather_functions_are_applied_where_they_stand(caplog):
    state = {"m": {"w": torch.ones(2), "b": 7}}
    functions = {"m": {"w": lambda tensor: tensor + 1, "b": None}}
    by_position = {("m", "w"): functions["m"]["w"]}
    with caplog.at_level("INFO", logger="distckpt"):
        for given_functions in (functions, by_position):
            gathered = apply_gather_functions(state, given_functions, True, True)
            assert gathered["m"]["w"].tolist() == [2, 2]
            assert gathered["m"]["b"] == 7
            with pytest.raises(ValueError, match=r"lacking 'm.b'"):
                apply_gather_functions(state, given_functions, False, False)
    assert caplog.messages == ["gathered 1 of 2 leaves"] * 2
    extra = {"m": {"w": functions["m"]["w"], "b": str, "c": str}}
    assert apply_gather_functions(state, extra, True, False)["m"]["b"] == "7"
    with pytest.raises(ValueError, match=r"unexpected 'm.c'"):
        apply_gather_functions(state, extra, False, False)


def test_broadcast_without_other_ranks():
    tensor = torch.arange(5.0)
    assert broadcast_tensor(tensor, 8) is tensor
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="limit of 3 bytes"):
        broadcast_tensor(tensor, 3)
    with pytest.raises(ValueError, match="src is 1"):
        broadcast_tensor(tensor, 8, src=1)


def test_google_cloud_paths():
    assert is_gcs_path("gs://bucket/run/x")
    assert parse_gcs_path("gs://bucket/run/step_10/x.safetensors") == (
        "bucket",
        "run/step_10/x.safetensors",
    )
    for path in ("/gs://bucket/x", "s3://bucket/x", "bucket/x", ""):
        assert not is_gcs_path(path)
    for path in ("s3://bucket/x", "bucket/x", "gs://", "gs:///x", "gs://bucket", "gs://bucket/"):
        with pytest.raises(ValueError, match="gs://bucket/blob"):
            parse_gcs_path(path)
