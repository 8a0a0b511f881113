"""Resume Lightning's Trainer with any number of processes.

    torchrun --standalone --nproc-per-node 2 examples/trainers/lightning_trainer.py \
        --work-dir /tmp/lightning

The callback is what a program adds. An epoch here has one step.
"""

import os

import lightning
import torch
from _common import arguments, loss_of, make_model, report

from distckpt.integrations.lightning import Checkpoints


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, index):
        loss = loss_of(self.net, self.current_epoch, self.global_rank, self.trainer.world_size)
        report(self.current_epoch, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


options = arguments()
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    max_epochs=options.until,
    callbacks=[Checkpoints(options.work_dir)],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(Task(), torch.utils.data.DataLoader(range(trainer.world_size)))
