"""The example of object storage does what it says, in memory and on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("options", [[], ["--local-server"]])
def test_example(options, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "object_storage.py"), *options],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lost the race: Another program has saved to" in done.stdout
    assert "steps that are kept: [4, 5], the latest is 5" in done.stdout
    assert "export" in done.stdout
    assert "model.safetensors" in done.stdout
