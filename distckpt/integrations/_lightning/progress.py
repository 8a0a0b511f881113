"""The state of Lightning's Trainer without the tensors of model and optimizers."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import lightning
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import CombinedLoader

from distckpt._models.per_rank import RngState

logger = logging.getLogger(__name__)

_LOADERS = "combined_loader"


class DataLoaders:
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


class Progress:
    """The state of a Trainer without its model, optimizers and schedulers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._loops = trainer.fit_loop.state_dict()
        self.loaders = DataLoaders(self._loops["state_dict"].pop(_LOADERS, []))
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
        for name, value in checkpoint.items():
            if value is weights:
                places.append(name)
        rest = {}
        for name, value in checkpoint.items():
            if name not in places:
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
        restore_callbacks(trainer, checkpoint)
        loops = checkpoint["loops"]["fit_loop"]
        if self.loaders.states:
            loops["state_dict"] |= {_LOADERS: self.loaders.states}
        trainer.fit_loop.load_state_dict(loops)
        if not is_in_mid_epoch(trainer):
            # Trainer takes any run with `max_steps` for one that goes on in its epoch.
            _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]

    def _plugins(self) -> list[Any]:
        plugins = (self._trainer.datamodule, self._trainer.precision_plugin)
        return [plugin for plugin in plugins if plugin is not None]


def restore_callbacks(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Give callbacks their states from a checkpoint."""
    for callback in trainer.callbacks:
        if state := checkpoint["callbacks"].get(callback.state_key):
            callback.load_state_dict(copy.deepcopy(state))


def is_in_mid_epoch(trainer: Any) -> bool:
    """Return whether the current epoch has further batches."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return batches.current.ready > 0 and not batches.is_last_batch


def restore_loaders(trainer: Any, states: Sequence[Any], random: Any) -> None:
    """Give loaders their states, and begin to iterate as the run did.

    Trainer does so in the middle of an epoch only, and before samplers know of their epoch.

    Args:
        trainer: which has made the loaders.
        states: states of the loaders that have one.
        random: the state of the run's random numbers.
    """
    loop = trainer.fit_loop
    if is_in_mid_epoch(trainer) and _has_wrapped_sampler(loop._combined_loader.flattened):
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
        if not is_in_mid_epoch(trainer) and next(iter(loader), None) is not None:
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


def start_at_first_batch(trainer: Any) -> bool:
    """Return whether iterators of loaders are lazy until a batch is due.

    Such iterators are generators.
    """
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return any(inspect.isgeneratorfunction(type(loader).__iter__) for loader in loaders)
