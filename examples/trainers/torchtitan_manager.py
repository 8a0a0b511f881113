"""Resume torchtitan with any number of processes: a checkpoint manager for its Trainer.

    torchrun --standalone --nproc-per-node 2 examples/trainers/torchtitan_manager.py \
        --work-dir /tmp/torchtitan

`Checkpoints.Config(enable=True)` is what a program gives as `checkpoint` in the config of
torchtitan's Trainer. The loop here uses optimizers and schedulers of torchtitan, without its
Trainer and data loader.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from _common import arguments, loss_of, make_model, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not torch.accelerator.is_available():
    torch._utils._get_available_device_type = lambda: (
        "cpu"
    )  # torchtitan asks it when imported, and takes None for CUDA

from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import distckpt


class Checkpoints(BaseCheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass

    def __init__(
        self,
        config,
        *,
        dataloader,
        model_parts,
        optimizers,
        lr_schedulers,
        states,
        sd_adapter=None,
        base_folder=".",
    ) -> None:
        self.enable, self.config, self.save_future = config.enable, config, None
        if config.initial_load_path or config.initial_load_in_hf or config.last_save_in_hf:
            raise ValueError(
                "Checkpoints has no initial_load_path, initial_load_in_hf and last_save_in_hf."
            )
        if config.export_dtype != "float32":
            raise ValueError("Checkpoints saves the dtypes of the model: leave out export_dtype.")
        if len(model_parts) > 1:
            raise ValueError(
                "Checkpoints takes one model part on each rank: use a schedule with one stage on "
                "each."
            )
        self.manager = distckpt.CheckpointManager(
            f"{base_folder}/{config.folder}", keep_last=config.keep_latest_k or None
        )
        self.model = {"model": model_parts[0]}
        others = {
            "optimizer": list(optimizers),
            "dataloader": dataloader,
            "lr_scheduler": list(lr_schedulers),
        }
        self.states = {**states, **self.model, **others}
        if unknown := set(config.exclude_from_loading) - self.states.keys():
            raise ValueError(
                f"exclude_from_loading names {sorted(unknown)}: the states are {list(self.states)}."
            )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or is_first or curr_step % config.interval == 0):
            return False
        states = self.model if last_step and config.last_save_model_only else self.states
        self.save_future = self.manager.save(curr_step, states)
        return True

    def _load(self, step: int = -1) -> bool:
        steps = self.manager.steps()
        if step == -1 and not steps:
            return False
        is_seed = (steps[-1] if step == -1 else step) == 0  # a seed checkpoint has a model alone
        excluded = self.config.exclude_from_loading
        states = (
            self.model
            if is_seed
            else {key: at for key, at in self.states.items() if key not in excluded}
        )
        self.manager.load(states, None if step == -1 else step)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: `save` returns when the tensors may be changed."""

    def _wait_for_saving(self) -> None:
        self.save_future.result()
        self.save_future = None

    def _close(self) -> None:
        self.manager.close()


class TrainState:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state) -> None:
        self.step = state["step"]


options = arguments()
dist.init_process_group("gloo")
model_parts = [fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))]
optimizers = default_adamw(lr=0.01).build(model_parts=model_parts)
lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
    optimizers=optimizers, training_steps=6
)
train_state = TrainState()
checkpointer = Checkpoints.Config(enable=True, interval=1, last_save_model_only=False).build(
    dataloader=None,
    model_parts=model_parts,
    optimizers=optimizers,
    lr_schedulers=lr_schedulers,
    states={"train_state": train_state},
    base_folder=options.work_dir,
)

checkpointer.load()
while train_state.step < options.until:
    loss = loss_of(model_parts[0], train_state.step, dist.get_rank(), dist.get_world_size())
    loss.backward()
    optimizers.step()
    lr_schedulers.step()
    optimizers.zero_grad()
    report(train_state.step, loss)
    train_state.step += 1
    checkpointer.save(train_state.step, last_step=train_state.step == options.until)
checkpointer.close()
dist.destroy_process_group()
