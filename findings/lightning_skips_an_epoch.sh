#!/usr/bin/env bash
# Lightning 2.6.6 with torchdata 0.11.0: a run that resumes from a checkpoint of the last batch of an
# epoch trains nothing of the next epoch, and reports nothing.
#
# Expected: ModelCheckpoint(every_n_train_steps=6) with a StatefulDataLoader of 6 batches; a run of 4
# epochs that was cut in epoch 2 and goes on from step 12 makes 24 steps, as one that was not cut.
# Seen: it makes 18. The state of the loader is taken after its last batch and before it has said that
# its iteration has ended, so what is left of it is an empty epoch, which Trainer counts as a whole one.
# Source: `_Loop.restarting` and `FitLoop.setup_data` in lightning/pytorch/loops/fit_loop.py.
# Matters to: everybody who saves by steps and resumes with loaders that have a state.
#
# Fails when the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 lightning==2.6.6 torchdata==0.11.0
cd "$folder"
cat > train.py <<'PYTHON'
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.layer(batch.float()[:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def steps(epochs, checkpoint=None):
    saves = ModelCheckpoint("saved", filename="{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Task(), StatefulDataLoader(range(6), batch_size=1), ckpt_path=checkpoint)
    return trainer.global_step


whole = steps(4)
resumed = steps(4, "saved/step=12.ckpt")
print(f"steps of a whole run: {whole}, of a run that resumes after step 12: {resumed}")
sys.exit(0 if (whole, resumed) == (24, 18) else 1)
PYTHON
venv/bin/python train.py 2> log || { cat log; echo "the behavior has changed"; exit 1; }
