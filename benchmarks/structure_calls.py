"""What one call of distckpt goes through; `structure.py` runs this with a checkout on the path.

    python benchmarks/structure_calls.py calls VERB ...
    python benchmarks/structure_calls.py modules VERB FOLDER

A verb is save, load or consolidate. It prints JSON, and makes only calls that every version of
distckpt has.
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
"""Of the tensor: enough that threads read it."""
PACKAGE = f"{Path(distckpt.__file__).parent}/"
FOREIGN = "distckpt._foreign"
READS = {"preadv", "pread", "read", "readinto"}
SETTLE_SECONDS = 0.05

Profile = Callable[[FrameType, str, Any], None]


def main() -> None:
    """Print the figures that the command line asks for."""
    _, kind, *words = sys.argv
    figures = figures_of_calls(words) if kind == "calls" else modules_of(*words)
    print(json.dumps(figures))


def figures_of_calls(verbs: list[str]) -> dict[str, Any]:
    """Return what a save and a load of one tensor go through, and the parameters of verbs."""
    with tempfile.TemporaryDirectory() as folder:
        files = files_of_save(folder)
        caller_frames, thread_frames = frames_of_load(f"{folder}/first")
    return {
        "files_of_save": len(set().union(*files)),
        "changes_of_file": sum(a != b for run in files for a, b in pairwise(run)),
        "frames_of_load": caller_frames,
        "frames_of_reader": thread_frames,
        "parameters": {
            verb: len(inspect.signature(getattr(distckpt, verb)).parameters) for verb in verbs
        },
    }


def files_of_save(folder: str) -> list[list[str]]:
    """Return the files whose functions the second save of a process calls, in order, per thread."""
    called: dict[int, list[str]] = defaultdict(list)

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_own(frame):
            called[threading.get_ident()].append(frame.f_code.co_filename)

    with _profiled(record):
        distckpt.save(_state(), f"{folder}/first")
        called.clear()
        distckpt.save(_state(), f"{folder}/second")
    return list(called.values())


def frames_of_load(path: str) -> tuple[int, int]:
    """Return how many functions of distckpt are under way in a load where it reads at its deepest.

    Returns:
        Those of the thread that called `load`, and those of the thread that reads: none when it
        is the same one.
    """
    caller = threading.get_ident()
    depths = []

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or not _is_own(frame) or argument.__name__ not in READS:
            return
        if threading.get_ident() == caller:
            depths.append((_depth(frame), 0))
            return
        # Meanwhile the caller comes to where it waits for this thread.
        time.sleep(SETTLE_SECONDS)
        depths.append((_depth(sys._current_frames()[caller]), _depth(frame)))

    with _profiled(record):
        distckpt.load(_state(), path)
    assert depths, f"the load called none of {', '.join(READS)}"
    return max(depths, key=sum)


def modules_of(verb: str, folder: str) -> dict[str, Any]:
    """Return the modules of distckpt that one call imports; a folder has the checkpoint."""
    if verb == "consolidate":
        distckpt.consolidate(f"{folder}/checkpoint", f"{folder}/consolidated")
    else:
        getattr(distckpt, verb)(_state(), f"{folder}/checkpoint")
    own = sorted(name for name in sys.modules if name.partition(".")[0] == "distckpt")
    foreign = [name for name in own if f"{name}.".startswith(f"{FOREIGN}.")]
    return {"modules": len(own), "foreign": foreign}


def _state() -> dict[str, Any]:
    tensor = torch.ones(NUM_VALUES)
    return {"weight": distckpt.ShardedTensor.from_rank_offsets("weight", tensor)}


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
