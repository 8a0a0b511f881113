"""The callback for Lightning's Trainer. The oracles are Trainer itself: a run that is not
interrupted, and one that is resumed from Trainer's own checkpoint.
"""

from __future__ import annotations

import os
import shutil
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import distckpt
from tests.support.harness import launched, run

with warnings.catch_warnings(action="ignore"):  # of Lightning, when it is imported
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch import callbacks

    from distckpt.integrations.lightning import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
BATCHES_PER_EPOCH = 6


class Task(lightning.LightningModule):
    """A model with dropout and a warm-up that goes on over epochs, and what it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)
        self.dropout = 0.2
        self.seen = []

    def loss_of(self, rows):
        hidden = torch.nn.functional.dropout(self.backbone(rows), self.dropout, self.training)
        return (self.head(hidden) - rows.sum(1, keepdim=True)).square().mean()

    def note(self, index, *losses):
        rates = [group["lr"] for each in self.trainer.optimizers for group in each.param_groups]
        place = (self.trainer.global_step, self.current_epoch, index)
        self.seen.append((*place, *(loss.item() for loss in losses), *rates))

    def training_step(self, batch, index):
        loss = self.loss_of(batch[0])
        self.note(index, loss)
        return loss

    def validation_step(self, batch, index, dataloader_idx=0):
        self.log("val_loss", self.loss_of(batch[0]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        warm_up = lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 9) * (1 - n / 40))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class PerEpoch(Task):
    """Schedules of schedules that advance once an epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 3),
        ]
        return [optimizer], [lr_scheduler.SequentialLR(optimizer, parts, [2])]


class TwoOptimizers(Task):
    """Optimizes by hand, as GANs are trained; steps the schedulers at the end of epochs."""

    automatic_optimization = False

    def training_step(self, batch, index):
        losses = []
        for optimizer in self.optimizers():
            losses.append(self.loss_of(batch[0]))
            optimizer.zero_grad()
            self.manual_backward(losses[-1])
            optimizer.step()
        self.note(index, *losses)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        parts = (self.backbone.parameters(), self.head.parameters())
        first, second = (torch.optim.AdamW(part, lr=0.1) for part in parts)
        return [first, second], [
            lr_scheduler.StepLR(first, 1, 0.5),
            lr_scheduler.ExponentialLR(second, 0.7),
        ]


class Backbone(Task):
    """Its backbone joins the optimizer later."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=0.1)


class CountedValidations(Task):
    """Keeps the number of its validations, as schedules that go by a metric do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("validations", torch.tensor(0))

    def on_validation_epoch_end(self):
        self.validations += 1


class OwnAverage(lightning.Callback):
    """Averages weights, and keeps them by the hook for checkpoints."""

    def setup(self, trainer, module, stage):
        self.average = AveragedModel(module.head, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)

    def on_train_batch_end(self, trainer, module, *args):
        self.average.update_parameters(module.head)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["own_average"] = self.average.state_dict()

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.average.load_state_dict(checkpoint["own_average"])


class Rows(DataLoader):
    """A loader that knows its position, as torchdata's StatefulDataLoader."""

    def __init__(self, generator=None, **settings):  # Trainer gives it a sampler for each rank
        defaults = {"dataset": TensorDataset(ROWS), "batch_size": 4}
        super().__init__(**{**defaults, **settings}, generator=generator)
        self.given, self.skipped = 0, 0

    def __iter__(self):
        self.given, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given += 1
                yield batch
        # Only now: a state that was taken at the last batch has nothing left of its epoch.
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skipped = state["given"]


class ShuffledRows(Rows):
    """Its order goes on from epoch to epoch, by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.order = torch.Generator().manual_seed(5)
        self.begun = self.order.get_state()

    def __iter__(self):
        self.given, self.skipped = self.skipped, 0
        self.begun = self.order.get_state()
        for number, batch in enumerate(torch.randperm(BATCHES_PER_EPOCH, generator=self.order)):
            if number >= self.given:
                self.given += 1
                yield [ROWS[4 * batch : 4 * batch + 4]]
        self.given, self.begun = 0, self.order.get_state()

    def state_dict(self):
        return {"given": self.given, "begun": self.begun}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.order.set_state(state["begun"])


def fit(task, *given, ckpt_path=None, loader=None, **settings):
    """Train as Trainer does with these callbacks and settings; return the Trainer."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(given),
        enable_checkpointing=any(isinstance(each, callbacks.ModelCheckpoint) for each in given),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"max_epochs": 4, "num_sanity_val_steps": 0, "devices": 1, **settings},
    )
    loader = loader or DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True)
    held_out = [DataLoader(TensorDataset(rows), batch_size=4) for rows in (ROWS[:8], -ROWS)]
    torch.manual_seed(1)
    trainer.fit(task, loader, held_out, ckpt_path=ckpt_path)
    return trainer


def keep_until(manager, step):
    """Remove the later steps, as if the run had been killed after this one."""
    for other in manager.steps():
        if other > step:
            shutil.rmtree(manager.location(other))
    assert manager.steps()[-1] == step


def assert_goes_on(whole, resumed, num_batches):
    """Compare what a resumed run has seen with the last batches of the whole run."""
    assert resumed.seen == whole.seen[-num_batches:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def states_of(trainer):
    """Return the states of the callbacks as text."""
    return {each.state_key: str(each.state_dict()) for each in trainer.callbacks}


EMA = getattr(callbacks, "EMAWeightAveraging", None)
RUNS = {
    "warm_up_by_step": (Task, [], {}),
    "schedules_by_epoch": (PerEpoch, [], {}),
    "two_optimizers": (TwoOptimizers, [], {}),
    "sanity_check": (CountedValidations, [], {"num_sanity_val_steps": 2}),
    "own_average": (Task, [OwnAverage], {}),
    "gradient_accumulation": (Task, [], {"accumulate_grad_batches": 4}),
    "limit_of_steps": (Task, [], {"max_epochs": -1, "max_steps": 24}),
    "limit_beyond_the_end": (Task, [], {"max_steps": 100}),
    "early_stopping": (Task, [lambda: callbacks.EarlyStopping("val_loss/dataloader_idx_0")], {}),
} | ({"average": (Task, [lambda: EMA(decay=0.9)], {})} if EMA else {})


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(name, tmp_path):
    make, others, settings = RUNS[name]
    whole, resumed = make(), make()
    trainer = fit(whole, Checkpoints(tmp_path), *(other() for other in others), **settings)
    manager = distckpt.CheckpointManager(tmp_path)
    keep_until(manager, manager.steps()[1])
    again = fit(resumed, Checkpoints(tmp_path), *(other() for other in others), **settings)
    assert_goes_on(whole, resumed, 2 * BATCHES_PER_EPOCH)
    assert again.global_step == trainer.global_step
    assert states_of(trainer) == states_of(again)
    for one, other in zip(trainer.callbacks, again.callbacks, strict=True):
        if isinstance(one, OwnAverage):
            assert torch.equal(one.average.module.weight, other.average.module.weight)


@pytest.mark.parametrize("max_steps", [-1, 9])
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_a_loader_that_has_a_state(
    generator, max_steps, tmp_path
):
    whole, resumed = Task(), Task()
    settings = {"accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": max_steps}
    fit(whole, Checkpoints(tmp_path, every_n_train_steps=2), loader=Rows(generator), **settings)
    manager = distckpt.CheckpointManager(tmp_path)
    assert manager.steps() == [2, 4, 6, 8]
    keep_until(manager, 4)
    fit(resumed, Checkpoints(tmp_path, every_n_train_steps=2), loader=Rows(generator), **settings)
    assert_goes_on(whole, resumed, 3 * BATCHES_PER_EPOCH - 8)
    assert manager.steps() == [2, 4, 6, 8]


@pytest.mark.parametrize("max_steps", [-1, 100])
@pytest.mark.parametrize(("every", "accumulated"), [(6, 1), (3, 1), (3, 2)])
def test_a_run_goes_on_after_the_last_batch_of_an_epoch_of_a_loader_that_has_a_state(
    every, accumulated, max_steps, tmp_path
):
    whole, resumed = Task(), Task()
    settings = {"accumulate_grad_batches": accumulated, "max_epochs": 3, "max_steps": max_steps}
    fit(whole, Checkpoints(tmp_path, every_n_train_steps=every), loader=Rows(), **settings)
    end_of_epoch = BATCHES_PER_EPOCH // accumulated
    keep_until(distckpt.CheckpointManager(tmp_path), end_of_epoch)
    again = Checkpoints(tmp_path, every_n_train_steps=every)
    trainer = fit(resumed, again, loader=Rows(), **settings)
    assert_goes_on(whole, resumed, 2 * BATCHES_PER_EPOCH)
    assert trainer.global_step == 3 * end_of_epoch
    assert again.manager.steps()[-1] == 3 * end_of_epoch


@pytest.mark.parametrize("every", [0, 3])
def test_a_run_that_stopped_at_its_limit_of_steps_goes_on_with_a_higher_one(every, tmp_path):
    whole, resumed = Task(), Task()
    fit(whole, loader=Rows(), max_epochs=-1, max_steps=14)
    for limit in (8, 14):
        resumed.seen.clear()
        callback = Checkpoints(tmp_path, every_n_train_steps=every)
        fit(resumed, callback, loader=Rows(), max_epochs=-1, max_steps=limit)
    assert_goes_on(whole, resumed, 8 if every else 6)


@pytest.mark.parametrize("every", [0, 2, 3])
def test_the_order_of_a_loader_goes_on_at_the_end_of_an_epoch(every, tmp_path):
    whole, resumed = Task(), Task()
    fit(whole, Checkpoints(tmp_path, every_n_train_steps=every), loader=ShuffledRows())
    keep_until(distckpt.CheckpointManager(tmp_path), 2 * BATCHES_PER_EPOCH)
    fit(resumed, Checkpoints(tmp_path, every_n_train_steps=every), loader=ShuffledRows())
    assert_goes_on(whole, resumed, 2 * BATCHES_PER_EPOCH)


class Drawing(Sampler):
    """Draws an order for each epoch, which Trainer divides among ranks."""

    def __init__(self):
        self.order = torch.Generator().manual_seed(5)

    def __iter__(self):
        return iter(torch.randperm(len(ROWS), generator=self.order).tolist())

    def __len__(self):
        return len(ROWS)


def rows_of_ranks(rank, root, num_ranks, every, last, sampler=None):
    """Train on ranks from the step `last`; return the losses by step, and the batches."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    if last and rank == 0:
        keep_until(distckpt.CheckpointManager(root), last)
    torch.distributed.barrier()
    warnings.simplefilter("ignore")  # in a process of its own
    task, callback = Task(), Checkpoints(root, every_n_train_steps=every)
    loader = Rows(sampler=sampler and sampler())
    fit(task, callback, loader=loader, max_epochs=3, strategy="ddp", devices=num_ranks)
    return task.seen


@pytest.mark.parametrize(("every", "last"), [(0, 6), (3, 3), (2, 4)])
def test_ranks_go_on_at_the_epoch_of_their_samplers(every, last, tmp_path):
    whole = run(rows_of_ranks, 2, tmp_path, 2, every, 0)
    resumed = run(rows_of_ranks, 2, tmp_path, 2, every, last)
    assert [len(seen) for seen in resumed] == [9 - last] * 2
    for all_seen, seen in zip(whole, resumed, strict=True):
        assert seen == all_seen[last:]


def test_an_order_that_no_state_has_is_warned_of_in_the_middle_of_an_epoch(tmp_path):
    run(rows_of_ranks, 2, tmp_path, 2, 2, 0, Drawing)
    for last, is_warned in ((6, False), (4, True)):
        with launched(rows_of_ranks, 2, tmp_path, 2, 2, last, Drawing) as launch:
            launch.values()
            logged = " ".join(launch.outcomes()[0].warnings_logged)
        assert ("wrapped the sampler" in logged) is is_warned


def test_fewer_ranks_begin_the_epoch_after_the_last_batch(tmp_path):
    run(rows_of_ranks, 2, tmp_path, 2, 3, 0)
    (seen,) = run(rows_of_ranks, 1, tmp_path, 1, 3, 3)
    assert [(epoch, index) for _, epoch, index, *_ in seen] == [
        (epoch, index) for epoch in (1, 2) for index in range(BATCHES_PER_EPOCH)
    ]


class Failing(Task):
    def training_step(self, batch, index):
        if self.trainer.global_step == 3:
            raise RuntimeError("out of memory")
        return super().training_step(batch, index)


def test_another_fit_of_the_process_finds_what_was_being_saved(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(Failing(), Checkpoints(tmp_path, every_n_train_steps=1))
    assert distckpt.CheckpointManager(tmp_path).steps() == [1, 2, 3]


class Augmented(Task):
    """Changes its batches at random, as augmentations on accelerators do."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + torch.rand(4)]


class Same(TensorDataset):
    """The same row again and again, so that a loader may begin anew."""

    def __init__(self):
        super().__init__(ROWS[:1].repeat(len(ROWS), 1))


class Drawn(Same):
    """Rows that are drawn when they are fetched."""

    def __getitem__(self, index):
        return [torch.randn(4)]


MIDDLES = {
    "in_order": (Task, Same, {}, {}),
    "own_generator": (Task, Same, {"shuffle": True, "generator": torch.Generator()}, {}),
    "drawn_when_fetched": (Task, Drawn, {}, {}),
    "augmented": (Augmented, Same, {}, {}),
    "two_optimizers": (TwoOptimizers, Same, {}, {}),
    "sanity_check": (Task, Same, {}, {"num_sanity_val_steps": 2}),
    "accumulation": (Task, Same, {}, {"accumulate_grad_batches": 2}),
    "validation": (Task, Same, {}, {"val_check_interval": 3}),
    "end_of_an_epoch": (Task, Same, {}, {"limit_val_batches": 0}),
    "shuffled_from_the_end": (Task, Same, {"shuffle": True}, {"limit_val_batches": 0}),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_a_loader_that_begins_anew_leaves_the_random_numbers_of_the_run(name, tmp_path):
    make, rows, arguments, settings = MIDDLES[name]
    whole, resumed = make(), make()
    saved = {"every_n_train_steps": 2}
    for task in (whole, resumed):
        loader = DataLoader(rows(), batch_size=4, **arguments)
        fit(task, Checkpoints(tmp_path, **saved), loader=loader, max_epochs=3, **settings)
        manager = distckpt.CheckpointManager(tmp_path)
        if task is whole:
            keep_until(manager, 6 if "end" in name else 4)
    assert len(resumed.seen) < len(whole.seen)
    assert_goes_on(whole, resumed, len(resumed.seen))


class Plateau(Task):
    """Reduces the rate when the loss of the second evaluation set does not go down."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss/dataloader_idx_1"},
        }


TRAINERS_OWN = {
    "late_backbone": (Backbone, [lambda: callbacks.BackboneFinetuning(1, verbose=False)], 12),
    "plateau": (Plateau, [], 12),
    "middle_of_an_epoch": (Task, [], 9),
}


@pytest.mark.parametrize("name", TRAINERS_OWN)
def test_a_run_resumes_as_from_the_checkpoint_of_the_trainer(name, tmp_path):
    """These do not go on in Lightning as if they had not been interrupted."""
    make, others, step = TRAINERS_OWN[name]
    every = {"every_n_train_steps": 3} if step % BATCHES_PER_EPOCH else {}
    tasks = [make() for _ in range(3)]
    for task in tasks:
        task.dropout = 0  # Lightning does not store random number generators
    in_order = DataLoader(TensorDataset(ROWS), batch_size=4)
    own = callbacks.ModelCheckpoint(tmp_path / "own", "{step}", save_top_k=-1, **every)
    manager = distckpt.CheckpointManager(tmp_path / "ours")
    first, second, third = ([other() for other in others] for _ in tasks)
    fit(tasks[0], own, *first, Checkpoints(manager.root, **every), loader=in_order)
    keep_until(manager, step)
    path = tmp_path / "own" / f"step={step}.ckpt"
    expected = fit(tasks[1], *second, ckpt_path=path, loader=in_order)
    found = fit(tasks[2], *third, Checkpoints(manager.root, **every), loader=in_order)
    assert_goes_on(tasks[1], tasks[2], len(tasks[1].seen))
    assert found.global_step == expected.global_step
    for one, other in zip(second, third, strict=True):
        assert str(one.state_dict()) == str(other.state_dict())


def test_the_best_step_by_an_evaluation_set_is_kept_and_predicts_as_it_did(tmp_path):
    settings = {"best_metric": "val_loss/dataloader_idx_1", "keep_last": 1}
    task = Task()
    fit(task, Checkpoints(tmp_path, **settings), max_epochs=5)
    infos = [info for info in distckpt.list_checkpoints(tmp_path) if info.metrics]
    names = {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert all(info.metrics.keys() == names for info in infos)
    best = min(infos, key=lambda info: info.metrics[settings["best_metric"]])
    assert {info.step for info in infos} == {best.step, 30}
    loaded = Task()
    distckpt.load({"model": loaded}, best.location)
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[Checkpoints(tmp_path)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    held_out = [DataLoader(TensorDataset(rows), batch_size=4) for rows in (ROWS[:8], -ROWS)]
    (first, second) = trainer.validate(loaded, held_out, verbose=False)
    found = first | second
    assert found == pytest.approx(best.metrics)


def test_a_checkpoint_of_the_trainer_beside_steps_to_resume_from_is_refused(tmp_path):
    trainer = fit(Task(), Checkpoints(tmp_path / "steps"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(
        ValueError, match=r"ckpt_path.*has steps to resume from: leave out ckpt_path"
    ):
        fit(Task(), Checkpoints(tmp_path / "steps"), ckpt_path=tmp_path / "own.ckpt")
    fit(Task(), Checkpoints(tmp_path / "others"), ckpt_path=tmp_path / "own.ckpt", max_epochs=2)
    assert distckpt.CheckpointManager(tmp_path / "others").steps() == [12]
