"""What one call of distckpt goes through; `structure.py` runs this with a checkout on the path.

    python benchmarks/structure_calls.py calls
    python benchmarks/structure_calls.py modules VERB FOLDER

A verb is save, load, consolidate or verify. It prints JSON, and makes only calls that every version
of distckpt has.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import distckpt

NUM_VALUES = 1 << 20
"""Of the tensor whose reading is looked at: enough that threads read it."""
PACKAGE = f"{Path(distckpt.__file__).parent}/"
READS = {"preadv", "pread", "read", "readinto"}
SETTLE_SECONDS = 0.05
NUM_LOOKS = 3

Profile = Callable[[FrameType, str, Any], None]
MakeState = Callable[[], dict[str, Any]]


def main() -> None:
    """Print the figures that the command line asks for."""
    _, kind, *words = sys.argv
    figures = figures_of_calls() if kind == "calls" else figures_of_verb(*words)
    print(json.dumps(figures))


def figures_of_verb(verb: str, folder: str) -> dict[str, int]:
    """Return the modules that one call imports, and its parameters; a folder has the checkpoint."""
    function = getattr(distckpt, verb)
    path = f"{folder}/checkpoint"
    if verb == "consolidate":
        function(path, f"{folder}/consolidated")
    elif verb == "verify":
        function(path)
    else:
        function(sharded_state(), path)
    return {
        f"modules imported by {verb}": num_own_modules(),
        f"parameters of {verb}": len(inspect.signature(function).parameters),
    }


def num_own_modules() -> int:
    """Count the modules of distckpt that are imported, without the package itself."""
    return sum(name.startswith("distckpt.") for name in sys.modules)


def figures_of_calls() -> dict[str, int]:
    """Return what saves and loads of one tensor go through."""
    with tempfile.TemporaryDirectory() as folder:
        distckpt.save(sharded_state(), f"{folder}/first")
        num_modules = num_own_modules()
        caller_frames, reader_frames = frames_of_load(f"{folder}/frames")
        return {
            "modules imported by save": num_modules,
            **files_of_calls("a plain tensor", plain_state, f"{folder}/plain"),
            **files_of_calls("a ShardedTensor", sharded_state, f"{folder}/sharded"),
            "load: frames to where it waits or reads": caller_frames,
            "load: frames of the thread that reads": reader_frames,
        }


def plain_state() -> dict[str, Any]:
    """Make a state dict of one tensor, which is saved in common state."""
    return {"weight": torch.ones(4)}


def sharded_state(num_values: int = 4) -> dict[str, Any]:
    """Make a state dict of one tensor that is a shard."""
    tensor = torch.ones(num_values)
    return {"weight": distckpt.ShardedTensor.from_rank_offsets("weight", tensor)}


# --- Files ----------------------------------------------------------------------------------------


def files_of_calls(kind: str, make_state: MakeState, path: str) -> dict[str, int]:
    """Return what a save and a load go through when there were others before them."""
    distckpt.save(make_state(), f"{path}_before")
    distckpt.load(make_state(), f"{path}_before")
    state, target = make_state(), make_state()
    save = files_of(lambda: distckpt.save(state, path))
    load = files_of(lambda: distckpt.load(target, path))
    figures = {}
    for verb, threads in (("save", save), ("load", load)):
        changes = [a != b for files in threads for a, b in pairwise(files)]
        figures[f"{verb} of {kind}: files"] = len(set().union(*threads))
        figures[f"{verb} of {kind}: changes of file"] = sum(changes)
    return figures


def files_of(call: Callable[[], object]) -> list[list[str]]:
    """Return the files whose functions are called, in order, per thread."""
    called: dict[int, list[str]] = defaultdict(list)

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_own(frame):
            called[threading.get_ident()].append(frame.f_code.co_filename)

    with _profiled(record):
        call()
    return list(called.values())


# --- Frames ---------------------------------------------------------------------------------------


def frames_of_load(path: str) -> tuple[int, int]:
    """Return how many functions of distckpt are under way in a load where it reads at its deepest.

    Returns:
        Those of the thread that called `load`, and those of the thread that reads: none when it
        is the same one.
    """
    distckpt.save(sharded_state(NUM_VALUES), path)
    caller = threading.get_ident()
    depths = []

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or not _is_own(frame) or argument.__name__ not in READS:
            return
        if threading.get_ident() == caller:
            depths.append((_depth(frame), 0))
            return
        # Meanwhile the caller comes to where it waits for this thread; from there it only looks
        # now and then for signals.
        waiting = []
        for _ in range(NUM_LOOKS):
            time.sleep(SETTLE_SECONDS)
            waiting.append(_depth(sys._current_frames()[caller]))
        depths.append((min(waiting), _depth(frame)))

    with _profiled(record):
        distckpt.load(sharded_state(NUM_VALUES), path)
    assert depths, f"the load called none of {', '.join(READS)}"
    return max(depths, key=sum)


@contextmanager
def _profiled(profile: Profile) -> Iterator[None]:
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth += _is_own(frame)
        frame = frame.f_back
    return depth


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


if __name__ == "__main__":
    main()
