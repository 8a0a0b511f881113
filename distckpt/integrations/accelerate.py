"""Checkpoints of the objects that an Accelerator has prepared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from accelerate.utils import DistributedType

from distckpt._models.per_rank import RngState

__all__ = ["training_state"]

logger = logging.getLogger(__name__)

_HAVE_OWN_CHECKPOINTS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def training_state(accelerator: Any) -> dict[str, Any]:
    """Return the state that `accelerator.save_state` saves, for distckpt to save and load.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        state = {**training_state(accelerator), "step": 0}
        with distckpt.CheckpointManager("checkpoints") as manager:
            if manager.steps():
                manager.load(state)
            for step in range(state["step"], num_steps):
                train(step)
                manager.save(step + 1, {**state, "step": step + 1})

    Call it once all is prepared and registered. Any number of processes loads the checkpoint.

    Returns:
        By name: the models, optimizers and schedulers that are prepared, registered objects, data
        loaders with a state (`model` is the first one, `model_1` the second), the scaler, the
        random number generators, and the accelerator's counters: epochs of data loaders, batches
        whose gradients are accumulated.

    Raises:
        ValueError: the accelerator uses DeepSpeed or Megatron-LM, which save checkpoints of their
            own; or nothing is prepared or registered yet.
    """
    if accelerator.distributed_type in _HAVE_OWN_CHECKPOINTS:
        raise ValueError(
            f"{accelerator.distributed_type.value} saves checkpoints of its own: use "
            "accelerator.save_state. distckpt.open, load and consolidate read them."
        )
    if not (accelerator._models or accelerator._optimizers or accelerator._custom_objects):
        raise ValueError(
            "The accelerator has prepared no model, so none would be saved: call training_state "
            "after accelerator.prepare."
        )
    loaders = []
    for loader in accelerator._dataloaders:
        if loader.use_stateful_dataloader:
            loaders.append(loader)
    return {
        **_numbered("model", accelerator._models),
        **_numbered("optimizer", accelerator._optimizers),
        **_numbered("scheduler", accelerator._schedulers),
        **_numbered("registered", accelerator._custom_objects),
        **_numbered("data", loaders),
        **_numbered("scaler", [accelerator.scaler] if accelerator.scaler else []),
        "rng": RngState(),
        "counters": _Counters(accelerator),
    }


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    numbered = {}
    for number, item in enumerate(objects):
        key = f"{name}_{number}" if number else name
        numbered[key] = item
    return numbered


class _Counters:
    """The counters of an accelerator, which are the same on all ranks."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._num_prepared = self._count_prepared()

    def _count_prepared(self) -> int:
        own = self._accelerator
        return sum(map(len, (own._models, own._optimizers, own._schedulers, own._custom_objects)))

    def state_dict(self) -> dict[str, Any]:
        added = self._count_prepared() - self._num_prepared
        if added > 0 and self._accelerator.is_main_process:
            logger.warning(
                "the state that is saved lacks what was prepared or registered after "
                "training_state was called (%d objects): call it again, once all is prepared",
                added,
            )
        epochs = [loader.iteration for loader in self._accelerator._dataloaders]
        return {"step": self._accelerator.step, "epochs": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for loader, epoch in zip(self._accelerator._dataloaders, state["epochs"], strict=False):
            loader.set_epoch(epoch)
