"""The example that saves in the background and loses a process, run the way its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_second_run_repeats_the_losses_of_the_first(tmp_path):
    search_path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(REPOSITORY / "examples" / "async_training.py"), "--work-dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, _, second = done.stdout.partition("a process died")
    assert "SIGKILL" in second
    resumed = int(re.search(r"resumed from step (\d+)", second)[1])
    assert resumed in (30, 40)
    losses = [dict(re.findall(r"^step +(\d+)   loss (\d+\.\d+)", run, re.M)) for run in (first, second)]
    both = sorted(int(step) for step in losses[0].keys() & losses[1].keys())
    assert both == [step for step in (35, 40, 41) if step > resumed]
    assert [losses[0][str(step)] for step in both] == [losses[1][str(step)] for step in both]
    assert float(losses[1]["60"]) < 0.7 * float(losses[0]["5"]), "the model learns"
    assert first.count("ms stall") == 4
    kept = sorted(name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(("step", ".")))
    assert kept == ["step_00000050", "step_00000060"]
