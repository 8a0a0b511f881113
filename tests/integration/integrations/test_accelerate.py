"""The training state of an Accelerator, compared with a run that is not interrupted, and with what
accelerate itself saves.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import distckpt
from distckpt.integrations.accelerate import training_state

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_BATCHES = 6


class Run:
    """Two models with an optimizer each, a warm-up, an average of weights, and shuffled data."""

    def __init__(self):
        torch.manual_seed(5)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        models = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        optimizers = (
            torch.optim.AdamW(models[0].parameters(), lr=0.01),
            torch.optim.SGD(models[1].parameters(), lr=0.01, momentum=0.9),
        )
        schedule = LambdaLR(optimizers[0], lambda n: min(1.0, (n + 1) / 5))
        rows = TensorDataset(torch.randn(24, 4))
        data = DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator())
        prepared = self.accelerator.prepare(*models, *optimizers, schedule, data)
        self.models, self.optimizers = prepared[:2], prepared[2:4]
        self.schedule, self.data = prepared[4:]
        self.average = AveragedModel(prepared[0])
        self.accelerator.register_for_checkpointing(self.average)
        self.state = {**training_state(self.accelerator), "batch": 0}

    def train(self, until, save=lambda run, batch: None):
        """Train until a number of batches; return the losses and rates."""
        seen = []
        while self.state["batch"] < until:
            skipped = self.state["batch"] % NUM_BATCHES
            for (rows,) in skip_first_batches(self.data, skipped) if skipped else self.data:
                seen.append(self.step(rows))
                self.state["batch"] += 1
                if self.state["batch"] == until:
                    break
            if self.state["batch"] % NUM_BATCHES == 0:
                self.data.set_epoch(self.state["batch"] // NUM_BATCHES)
            save(self, self.state["batch"])
        return seen

    def step(self, rows):
        first, second = self.models
        with self.accelerator.accumulate(*self.models):
            hidden = torch.nn.functional.dropout(first(rows), 0.2)
            loss = (second(hidden) - rows.sum(1, keepdim=True)).square().mean()
            self.accelerator.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
            if self.accelerator.sync_gradients:
                self.average.update_parameters(first)
        return loss.item(), self.optimizers[0].param_groups[0]["lr"]


def assert_same(found, expected):
    for one, other in ((found.models, expected.models), ([found.average], [expected.average])):
        for left, right in zip(one, other, strict=True):
            for name, value in right.state_dict().items():
                assert torch.equal(left.state_dict()[name], value), name
    assert found.accelerator.step == expected.accelerator.step


@pytest.mark.parametrize("stop", [NUM_BATCHES, NUM_BATCHES + 4], ids=["epoch", "middle"])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(stop, tmp_path):
    whole = Run()
    seen = whole.train(3 * NUM_BATCHES)
    first = Run()
    assert first.train(stop) == seen[:stop]
    distckpt.save(first.state, tmp_path / "saved")
    resumed = Run()
    distckpt.load(resumed.state, tmp_path / "saved")
    assert resumed.state["batch"] == stop
    assert resumed.train(3 * NUM_BATCHES) == seen[stop:]
    assert_same(resumed, whole)


def test_what_accelerate_saves_comes_back(tmp_path):
    """Its own files, loaded into another run, are what is compared."""
    first, own, found = Run(), Run(), Run()
    first.train(NUM_BATCHES + 3)
    first.accelerator.save_state(str(tmp_path / "own"))
    distckpt.save(first.state, tmp_path / "ours")
    distckpt.load(found.state, tmp_path / "ours")
    drawn = torch.rand(3)
    own.accelerator.load_state(str(tmp_path / "own"))
    assert torch.equal(torch.rand(3), drawn)
    assert_same(found, own)
    for left, right in zip(found.optimizers, own.optimizers, strict=True):
        assert str(left.state_dict()) == str(right.state_dict())
    assert found.schedule.state_dict() == own.schedule.state_dict()


def test_a_manager_keeps_the_state_and_removes_old_steps(tmp_path):
    run, resumed = Run(), Run()
    with distckpt.CheckpointManager(tmp_path, keep_last=1) as manager:
        run.train(2 * NUM_BATCHES, lambda run, batch: manager.save(batch, run.state))
        manager.wait()
        assert manager.steps() == [2 * NUM_BATCHES]
        manager.load(resumed.state)
    assert_same(resumed, run)


def test_what_is_prepared_later_is_said_to_be_missing(tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"call training_state after accelerator\.prepare"):
        training_state(accelerator)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    state = training_state(accelerator)
    distckpt.save(state, tmp_path / "1")
    assert caplog.messages == []
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    distckpt.save(state, tmp_path / "2")
    (warning,) = caplog.messages
    assert "lacks what was prepared or registered after training_state" in warning
