"""Checkpoints of Lightning's Trainer, by a callback."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning
from lightning.pytorch.callbacks import Checkpoint

from distckpt._models.per_rank import RngState
from distckpt.integrations._lightning.progress import (
    Progress,
    is_in_mid_epoch,
    restore_callbacks,
    restore_loaders,
    start_at_first_batch,
)
from distckpt.manager._checkpoint_manager import CheckpointManager

__all__ = ["Checkpoints"]


class Checkpoints(lightning.Callback):
    """Save the progress of `Trainer.fit`, and resume from the newest step.

        callback = Checkpoints("checkpoints", every_n_train_steps=1000, keep_last=3)
        trainer = lightning.Trainer(callbacks=[callback], enable_checkpointing=False)
        trainer.fit(model, data)

    A step is named after `trainer.global_step`. It has the model, all optimizers and schedulers,
    the progress of the loops, the states of callbacks, of the data module and of data loaders, the
    additions of `on_save_checkpoint`, and the random number generators. Any number of processes
    resumes it.

    Args:
        root: the directory of the steps, a path or URL.
        every_n_train_steps: save after so many steps of the optimizers.
        every_n_epochs: save at the end of so many epochs; of each one if neither is given.
        options: further arguments of `CheckpointManager`, such as `keep_last`. Its `best_metric` is
            the name of a metric that is logged; the ends of epochs have it.

    Attributes:
        manager: the `CheckpointManager` of the steps.
    """

    def __init__(
        self, root: Any, *, every_n_train_steps: int = 0, every_n_epochs: int = 0, **options: Any
    ) -> None:
        self.manager = CheckpointManager(root, **options)
        every_n_epochs = every_n_epochs or int(not every_n_train_steps)
        self._saver = _Saver(self, every_n_train_steps, every_n_epochs)

    def state_of(self, trainer: Any) -> dict[str, Any]:
        """Return the state to save and load: objects by name, to which a subclass may add."""
        progress = Progress(trainer)
        state = {"model": trainer.model, "rng": RngState(), "trainer": progress}
        state |= {
            f"optimizer_{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)
        }
        state["schedulers"] = [config.scheduler for config in trainer.lr_scheduler_configs]
        if progress.loaders.states or self._saver.resumes_loaders:
            state["data"] = progress.loaders
        return state

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give callbacks the states that some use in `on_fit_start`."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        others = []
        for callback in trainer.callbacks:
            if callback is not self._saver:
                others.append(callback)
        trainer.callbacks = [*others, self._saver]
        self._saver.resumes = bool(self.manager.steps())
        if self._saver.resumes:
            progress = self.manager.load({})["trainer"]
            self._saver.resumes_loaders = progress["has_loaders"]
            restore_callbacks(trainer, progress)


class _Saver(Checkpoint):
    """The last of all callbacks: it saves the changes that all other ones make at a step."""

    best_model_path = ""  # Trainer.test(ckpt_path="best") says that there is none
    resumes = resumes_loaders = False

    def __init__(self, owner: Checkpoints, every_steps: int, every_epochs: int) -> None:
        self._owner = owner
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._last_step = self._validated_step = 0
        self._random: dict[str, Any] | None = None
        self._is_due = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._loaders: list[Any] = []
        if self.resumes:
            state = self._owner.state_of(trainer)
            self._owner.manager.load(state)
            # The last batch of a rank is not the last one where there are fewer.
            if state["trainer"].num_ranks == trainer.world_size or is_in_mid_epoch(trainer):
                self._loaders = [*state.get("data", ())]
            # A validation of the sanity check would change the loaded state.
            self._num_sanity_steps = trainer.num_sanity_val_steps
            trainer.num_sanity_val_steps = 0
        self._random = None
        if self.resumes:
            self._random = RngState().state_dict()
        self.resumes_loaders = False
        self._last_step = trainer.global_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.resumes:
            trainer.num_sanity_val_steps = self._num_sanity_steps
        if self.resumes and trainer.ckpt_path:  # Not all strategies have set this earlier.
            raise ValueError(
                f"Trainer.fit is told to resume from ckpt_path={trainer.ckpt_path!r}, and "
                f"{self._owner.manager.root!r} has steps to resume from: leave out ckpt_path, or "
                "give Checkpoints a directory without steps."
            )
        is_in_middle = is_in_mid_epoch(trainer)
        if self._loaders:
            restore_loaders(trainer, self._loaders, self._random)
        if self._random and is_in_middle:
            # New iterators of loaders have drawn seeds, which the run did long ago.
            RngState().load_state_dict(self._random)
        has_more = is_in_middle and start_at_first_batch(trainer)
        if not has_more:
            self._random = None

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self._random:
            RngState().load_state_dict(self._random)
            self._random = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validated_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._every_steps and trainer.global_step % self._every_steps == 0:
            # A run of another number of ranks, whose epoch has more batches, would go on in it.
            self._is_due = trainer.is_last_batch
            if not self._is_due:
                self._save(trainer, {})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._every_epochs and (trainer.current_epoch + 1) % self._every_epochs == 0:
            # Trainer keeps the metrics of a validation until the next one.
            is_old = trainer.enable_validation and self._validated_step != trainer.global_step
            self._save(trainer, {} if is_old else trainer.callback_metrics)
        elif self._is_due:
            self._save(trainer, {})
        self._is_due = False

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._owner.manager.wait()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # The next fit of this process may look for the step that is being saved.
        with contextlib.suppress(Exception):  # the manager has logged it
            self._owner.manager.wait()

    def _save(self, trainer: Any, metrics: dict[str, Any]) -> None:
        step = trainer.global_step
        numbers = {name: float(value) for name, value in metrics.items()}
        if step != self._last_step:  # batches whose gradients are accumulated have the same one
            # A step that is there already is one that the resumed run passed over.
            state = self._owner.state_of(trainer)
            self._owner.manager.save(step, state, metrics=numbers, overwrite=True)
            self._last_step = step
