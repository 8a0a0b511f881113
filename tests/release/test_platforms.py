"""Systems other than Linux: what only Linux has is left out, and Windows is refused with a
sentence.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_LINUX = """
import builtins, ctypes, os, sys, sysconfig
import torch
for name in (
    "O_DIRECT",
    "RWF_NOWAIT",
    "posix_fadvise",
    "posix_fallocate",
    "sched_getaffinity",
    "eventfd",
):
    delattr(os, name)
sysconfig.get_config_vars()  # while it looks for those of Linux
sys.platform = "darwin"
really_open = builtins.open
def without_proc(file, *args, **options):
    if str(file).startswith("/proc/"):
        raise FileNotFoundError(file)
    return really_open(file, *args, **options)
builtins.open = without_proc
class Libc(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("renameat2", "fallocate", "syscall", "sync_file_range"):
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Libc

import distckpt
model = torch.nn.Linear(3000, 2000)
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 1}
distckpt.save(state, "one")
distckpt.save(state, "one", overwrite=True)
with distckpt.CheckpointManager("run", keep_last=1) as manager:
    for step in (1, 2):
        manager.save(step, state)
assert manager.steps() == [2]
fresh = torch.nn.Linear(3000, 2000)
distckpt.load({"model": fresh}, "one")
assert torch.equal(fresh.weight, model.weight)
columns = distckpt.ShardedTensor.from_rank_offsets("weight", torch.empty(2000, 1500), (1, 1, 2))
assert torch.equal(distckpt.load({"w": columns}, "one")["w"], model.weight[:, 1500:])
distckpt.consolidate("one", "exported", keys="!optimizer.")
distckpt.load({"w": columns}, "exported")
assert distckpt.verify("one").is_whole
"""


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_everything_works_without_what_only_linux_has(tmp_path):
    done = run(WITHOUT_LINUX, tmp_path)
    assert done.returncode == 0, done.stderr


def test_windows_is_refused_with_a_sentence(tmp_path):
    done = run("import sys; sys.platform = 'win32'; import distckpt", tmp_path)
    assert done.stderr.splitlines()[-1].startswith("ImportError: distckpt does not run on Windows")
    assert "WSL" in done.stderr
