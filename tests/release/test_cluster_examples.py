"""The programs for clusters, run as far as the parts exist here: torchrun is real, Slurm is a
stub, and the manifest of Kubernetes is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.torch_version import TorchVersion

from tests.support.example_programs import ROOT

CLUSTER = ROOT / "examples" / "cluster"
PATIENCE = 120.0
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
STOPPED, REQUEUED = 75, "requeue 7"

SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=2
for SLURM_PROCID in 0 1; do
  export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID
  "$@" & echo $! >> "$CALLS/ranks"
done
code=0
for rank in $(cat "$CALLS/ranks"); do wait $rank || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$CALLS/asked"; fi
"""


@pytest.fixture
def started():
    """Start a command; nothing of it is left at the end."""
    groups = []

    def start(*command, **more):
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            env={**ENVIRONMENT, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        groups.append(process)
        return process

    yield start
    for process in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def read_until(pattern, process):
    """Return what a program prints, up to a line that has a pattern."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        if re.search(pattern, line):
            return "".join(printed)
    raise AssertionError(f"{pattern} is not in {''.join(printed)}")


def test_torchrun_passes_the_signal_on_and_the_next_run_resumes(tmp_path, started):
    program = [CLUSTER / "train.py", "--run-dir", tmp_path / "run", "--num-steps"]
    line = ["torchrun", "--standalone", "--nproc-per-node", 2]
    if TorchVersion(torch.__version__) >= "2.12":
        line += ["--shutdown-timeout", 100]
    process = started(*line, *program, 10**6)
    read_until("step 100 ", process)
    process.send_signal(signal.SIGTERM)
    printed = process.stdout.read()
    process.wait(PATIENCE)
    (saved,) = re.findall(r"stopped: saved step (\d+)", printed)
    assert "torchrun kills" not in printed

    # On one rank, which starts sooner.
    line = ["torchrun", "--standalone", "--nproc-per-node", 1]
    process = started(*line, *program, int(saved) + 5)
    printed = process.stdout.read()
    assert process.wait(PATIENCE) == 0
    assert f"from step {saved}\n" in printed
    assert f"done: step {int(saved) + 5}" in printed


@pytest.mark.slow
def test_a_batch_script_is_queued_again_until_it_is_done(tmp_path, started):
    calls = tmp_path / "calls"
    calls.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (calls / name).write_text(text)
        (calls / name).chmod(0o755)
    slurm = {
        "CALLS": str(calls),
        "PATH": f"{calls}:{ENVIRONMENT['PATH']}",
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "node-[1-2]",
    }
    process = started("bash", CLUSTER / "slurm.sbatch", **slurm)
    read_until("step 100 ", process)
    # Slurm sends it to the ranks, and may send it to the script.
    process.send_signal(signal.SIGTERM)
    for rank in (calls / "ranks").read_text().split():
        os.kill(int(rank), signal.SIGTERM)
    printed = process.stdout.read()
    assert process.wait(PATIENCE) == STOPPED, printed
    assert (calls / "asked").read_text().strip() == REQUEUED
    (saved,) = re.findall(r"stopped: saved step (\d+)", printed)

    for name in ("ranks", "asked"):
        (calls / name).unlink()
    process = started("bash", CLUSTER / "slurm.sbatch", **slurm)
    printed = process.stdout.read()
    assert process.wait(PATIENCE) == 0, printed
    assert f"from step {saved}\n" in printed
    assert "done: step 1000" in printed
    assert not (calls / "asked").exists()


def test_a_batch_script_has_the_options_of_the_recipe():
    text = (CLUSTER / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))
    assert options["requeue"] == ""
    assert options["signal"] == "TERM@300"


def test_the_pods_have_more_time_than_torchrun():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    waits = {each["name"]: int(each["value"]) for each in container["env"]}
    assert waits["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] < pod["terminationGracePeriodSeconds"]
    assert container["command"][0] == "torchrun"
    claims = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == claims
    endpoint = f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert endpoint in container["command"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
