"""The example of object storage does what it says, in memory and on a real server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("options", [[], ["--local-server"]])
def test_example(options, tmp_path):
    done = run_program(
        [str(ROOT / "examples" / "object_storage.py"), *options], os.environ, tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "lost the race: Another program has saved to" in done.stdout
    assert "steps that are kept: [4, 5], the latest is 5" in done.stdout
    assert "export" in done.stdout
    assert "model.safetensors" in done.stdout
