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

from distckpt._format.codec import encode


def test_the_same_object_gives_the_same_bytes_in_every_process() -> None:
    program = (
        "import sys, hashlib\n"
        "from distckpt._format.codec import encode\n"
        "obj = {'b': {'x', 'y', ('z', 1), frozenset('abc')}, 'a': {f'k{i}' for i in range(50)}, "
        "3: b'q' * 999}\ndigest = hashlib.sha256(encode(obj)).hexdigest()\nprint(digest)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    here: dict[str, str] = {}
    exec(program, here)
    assert printed == f"{here['digest']}\n"


def test_reading_runs_no_code_and_imports_nothing(tmp_path: pathlib.Path) -> None:
    sample = {
        "t": torch.arange(6).view(2, 3),
        "n": np.array(["ab"]),
        "b": [b"x" * 300, 1j],
        "s": {1: ({2, 3}, range(3))},
    }
    (tmp_path / "blob").write_bytes(encode(sample))
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
