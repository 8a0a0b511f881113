"""Resume transformers.Trainer with any number of processes: its counters, its order of data, and
all tensors.

    torchrun --standalone --nproc-per-node 2 examples/trainers/transformers_trainer.py \
        --work-dir /tmp/trainer

Trainer keeps its own directories `checkpoint-<step>` with its state; the one that is imported here
writes the model, the optimizer and the scheduler into them as a checkpoint of distckpt. Each device
has a part of one global batch, so that another number of devices sees the same rows.
"""

import os

import torch
from _common import GLOBAL_BATCH, arguments
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from distckpt.integrations.transformers import Trainer


class Counting(Dataset):
    """Rows of numbers that go up by one."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        row = (index + torch.arange(8)) % 32
        return {"input_ids": row, "labels": row}


class StopAt(TrainerCallback):
    """Stops before the end, as if the job had been killed."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


options = arguments()
torch.manual_seed(0)
sizes = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
training = TrainingArguments(
    output_dir=options.work_dir,
    max_steps=6,
    per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", 1)),
    learning_rate=0.01,
    save_steps=1,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=8, **sizes))
trainer = Trainer(model, training, train_dataset=Counting())
newest = get_last_checkpoint(options.work_dir) if os.path.isdir(options.work_dir) else None
trainer.add_callback(StopAt(options.until))
trainer.train(resume_from_checkpoint=newest)
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(
                f"step {entry['step'] - 1}: loss {float(entry['loss']):.6f} epoch {entry['epoch']}"
            )
