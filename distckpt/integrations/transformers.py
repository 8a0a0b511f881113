"""Checkpoints of transformers' Trainer: a program changes its import and nothing else."""

from __future__ import annotations

import os
from typing import Any

import transformers

from distckpt._operations.load import load
from distckpt._operations.save import save

__all__ = ["Trainer"]


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` whose checkpoints any number of processes resumes.

        from distckpt.integrations.transformers import Trainer  # was: from transformers

        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=True)

    In each `checkpoint-<step>` the model, the optimizer and the scheduler are one checkpoint of
    distckpt, `state`; the rest is as `transformers` writes it. With `save_only_model=True`, and
    with DeepSpeed, checkpoints have the form of `transformers`, and can be resumed and loaded, too.

    Another trainer gets it as its first base: `class MyTrainer(Trainer, SFTTrainer)`.
    """

    def training_state(self) -> dict[str, Any]:
        """Return the state to save and load: objects by name, to which a subclass may add."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the model, for `from_pretrained`; for a checkpoint, save the training state."""
        if not _internal_call or self.args.save_only_model or self.is_deepspeed_enabled:
            super().save_model(output_dir, _internal_call)
        else:
            # Before Trainer looks whether the checkpoint of the best model exists.
            save(self.training_state(), f"{output_dir}/state", overwrite=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The model is loaded together with the optimizer, once that exists.
        if not _has_state(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if _has_state(checkpoint):
            load(self.training_state(), f"{checkpoint}/state")
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _has_state(best):
            load({"model": self.model}, f"{best}/state")
        else:
            super()._load_best_model()


def _has_state(checkpoint: str | None) -> bool:
    return checkpoint is not None and os.path.isdir(f"{checkpoint}/state")
