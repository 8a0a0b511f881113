"""Encoding and decoding of objects in other processes: the same bytes everywhere, and no code that
is run.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import torch
from safetensors.numpy import load_file

import distckpt
from distckpt import ShardedObject


def test_the_same_object_gives_the_same_bytes_in_every_process(tmp_path: pathlib.Path) -> None:
    program = (
        "import sys, distckpt\n"
        "obj = {'b': {'x', 'y', ('z', 1), frozenset('abc')}, 'a': {f'k{i}' for i in range(50)}, "
        "3: b'q' * 999}\n"
        "distckpt.save({'o': distckpt.ShardedObject('o', obj, (1,), (0,))}, sys.argv[1])\n"
    )
    blobs = []
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", program, str(tmp_path / seed)]
        subprocess.run(command, env=environment, check=True)
        blobs.append(stored_object(tmp_path / seed))
    assert blobs[0] == blobs[1]


def stored_object(path: pathlib.Path) -> bytes:
    """Return the object `o` as a checkpoint holds it."""
    return load_file(path / "objects/rank-00001.safetensors")["o/shard_0_1"].tobytes()


def test_reading_runs_no_code_and_imports_nothing(tmp_path: pathlib.Path) -> None:
    sample = {
        "t": torch.arange(6).view(2, 3),
        "n": np.array(["ab"]),
        "b": [b"x" * 300, 1j],
        "s": {1: ({2, 3}, range(3))},
    }
    distckpt.save({"o": ShardedObject("o", sample, (1,), (0,))}, tmp_path / "c")
    (tmp_path / "blob").write_bytes(stored_object(tmp_path / "c"))
    program = (
        "import pathlib, pickle, sys\n"
        "import torch\n"
        "from distckpt._format.codec import decode\n"
        "blob = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "class Stored: pass\n"
        "pickled = pickle.dumps(Stored())\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: seen.append(event))\n"
        "decode(blob)\n"
        "found = sorted({'pickle.find_class', 'import', 'exec', 'compile', 'open', "
        "'subprocess.Popen'} & set(seen))\nseen.clear()\npickle.loads(pickled)\nprint(found, "
        "'pickle.find_class' in seen)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "blob")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["[]", "True"]
