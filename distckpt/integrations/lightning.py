"""Checkpoints of Lightning's Trainer, by a callback."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import lightning
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import CombinedLoader

from distckpt._models.per_rank import RngState
from distckpt.manager._checkpoint_manager import CheckpointManager

__all__ = ["Checkpoints"]

logger = logging.getLogger(__name__)

_LOADERS = "combined_loader"


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
        progress = _Progress(trainer)
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
            _restore_callbacks(trainer, progress)


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
            if state["trainer"].num_ranks == trainer.world_size or _is_in_mid_epoch(trainer):
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
        is_in_middle = _is_in_mid_epoch(trainer)
        if self._loaders:
            _restore_loaders(trainer, self._loaders, self._random)
        if self._random and is_in_middle:
            # New iterators of loaders have drawn seeds, which the run did long ago.
            RngState().load_state_dict(self._random)
        has_more = is_in_middle and _start_at_first_batch(trainer)
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


# --- The state of the trainer without the tensors of model and optimizers -------------------------


class _DataLoaders:
    """The states of this rank's data loaders.

    Trainer takes them once it has made the loaders.
    """

    def __init__(self, states: Any) -> None:
        self.states = states

    def __iter__(self) -> Any:
        return iter(self.states)

    def state_dict(self) -> Any:
        return self.states

    def load_state_dict(self, states: Any) -> None:
        self.states = states


class _Progress:
    """The state of a Trainer without its model, optimizers and schedulers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._loops = trainer.fit_loop.state_dict()
        self.loaders = _DataLoaders(self._loops["state_dict"].pop(_LOADERS, []))
        self.num_ranks = trainer.world_size

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        weights = self._module.state_dict()
        checkpoint: dict[str, Any] = {
            "state_dict": weights,
            "loops": {"fit_loop": self._loops},
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "num_ranks": self.num_ranks,
            "pytorch-lightning_version": lightning.__version__,
            "callbacks": {plugin.state_key: plugin.state_dict() for plugin in trainer.callbacks},
        }
        for plugin in self._plugins():
            if own := plugin.state_dict():
                checkpoint[type(plugin).__qualname__] = own
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, self._module, checkpoint)
        self._module.on_save_checkpoint(checkpoint)
        # Callbacks that average weights put the average into "state_dict", and the weights
        # elsewhere.
        places = []
        rest = {}
        for name, value in checkpoint.items():
            if value is weights:
                places.append(name)
            else:
                rest[name] = value
        return {**rest, "places_of_weights": places, "has_loaders": bool(self.loaders.states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        weights = self._module.state_dict()
        self.num_ranks = state["num_ranks"]
        checkpoint = {**state, **dict.fromkeys(state["places_of_weights"], weights)}
        self._module.on_load_checkpoint(checkpoint)
        for plugin in self._plugins():
            if own := checkpoint.get(type(plugin).__qualname__):
                plugin.load_state_dict(own)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, self._module, checkpoint)
        _restore_callbacks(trainer, checkpoint)
        loops = checkpoint["loops"]["fit_loop"]
        if self.loaders.states:
            loops["state_dict"] |= {_LOADERS: self.loaders.states}
        trainer.fit_loop.load_state_dict(loops)
        if not _is_in_mid_epoch(trainer):
            # Trainer takes any run with `max_steps` for one that goes on in its epoch.
            _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]

    def _plugins(self) -> list[Any]:
        plugins = (self._trainer.datamodule, self._trainer.precision_plugin)
        return [plugin for plugin in plugins if plugin is not None]


def _restore_callbacks(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Give callbacks their states from a checkpoint."""
    for callback in trainer.callbacks:
        if state := checkpoint["callbacks"].get(callback.state_key):
            callback.load_state_dict(copy.deepcopy(state))


def _is_in_mid_epoch(trainer: Any) -> bool:
    """Return whether the current epoch has further batches."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return batches.current.ready > 0 and not batches.is_last_batch


def _restore_loaders(trainer: Any, states: Sequence[Any], random: Any) -> None:
    """Give loaders their states, and begin to iterate as the run did.

    Trainer does so in the middle of an epoch only, and before samplers know of their epoch.

    Args:
        trainer: which has made the loaders.
        states: states of the loaders that have one.
        random: the state of the run's random numbers.
    """
    loop = trainer.fit_loop
    if _is_in_mid_epoch(trainer) and _has_wrapped_sampler(loop._combined_loader.flattened):
        logger.warning(
            "the rest of this epoch may repeat rows and leave others out: Trainer has wrapped the "
            "sampler of a data loader for its ranks, and the state of the loader does not have its "
            "order. Give the loader a DistributedSampler, whose order depends on its seed and epoch"
        )
    loaders = []
    for item in loop._combined_loader.flattened:
        if hasattr(item, "state_dict"):
            loaders.append(item)
    for loader, state in zip(loaders, states, strict=True):
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        loader.load_state_dict(state)
        # Trainer asks for no more than the last batch, after which nothing is left of the epoch.
        if not _is_in_mid_epoch(trainer) and next(iter(loader), None) is not None:
            loader.load_state_dict(state)
    RngState().load_state_dict(random)
    iter(loop._data_fetcher)  # as Trainer begins an epoch


def _has_wrapped_sampler(loaders: Iterable[Any]) -> bool:
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
        if any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers):
            return True
    return False


def _start_at_first_batch(trainer: Any) -> bool:
    """Return whether iterators of loaders are lazy until a batch is due.

    Such iterators are generators.
    """
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return any(inspect.isgeneratorfunction(type(loader).__iter__) for loader in loaders)
