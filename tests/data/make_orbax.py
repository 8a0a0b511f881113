"""Makes `orbax_0_12.tar.xz` with real Orbax on CPUs:
`python -m tests.data.make_orbax NEW_FILE.tar.xz`.

Needs the packages `jax` and `orbax-checkpoint`, which no extra installs. `trees` returns what was
given to Orbax.
"""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import tarfile
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float8_e3m4",
    "float4_e2m1fn",
    "int4",
    "int2",
)
NUM_HOSTS = 2


def arrays(seed: int) -> dict[str, Any]:
    """Return a tree; with seed 0, an array is too large for the nodes of a database."""
    generator = np.random.default_rng(seed)
    num_rows = 16 if seed else 48
    return {
        "params": {
            "embed": generator.standard_normal((num_rows, 24)).astype(ml_dtypes.bfloat16),
            "layers": [generator.standard_normal((8, 6), dtype=np.float32) for _ in range(2)],
            "zeros": np.zeros((5, 7), np.float32),
            "count": np.array(3, np.int32),
        },
        "none": None,
        "empty": {},
        "of_ints": {1: np.arange(4, dtype=np.int16), 20: np.arange(5, dtype=np.uint8)},
    }


def values() -> dict[str, Any]:
    """Return leaves that are no arrays."""
    return {"step": 5, "rate": 0.25, "is_best": True, "list": [], "tuple": ()}


def dtypes() -> dict[str, Any]:
    """Return an array of each dtype."""
    numbers = np.random.default_rng(7).integers(0, 2, (3, 5))
    return {name: numbers.astype(np.dtype(name)) for name in DTYPES}


def leaves_of(tree: Any, path: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Return the arrays of a tree under the names of its leaves."""
    if isinstance(tree, np.ndarray):
        return {".".join(path): tree}
    children = enumerate(tree) if isinstance(tree, list) else getattr(tree, "items", list)()
    found = {}
    for key, child in children:
        found |= leaves_of(child, (*path, str(key)))
    return found


def sharded_arrays() -> dict[str, Any]:
    """Return arrays that the hosts have divided."""
    generator = np.random.default_rng(9)
    return {
        "both": generator.standard_normal((16, 20), dtype=np.float32),
        "columns": generator.standard_normal((3, 40), dtype=np.float32),
        "replica": generator.standard_normal((300,), dtype=np.float32),
    }


def save_on_hosts(rank: int, port: str, directory: str) -> None:
    """Save divided arrays on one of two hosts with two devices each."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from orbax.checkpoint import CheckpointManager, args

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", NUM_HOSTS, rank)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    specs = {"both": ("x", "y"), "columns": (None, ("x", "y")), "replica": ()}
    tree = {}
    for name, array in sharded_arrays().items():
        sharding = NamedSharding(mesh, PartitionSpec(*specs[name]))
        tree[name] = jax.make_array_from_callback(
            array.shape, sharding, lambda index, array=array: array[index]
        )
    with CheckpointManager(directory) as manager:
        manager.save(0, args=args.StandardSave(tree))
        manager.wait_until_finished()


def trees() -> dict[str, dict[str, Any]]:
    """Return the tree of each checkpoint, without leaves that are no arrays."""
    same = ("standard", "pytree", "zarr3", "plain", "plain_zarr3", "v1")
    found = {name: arrays(0) for name in same}
    found |= {"hosts/0": sharded_arrays(), "steps/3": arrays(3), "steps/20": arrays(20)}
    found |= {"items/0/params": arrays(1), "items/0/state": arrays(2)}
    for name in ("pytree", "zarr3"):
        found[f"dtypes_{name}"] = dtypes()
        found[f"chunks_{name}"] = {"x": np.arange(13 * 9, dtype=np.float32).reshape(13, 9)}
    ones = np.ones(3, np.float32)
    found["dotted"] = {"a.b": ones, "a": {"b": np.zeros(3, np.float32)}}
    found["odd_names"] = {"a/b": ones, "..": np.zeros(2, np.float32), "x" * 300: np.ones(1)}
    return found


def make(directory: pathlib.Path) -> None:
    """Make all checkpoints in a directory."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    hosts = []
    for rank in range(NUM_HOSTS):
        command = [sys.executable, "-m", "tests.data.make_orbax", "host", str(rank), port]
        hosts.append(subprocess.Popen([*command, str(directory / "hosts")]))
    assert not any(host.wait(120) for host in hosts)
    make_alone(directory)


def make_alone(directory: pathlib.Path) -> None:
    """Make the checkpoints of one host."""
    from orbax import checkpoint as orbax
    from orbax.checkpoint import v1

    args = orbax.args
    given = trees()
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "standard", {**given["standard"], **values()})
    with_text = {**values(), "text": "some text"}
    ways = {
        "pytree": {},
        "zarr3": {"use_zarr3": True},
        "plain": {"use_ocdbt": False},
        "plain_zarr3": {"use_ocdbt": False, "use_zarr3": True},
    }
    for name, way in ways.items():
        orbax.PyTreeCheckpointer(**way).save(directory / name, {**given[name], **with_text})
    for name in ("pytree", "zarr3"):
        checkpointer = orbax.PyTreeCheckpointer(**ways[name])
        checkpointer.save(directory / f"dtypes_{name}", given[f"dtypes_{name}"])
        save_args = {"x": orbax.SaveArgs(chunk_byte_size=64)}
        target = directory / f"chunks_{name}"
        checkpointer.save(target, given[f"chunks_{name}"], save_args=save_args)
    options = orbax.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with orbax.CheckpointManager(directory / "steps", options=options) as manager:
        for step in (3, 20):
            content = args.StandardSave(given[f"steps/{step}"])
            manager.save(step, args=content, metrics={"loss": step / 2})
            manager.wait_until_finished()
    params = args.StandardSave(given["items/0/params"])
    state = args.PyTreeSave(given["items/0/state"])
    with orbax.CheckpointManager(directory / "items") as manager:
        composite = args.Composite(params=params, state=state, extra=args.JsonSave({"seen": 7}))
        manager.save(0, args=composite)
        manager.wait_until_finished()
    v1.save(directory / "v1", {**given["v1"], **with_text})
    for name in ("dotted", "odd_names"):
        orbax.PyTreeCheckpointer().save(directory / name, given[name])


if __name__ == "__main__":
    if sys.argv[1] == "host":
        save_on_hosts(int(sys.argv[2]), *sys.argv[3:])
    else:
        with tempfile.TemporaryDirectory() as made:
            make(pathlib.Path(made))
            # One stream of all files: most are small, and like others.
            with tarfile.open(sys.argv[1], "x:xz", preset=9) as archive:
                for file in sorted(pathlib.Path(made).rglob("*")):
                    if file.is_file() and file.parent.name != "array_metadatas":
                        archive.add(file, file.relative_to(made))
