#!/usr/bin/env bash
# Lightning 2.6.6: a run with max_steps that resumes from the checkpoint of the end of an epoch trains
# one batch more as that epoch, and moves all later epochs by it.
#
# Expected: ModelCheckpoint(save_on_train_epoch_end=True), epochs of 4 batches, the checkpoint of the
# first epoch; a run of 3 epochs that resumes from it trains epochs 1 and 2, 8 batches, with and without
# max_steps=12, which it does not exceed.
# Seen: with max_steps it trains a fifth batch of epoch 0, then epoch 1, and ends: 5 batches, no error.
# `FitLoop.restarting` is True after any load of a Trainer with max_steps, also where no epoch is under
# way.
# Source: the setter of `restarting` in lightning/pytorch/loops/fit_loop.py.
# Matters to: everybody who limits the steps of a run and resumes it from the end of an epoch.
#
# Fails when the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 lightning==2.6.6
cd "$folder"
cat > train.py <<'PYTHON'
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.epochs = []

    def training_step(self, batch, index):
        self.epochs.append(self.current_epoch)
        return self.layer(batch.float()[:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def epochs_trained(checkpoint=None, **limits):
    saves = ModelCheckpoint(
        "saved", filename="{step}", save_on_train_epoch_end=True, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=[saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False, **limits,
    )
    task = Task()
    trainer.fit(task, DataLoader(range(4), batch_size=1), ckpt_path=checkpoint)
    return task.epochs


epochs_trained(max_epochs=1)
without = epochs_trained("saved/step=4.ckpt", max_epochs=3)
limited = epochs_trained("saved/step=4.ckpt", max_epochs=3, max_steps=12)
print(f"epochs of the batches after the resume: {without}, with max_steps=12: {limited}")
sys.exit(0 if (without, limited) == ([1] * 4 + [2] * 4, [0] + [1] * 4) else 1)
PYTHON
venv/bin/python train.py 2> log || { cat log; echo "the behavior has changed"; exit 1; }
