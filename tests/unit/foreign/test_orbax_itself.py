"""Trees that Orbax itself writes here; skipped where it is not installed."""

from __future__ import annotations

import fsspec
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch

import distckpt
from tests.data.make_orbax import DTYPES, leaves_of
from tests.support.llama_folder import write_llama
from tests.support.orbax_trees import check
from tests.support.read_counts import counted_reads

orbax = pytest.importorskip("orbax.checkpoint")
jax = pytest.importorskip("jax")

WAYS = [{}, {"use_zarr3": True}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}]


def random_tree(generator, depth=0):
    """A tree of dicts, lists and tuples with arrays of every kind, and other leaves."""
    tree = {}
    for number in range(int(generator.integers(1, 4))):
        key = generator.choice(["layer", "w", "mu", "7", "kernel_0"]) + str(number)
        kind = generator.integers(0, 6)
        if kind == 0 and depth < 3:
            tree[key] = random_tree(generator, depth + 1)
        elif kind == 1:
            tree[key] = [random_array(generator) for _ in range(int(generator.integers(0, 3)))]
        elif kind == 2:
            tree[key] = [None, {}, 3, 0.5, True][int(generator.integers(0, 5))]
        else:
            tree[key] = random_array(generator)
    tree["always"] = random_array(generator)
    return tree


def random_array(generator):
    """Any bits of a dtype, and any shape with up to 4 axes."""
    name = str(generator.choice(DTYPES))
    shape = tuple(generator.integers(1, 9, int(generator.integers(1, 5))).tolist())
    dtype = np.dtype(name)
    if "int" in name or name == "bool" or dtype.itemsize == 1:
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize("seed", range(40))
def test_random_trees_have_equal_bits(tmp_path, seed, memory):
    generator = np.random.default_rng(seed)
    tree = random_tree(generator)
    checkpointer = orbax.PyTreeCheckpointer(**WAYS[seed % 4])
    chunk_bytes = [None, 16][seed % 2]
    save_args = jax.tree.map(lambda _: orbax.SaveArgs(chunk_byte_size=chunk_bytes), tree)
    checkpointer.save(tmp_path / "saved", tree, save_args=save_args)
    check(distckpt.open(tmp_path / "saved").read_tensors(), tree)
    assert distckpt.verify(tmp_path / "saved").is_whole
    fsspec.filesystem("memory").put(f"{tmp_path}/saved", "/bucket/saved", recursive=True)
    check(distckpt.open(f"{memory}/saved").read_tensors(), tree)


def states():
    """States of models and optimizers, by name."""
    optax = pytest.importorskip("optax")
    nnx = pytest.importorskip("flax.nnx")
    linen = pytest.importorskip("flax.linen")
    key = jax.random.key(0)
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    variables = linen.Dense(5).init(key, np.ones((2, 4), np.float32))
    stacked = jax.vmap(lambda k: linen.Dense(4).init(k, np.ones((1, 4), np.float32)))(
        jax.random.split(key, 6)
    )
    return {
        "nnx": nnx.to_pure_dict(nnx.state(model)),
        "linen": variables,
        "adamw": optax.adamw(1e-3).init(variables),
        "chain": optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)).init(variables),
        "masked": optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.set_to_zero()},
            {"params": {"kernel": "a", "bias": "b"}},
        ).init(variables),
        "scan axis": {"params": stacked, "opt": optax.lion(1e-4).init(stacked)},
        "scalars": {"a": np.float32(2.5), "b": np.int64(7), "c": jax.numpy.bfloat16(1.5)},
        "old keys": {"rng": jax.random.PRNGKey(3)},
        "int keys": {0: np.ones(2), 10: {3: np.zeros(1)}},
        "empty": {"a": {}, "b": [], "c": (), "d": None, "w": np.ones(1)},
    }


def names_of_orbax(tree):
    """The arrays of a tree by the names that Orbax gives them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path]
        found[".".join(map(str, keys))] = np.asarray(leaf)
    return found


@pytest.mark.parametrize("way", range(4))
def test_states_have_equal_bits(tmp_path, way):
    for name, state in states().items():
        orbax.PyTreeCheckpointer(**WAYS[way]).save(tmp_path / name, state)
        opened = distckpt.open(tmp_path / name)
        expected = names_of_orbax(state)
        found = opened.read_tensors()
        if name != "scalars":
            check(found, expected)
            continue
        # Orbax says of numpy's scalars that they are numbers of Python.
        assert {**opened.common_state, "c": float(found["c"])} == {"a": 2.5, "b": 7, "c": 1.5}


def test_a_region_reads_the_chunks_that_it_touches(tmp_path):
    values = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    tree = {"w": values.astype(ml_dtypes.bfloat16), "other": values}
    save_args = dict.fromkeys(tree, orbax.SaveArgs(chunk_byte_size=1 << 20))
    orbax.PyTreeCheckpointer().save(tmp_path / "saved", tree, save_args=save_args)
    opened = distckpt.open(tmp_path / "saved")
    with counted_reads() as of_all:
        opened.read("w")
    with counted_reads() as counts:
        region = opened.read("w", (slice(100, 101),))
    assert torch.equal(region.float(), torch.tensor(tree["w"][100:101].astype(np.float32)))
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/saved/", "path": "w/"}
    chunk = tensorstore.open({"driver": "zarr", "kvstore": store}).result().chunk_layout.read_chunk
    share_of_row = chunk.shape[0] / 2048
    assert share_of_row <= 0.5
    assert of_all.num_bytes <= 1.1 * tree["w"].nbytes
    assert counts.num_bytes <= 1.1 * share_of_row * of_all.num_bytes


def test_the_leaf_names_are_those_of_orbax(tmp_path):
    tree = {"a": [np.ones(1), {"b": np.zeros(2)}]}
    orbax.PyTreeCheckpointer().save(tmp_path / "saved", tree)
    assert set(distckpt.open(tmp_path / "saved").tensors) == set(leaves_of(tree))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "lion"])
def test_a_training_state_of_maxtext_is_exported_without_that_of_optax(tmp_path, name):
    optax = pytest.importorskip("optax")
    weights = write_llama(tmp_path / "hf")
    family = tmp_path / "hf"
    distckpt.consolidate(family, tmp_path / "jax", layout="jax", family=family)
    params = {}
    for key, tensor in distckpt.open(tmp_path / "jax").read_tensors().items():
        inner = params
        *names, last = key.split(".")
        for part in names:
            inner = inner.setdefault(part, {})
        inner[last] = jax.numpy.asarray(tensor.numpy())
    state = getattr(optax, name)(1e-3).init(params)
    moments = jax.tree.map(lambda value: jax.numpy.full_like(value, 77), state)
    tree = {"params": params, "opt_state": moments, "step": jax.numpy.int32(5)}
    orbax.PyTreeCheckpointer().save(tmp_path / "step", tree)
    stored = distckpt.open(tmp_path / "step").tensors
    report = distckpt.consolidate(tmp_path / "step", tmp_path / "back", family=family)
    back = distckpt.open(tmp_path / "back").read_tensors()
    assert back.keys() == weights.keys()
    for key, value in weights.items():
        np.testing.assert_allclose(back[key].numpy(), value, rtol=2e-7)
    assert set(report.left_out) == {key for key in stored if not key.startswith("params.")}
