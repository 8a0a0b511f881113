"""What a guard can see of the launcher."""

from __future__ import annotations

import logging

import pytest

from distckpt import PreemptionGuard
from distckpt.manager import _preemption as launcher

ON_A_CLUSTER = {"TORCHELASTIC_RUN_ID": "1", "SLURM_JOB_ID": "7", "RANK": "0"}
PLAIN = ["python", "/bin/torchrun", "--nnodes", "2", "train.py"]


@pytest.mark.parametrize(
    ("environment", "command", "is_warned"),
    [
        (ON_A_CLUSTER, PLAIN, True),
        ({"TORCHELASTIC_RUN_ID": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, PLAIN, True),
        ({"TORCHELASTIC_RUN_ID": "1"}, PLAIN, False),
        ({"SLURM_JOB_ID": "7"}, PLAIN, False),
        ({**ON_A_CLUSTER, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, PLAIN, False),
        ({**ON_A_CLUSTER, "PET_SHUTDOWN_TIMEOUT": "300"}, PLAIN, False),
        (ON_A_CLUSTER, [*PLAIN[:2], "--shutdown-timeout", "300", "train.py"], False),
        (ON_A_CLUSTER, [*PLAIN[:2], "--shutdown_timeout=300", "train.py"], False),
        (ON_A_CLUSTER, [], False),
    ],
)
def test_torchrun_is_told_how_long_a_save_may_take(environment, command, is_warned):
    assert (
        "Start it with --shutdown-timeout" in launcher.judge(environment, command, True)
    ) == is_warned


def test_an_older_torchrun_cannot_be_told():
    set_in_vain = {**ON_A_CLUSTER, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
    assert "let the scheduler start the ranks (srun)" in launcher.judge(set_in_vain, PLAIN, False)


def test_rank_0_warns_when_the_guard_begins(monkeypatch, caplog):
    monkeypatch.setattr(launcher, "_command_of_parent", lambda: PLAIN)
    for name, value in ON_A_CLUSTER.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "distckpt"):
        with PreemptionGuard():
            (warned,) = caplog.messages
        monkeypatch.setenv("RANK", "1")
        with PreemptionGuard():
            assert caplog.messages == [warned]
    assert warned.startswith("torchrun kills the ranks 30 seconds after SIGTERM")
