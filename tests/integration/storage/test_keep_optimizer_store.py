"""Optimizer state that is removed from steps in a store without conditional writes."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import CheckpointManager
from tests.support.s3_server import Fault, FaultyProxy, reached_at

pytestmark = pytest.mark.usefixtures("no_saves_left")

PATIENCE = 200.0


def trained(step):
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": step}


def test_a_store_without_conditions_keeps_nothing_of_a_replaced_step(server, bucket):
    faults = []
    for header in ("If-Match", "If-None-Match"):
        faults.append(Fault("PUT", "metadata.json", "501", 1, 1 << 30, header))
    with FaultyProxy(server, *faults).running() as url, reached_at(url):
        with CheckpointManager(f"{bucket}/run", keep_optimizer=1) as manager:
            for step in (1, 2):
                manager.save(step, trained(step)).result(PATIENCE)
        location = f"{bucket}/run/step_00000001"
        assert set(distckpt.open(location).tensors) == {"weight", "bias"}
        with CheckpointManager(f"{bucket}/run") as manager:
            manager.save(1, trained(1), overwrite=True).result(PATIENCE)
        report = distckpt.verify(location)
        assert report.is_whole
        assert not report.strays
