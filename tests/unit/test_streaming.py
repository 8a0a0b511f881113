from __future__ import annotations

import json
import math
import os
import weakref
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import distckpt
from distckpt import CheckpointExistsError, streaming
from distckpt.streaming import (
    TensorMeta,
    save_safetensors_streaming,
    save_safetensors_streaming_sharded,
)
from tests.support.reference import needs_dtypes, skip_where_safetensors_lacks

SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def meta_of(state):
    return [(name, tensor.dtype, tensor.shape) for name, tensor in state.items()]


def contents(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.resolve_conj().contiguous().flatten().view(torch.uint8).tolist(),
    )


def assert_holds(path, state):
    loaded = load_file(path)
    assert {name: contents(tensor) for name, tensor in loaded.items()} == {
        name: contents(tensor) for name, tensor in state.items()
    }


def header_metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def random_tensor(seed, dtype, shape):
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).reshape(shape)


def example():
    return {
        "layers.0.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "layers.0.bias": torch.arange(3.0),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 7),
        "flag": torch.tensor([True, False, True]),
        "steps": torch.arange(5),
        "ünï": torch.zeros(1, dtype=torch.uint8),
    }


ORDERS = {"as announced": list, "backwards": lambda items: list(items)[::-1], "sorted": sorted}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_file_holds_what_came_in_whatever_order(order, tmp_path):
    path, state = tmp_path / "model.safetensors", example()
    assert save_safetensors_streaming(iter(order(state.items())), path, meta_of(state)) == str(path)
    assert_holds(path, state)
    assert header_metadata(path) == {"format": "pt"}
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(("name", "torch_name"), SAFETENSORS_DTYPES.items())
def test_every_dtype_in_every_spelling(name, torch_name, tmp_path):
    if not hasattr(torch, torch_name):
        pytest.skip(f"torch {torch.__version__} has no {torch_name}")
    dtype = getattr(torch, torch_name)
    skip_where_safetensors_lacks(dtype)
    tensor = random_tensor(1, dtype, (3, 4))
    for spelling in (dtype, torch_name, f"torch.{torch_name}", name, name.lower()):
        path = tmp_path / "x.safetensors"
        save_safetensors_streaming([("t", tensor)], path, [("t", spelling, [3, 4])])
        assert_holds(path, {"t": tensor})
        assert streaming.DTYPE_TO_SAFETENSORS[spelling] == name
    assert streaming.DTYPE_ELEMENT_SIZE[name] == dtype.itemsize


@needs_dtypes("float4_e2m1fn_x2")
def test_packed_elements_are_counted_along_the_last_axis(tmp_path):
    skip_where_safetensors_lacks(torch.float4_e2m1fn_x2)
    tensor = random_tensor(1, torch.float4_e2m1fn_x2, (3, 4))
    path = tmp_path / "x.safetensors"
    save_safetensors_streaming([("t", tensor)], path, [("t", "F4", (3, 4))])
    with safe_open(path, framework="pt") as file:
        assert file.get_slice("t").get_dtype() == "F4"
        assert file.get_slice("t").get_shape() == [3, 8]
    assert path.read_bytes()[-12:] == bytes(tensor.view(torch.uint8).flatten().tolist())


def test_items_stand_aligned_even_when_announced_otherwise(tmp_path):
    path = tmp_path / "x.safetensors"
    mixed = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(1),
    }
    for state in (mixed, example()):
        save_safetensors_streaming(state.items(), path, meta_of(state))
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name, tensor in state.items():
            assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def strange_tensors():
    base = torch.arange(24.0).reshape(4, 6)
    strided_bytes = random_tensor(1, torch.uint8, (4, 6))[:, ::2]
    return {
        "transposed": base.T,
        "sliced": base[:, 1::2],
        "expanded": torch.arange(3).expand(5, 3),
        "conjugate": torch.complex(base, -base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "parameter": torch.nn.Parameter(base),
        "strided fp8": base.to(torch.float8_e5m2)[::2, ::3],
        **(
            {"strided e8m0": strided_bytes.view(torch.float8_e8m0fnu)}
            if hasattr(torch, "float8_e8m0fnu")
            else {}
        ),
        "large and strided": torch.arange(3 << 20).reshape(3, 1 << 20).T,
        "large rows": torch.arange(5 << 20, dtype=torch.int32)
        .reshape(2, 5, 1 << 19)
        .transpose(0, 1),
        "one element of many": torch.arange(5.0)[::4][:1].reshape(1, 1),
    }


@pytest.mark.parametrize("name", strange_tensors())
def test_any_strides_and_lazy_views(name, tmp_path):
    tensor = strange_tensors()[name]
    skip_where_safetensors_lacks(tensor.dtype)
    path = tmp_path / "x.safetensors"
    save_safetensors_streaming([("t", tensor)], path, [("t", tensor.dtype, tensor.shape)])
    loaded = load_file(path)["t"]
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    if loaded.element_size() == 1:
        loaded, tensor = loaded.view(torch.uint8), tensor.view(torch.uint8)
    assert torch.equal(loaded, tensor.detach())


def test_one_tensor_at_a_time(tmp_path):
    alive = []

    def tensors():
        for name, _, shape in meta:
            assert [reference() for reference in alive] == [None] * len(alive)
            tensor = torch.ones(shape)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    meta = [(f"t{i}", torch.float32, (4, 4)) for i in range(5)]
    save_safetensors_streaming(tensors(), tmp_path / "one.safetensors", meta)
    save_safetensors_streaming_sharded(tensors(), tmp_path / "many", meta, max_file_bytes=64)
    assert len(alive) == 10


def test_without_rename_the_complete_file_stays_beside_the_destination(tmp_path):
    path, state = tmp_path / "model.safetensors", example()
    path.write_bytes(b"earlier")
    Path(f"{path}.tmp").write_bytes(b"left by a call that was killed")
    for _ in range(2):
        assert (
            save_safetensors_streaming(state.items(), path, meta_of(state), rename=False)
            == f"{path}.tmp"
        )
    assert path.read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.tmp"]
    os.replace(f"{path}.tmp", path)
    assert_holds(path, state)


def test_metadata_stands_beside_the_format(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors_streaming([], path, [], metadata={"step": "10", "ü": '"'})
    assert header_metadata(path) == {"format": "pt", "step": "10", "ü": '"'}
    assert load_file(path) == {}


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = example()
    assert (
        save_safetensors_streaming(state.items(), "x.safetensors", meta_of(state))
        == "x.safetensors"
    )
    paths = save_safetensors_streaming_sharded(state.items(), "out/inner", meta_of(state))
    assert paths == ["out/inner/model.safetensors"]
    for path in ("x.safetensors", *paths):
        assert_holds(path, state)


W = torch.ones(2, 3)
META = [("w", torch.float32, (2, 3)), ("b", "BF16", [3]), ("layers.1.c", torch.float32, ())]
B, C = torch.zeros(3, dtype=torch.bfloat16), torch.tensor(1.0)


def interrupted():
    yield "w", W
    raise InterruptedError("no more")


WRONG_STREAMS = {
    "missing": (
        [("w", W)],
        ValueError,
        r"2 of 3 announced tensors were not written: 'b', 'layers.1.c'",
    ),
    "nothing": ([], ValueError, "3 of 3 announced"),
    "twice": ([("w", W), ("w", W)], ValueError, "'w' came twice"),
    "not announced": (
        [("w", W), ("layers.2.c", C)],
        ValueError,
        r"'layers.2.c' came but .* mean 'layers.1.c'",
    ),
    "one too many": (
        [("w", W), ("b", B), ("layers.1.c", C), ("d", C)],
        ValueError,
        "'d' came but was not",
    ),
    "dtype": (
        [("w", W.double())],
        ValueError,
        r"'w' came as F64 \(2, 3\), but was announced as F32 \(2, 3\)",
    ),
    "unknown dtype": ([("w", W.to(torch.complex128))], ValueError, "'w' came as torch.complex128"),
    "shape": (
        [("w", W.T)],
        ValueError,
        r"'w' came as F32 \(3, 2\), but was announced as F32 \(2, 3\)",
    ),
    "number of axes": ([("layers.1.c", C[None])], ValueError, r"'layers.1.c' came as F32 \(1,\)"),
    "sparse": ([("w", W.to_sparse())], ValueError, "'w' .* not dense"),
    "meta": ([("w", W.to("meta"))], ValueError, "'w' .* not dense"),
    "no tensor": ([("w", W.numpy())], ValueError, "'w' came as a ndarray"),
    "the iterator fails": (interrupted(), InterruptedError, "no more"),
}


def streams():
    # The generator can be used once only.
    return [pytest.param(name, id=name) for name in WRONG_STREAMS]


def wrong_stream(name):
    return interrupted() if name == "the iterator fails" else iter(WRONG_STREAMS[name][0])


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("rename", [True, False])
def test_what_was_not_announced_leaves_nothing(name, rename, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"earlier")
    with pytest.raises(WRONG_STREAMS[name][1], match=WRONG_STREAMS[name][2]):
        save_safetensors_streaming(wrong_stream(name), path, META, rename=rename)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == b"earlier"


WRONG_METAS = {
    "complex128": ([("w", torch.complex128, (2,))], "'w' is announced as torch.complex128"),
    "unknown": ([("w", "float13", (2,))], "'w' is announced with an unknown dtype: .*'float13'"),
    "negative": ([("w", "F32", (2, -1))], r"'w' is announced with the shape \(2, -1\)"),
    "twice": ([("w", "F32", (2,)), ("w", "F32", (2,))], "'w' is announced twice"),
    "reserved": ([("__metadata__", "F32", (2,))], "'__metadata__' is announced under a name"),
    "no text": ([("\ud800", "F32", (2,))], "announced under a name"),
}


@pytest.mark.parametrize(("meta", "text"), WRONG_METAS.values(), ids=WRONG_METAS)
def test_a_wrong_announcement_is_refused_before_anything_is_written(meta, text, tmp_path):
    asked = []

    def tensors():
        asked.append(1)
        yield from ()

    for save in (save_safetensors_streaming, save_safetensors_streaming_sharded):
        with pytest.raises(ValueError, match=text):
            save(tensors(), tmp_path / "x", meta)
        with pytest.raises(ValueError, match="metadata holds texts only, 'step'"):
            save(tensors(), tmp_path / "x", [], metadata={"step": 10})
    assert asked == os.listdir(tmp_path) == []


def test_a_directory_in_the_way_is_found_before_the_first_tensor(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointExistsError, match="x"):
        save_safetensors_streaming(interrupted(), tmp_path / "x", META)
    (tmp_path / "file").write_bytes(b"earlier")
    with pytest.raises(CheckpointExistsError, match="file"):
        save_safetensors_streaming_sharded(interrupted(), tmp_path / "file", META)
    assert sorted(os.listdir(tmp_path)) == ["file", "x"]


def test_a_full_disk_is_found_before_the_first_tensor(tmp_path):
    meta = [("w", torch.uint8, (1 << 60,))]
    for save in (save_safetensors_streaming, save_safetensors_streaming_sharded):
        with pytest.raises(OSError, match=str(tmp_path / ".out")) as raised:
            save(interrupted(), tmp_path / "out", meta)
        assert not isinstance(raised.value, InterruptedError)
    assert os.listdir(tmp_path) == []


# --- many files -----------------------------------------------------------------------------------


def model(num_layers=12):
    state = {"model.embed_tokens.weight": torch.arange(20, dtype=torch.bfloat16).reshape(10, 2)}
    for layer in range(num_layers):
        state[f"model.layers.{layer}.w"] = torch.full((4, 2), float(layer), dtype=torch.bfloat16)
    state["model.norm.weight"] = torch.ones(1)
    return state


def assert_exported(directory, state, num_files, others=()):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    assert sorted(os.listdir(directory)) == sorted(
        [*files, "model.safetensors.index.json", *others]
    )
    loaded = {}
    for file in files:
        found = load_file(directory / file)
        assert {index["weight_map"][key] for key in found} == {file}
        assert header_metadata(directory / file)["format"] == "pt"
        loaded |= found
    assert {key: contents(tensor) for key, tensor in loaded.items()} == {
        k: contents(t) for k, t in state.items()
    }
    assert index["metadata"] == {
        "total_size": sum(tensor.nbytes for tensor in state.values()),
        "total_parameters": sum(tensor.numel() for tensor in state.values()),
    }


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_next_file_begins_where_one_is_full(order, tmp_path):
    state = model()
    target = tmp_path / "new" / "out"
    paths = save_safetensors_streaming_sharded(
        iter(order(state.items())),
        target,
        iter(meta_of(state)),
        max_file_bytes=48,
        metadata={"step": "3"},
    )
    assert_exported(target, state, 6)
    assert paths == [str(target / f"model-{i:05d}-of-00006.safetensors") for i in range(1, 7)]
    assert header_metadata(paths[0]) == {"format": "pt", "step": "3"}
    assert list(load_file(paths[0])) == ["model.embed_tokens.weight"]
    assert os.listdir(tmp_path / "new") == ["out"]
    # Our own reader takes it, too.
    blank = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    sharded = {
        key: distckpt.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in blank.items()
    }
    loaded = distckpt.load(sharded, str(target))
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_more_files_than_may_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    state = {f"t{i}": torch.full((3,), i) for i in range(150)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        save_safetensors_streaming_sharded(
            state.items(), tmp_path / "out", meta_of(state), max_file_bytes=1
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_exported(tmp_path / "out", state, 150)


def test_what_fits_one_file_needs_no_index(tmp_path):
    state = model()
    save_safetensors_streaming_sharded(state.items(), tmp_path / "out", meta_of(state))
    save_safetensors_streaming_sharded([], tmp_path / "empty", [])
    assert_holds(tmp_path / "out" / "model.safetensors", state)
    assert_holds(tmp_path / "empty" / "model.safetensors", {})
    assert os.listdir(tmp_path / "out") == os.listdir(tmp_path / "empty") == ["model.safetensors"]


OTHERS = ["config.json", "adapter_model.safetensors", "tokenizer"]


def test_an_earlier_export_is_replaced_and_other_files_stay(tmp_path):
    target = tmp_path / "out"
    (target / "tokenizer").mkdir(parents=True)
    (target / "tokenizer" / "vocab.txt").write_text("a")
    (target / "config.json").write_text("{}")
    (target / "adapter_model.safetensors").write_bytes(b"mine")
    for num_layers, limit, num_files in ((12, 16, 14), (3, 48, 3)):
        state = model(num_layers)
        save_safetensors_streaming_sharded(
            state.items(), target, meta_of(state), max_file_bytes=limit
        )
        assert_exported(target, state, num_files, OTHERS)
    save_safetensors_streaming_sharded(state.items(), target, meta_of(state))
    assert sorted(os.listdir(target)) == sorted(["model.safetensors", *OTHERS])
    assert (target / "tokenizer" / "vocab.txt").read_text() == "a"
    assert (target / "adapter_model.safetensors").read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", streams())
def test_an_earlier_export_stays_whole_when_the_stream_is_wrong(name, tmp_path):
    state = model()
    save_safetensors_streaming_sharded(
        state.items(), tmp_path / "out", meta_of(state), max_file_bytes=48
    )
    for target in ("out", "new"):
        with pytest.raises(WRONG_STREAMS[name][1], match=WRONG_STREAMS[name][2]):
            save_safetensors_streaming_sharded(
                wrong_stream(name), tmp_path / target, META, max_file_bytes=10
            )
    assert os.listdir(tmp_path) == ["out"]
    assert_exported(tmp_path / "out", state, 6)


def test_a_limit_that_is_not_positive_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_file_bytes is the size of a file"):
        save_safetensors_streaming_sharded(interrupted(), tmp_path / "out", META, max_file_bytes=0)
    with pytest.raises(TypeError, match=r"max_file_bytes is a number of bytes, .*got '5GB'"):
        save_safetensors_streaming_sharded(
            interrupted(), tmp_path / "out", META, max_file_bytes="5GB"
        )


# --- object stores --------------------------------------------------------------------------------


@pytest.fixture
def store(request):
    """An empty place in an object store, and what lies there."""
    prefix = f"memory://{request.node.name}"
    fs, path = fsspec.core.url_to_fs(prefix)

    def found():
        return {name.rpartition("/")[2]: fs.cat_file(name) for name in fs.find(path)}

    yield prefix, found
    if fs.exists(path):
        fs.rm(path, recursive=True)


def test_object_stores_take_tensors_in_the_order_of_the_announcement(store, tmp_path):
    url, found = store
    state = model()
    assert (
        save_safetensors_streaming(state.items(), f"{url}/x.safetensors", meta_of(state))
        == f"{url}/x.safetensors"
    )
    paths = save_safetensors_streaming_sharded(
        state.items(), f"{url}/out/", meta_of(state), max_file_bytes=48
    )
    assert paths[0] == f"{url}/out/model-00001-of-00006.safetensors"
    for name, content in found().items():
        (tmp_path / name).write_bytes(content)
    assert_holds(tmp_path / "x.safetensors", state)
    (tmp_path / "x.safetensors").unlink()
    assert_exported(tmp_path, state, 6)


def test_object_stores_take_no_other_order(store):
    url, found = store
    state = model()
    backwards = list(state.items())[::-1]
    with pytest.raises(
        ValueError,
        match=r"'model.norm.weight' came where 'model.embed_tokens.weight' has its place",
    ):
        save_safetensors_streaming(backwards, f"{url}/x.safetensors", meta_of(state))
    swapped = list(state.items())
    swapped[3:5] = swapped[4:2:-1]
    with pytest.raises(ValueError, match="has its place"):
        save_safetensors_streaming_sharded(swapped, f"{url}/out", meta_of(state), max_file_bytes=48)
    assert found() == {}


@pytest.mark.parametrize("name", streams())
def test_nothing_stays_in_an_object_store_when_the_stream_is_wrong(name, store):
    url, found = store
    kind = WRONG_STREAMS[name][1]
    with pytest.raises(kind):
        save_safetensors_streaming(wrong_stream(name), f"{url}/x.safetensors", META)
    with pytest.raises(kind):
        save_safetensors_streaming_sharded(
            wrong_stream(name), f"{url}/out", META, max_file_bytes=10
        )
    assert found() == {}


def test_object_stores_have_no_overwrite_and_no_rename(store):
    url, found = store
    state = model()
    save_safetensors_streaming(state.items(), f"{url}/out/model.safetensors", meta_of(state))
    before = found()
    with pytest.raises(CheckpointExistsError, match=r"out/model\.safetensors"):
        save_safetensors_streaming(interrupted(), f"{url}/out/model.safetensors", META)
    with pytest.raises(CheckpointExistsError, match=r"out/model\.safetensors"):
        save_safetensors_streaming_sharded(interrupted(), f"{url}/out", META)
    with pytest.raises(ValueError, match="rename=False"):
        save_safetensors_streaming(interrupted(), f"{url}/y.safetensors", META, rename=False)
    assert found() == before


@needs_dtypes("float4_e2m1fn_x2")
def test_packed_elements_need_an_axis(tmp_path):
    """The reference library refuses it as well."""
    tensor = torch.tensor(7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError, match=r"'w' is announced as .* without axes"):
        save_safetensors_streaming([("w", tensor)], tmp_path / "x", [("w", "F4", ())])
    assert os.listdir(tmp_path) == []


def test_tensor_meta_is_a_named_tuple():
    name, dtype, shape = TensorMeta("w", "BF16", (2, 3))
    assert (name, dtype, shape) == ("w", "BF16", (2, 3))
    assert TensorMeta("w", "BF16", (2, 3)).num_bytes == 12
