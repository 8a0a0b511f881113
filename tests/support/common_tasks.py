"""The 20 commonest tasks with checkpoints, as programs of five libraries: what is counted in
docs/compared.md.

Each has what a training script has: `model`, `optimizer`, `scheduler` and `step`. Imports are not
counted. What a library does not have is left out.
"""

from __future__ import annotations

COMMON = {
    "distckpt": """
import distckpt
from distckpt import CheckpointManager, PreemptionGuard, RngState
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}
""",
    "DCP": """
import glob, shutil
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint import HuggingFaceStorageWriter
""",
    "accelerate": """
import glob
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file, safe_open
accelerator = Accelerator(cpu=True)
settings = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
""",
    "Fabric": """
import glob, os
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
model, optimizer = fabric.setup(model, optimizer)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}
""",
    "Orbax": """
import os
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file, save_file
here = os.getcwd()
params = {name: jnp.asarray(tensor.numpy()) for name, tensor in model.state_dict().items()}
state = {"params": params, "moments": jax.tree.map(jnp.zeros_like, params), "step": step}
checkpointer, background = ocp.PyTreeCheckpointer(), ocp.StandardCheckpointer()
""",
}
"""What each program begins with; `state` is what a loop keeps anyway."""

SAVE, RESUME = "save model, optimizer, scheduler and step", "resume from it"
TASKS: dict[str, dict[str, str]] = {
    SAVE: {
        "distckpt": 'distckpt.save(state, "one")',
        "DCP": """
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": step}
dcp.save(state, checkpoint_id="one")
""",
        "accelerate": """
with open("step.txt", "w") as file: file.write(str(step))
accelerator.save_state("one")
""",
        "Fabric": 'fabric.save("one.ckpt", state)',
        "Orbax": 'checkpointer.save(f"{here}/one", state)',
    },
    RESUME: {
        "distckpt": 'distckpt.load(state, "one")',
        "DCP": """
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": 0}
dcp.load(state, checkpoint_id="one")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
""",
        "accelerate": """
accelerator.load_state("one")
step = int(open("step.txt").read())
""",
        "Fabric": 'fabric.load("one.ckpt", state)',
        "Orbax": 'state = checkpointer.restore(f"{here}/one", item=state)',
    },
    "save in the background": {
        "distckpt": 'handle = distckpt.async_save(state, "background")',
        "DCP": """
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": step}
handle = dcp.async_save(state, checkpoint_id="background")
handle.result()
""",
        "Orbax": 'background.save(f"{here}/background", state)',
    },
    "with the random numbers of each rank": {
        "distckpt": 'distckpt.save(state | {"rng": RngState()}, "with_rng")',
        "accelerate": 'accelerator.save_state("with_rng")',
        "Orbax": ('checkpointer.save(f"{here}/with_rng", state | {"key": jax.random.PRNGKey(0)})'),
    },
    "save a step of a run, keep the newest 3": {
        "distckpt": """
manager = CheckpointManager("run", keep_last=3)
manager.save(step, state)
""",
        "DCP": """
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": step}
dcp.save(state, checkpoint_id=f"run/step_{step:08d}")
for old in sorted(glob.glob("run/step_*"))[:-3]:
    shutil.rmtree(old)
""",
        "accelerate": """
accelerator.project_configuration = settings
accelerator.save_state()
""",
        "Fabric": """
fabric.save(f"run/step_{step:08d}.ckpt", state)
for old in sorted(glob.glob("run/step_*"))[:-3]:
    os.remove(old)
""",
        "Orbax": """
manager = ocp.CheckpointManager(f"{here}/run", options=ocp.CheckpointManagerOptions(max_to_keep=3))
manager.save(step, args=ocp.args.StandardSave(state))
""",
    },
    "resume from the newest whole step": {
        "distckpt": "manager.load(state)",
        "DCP": """
newest = sorted(glob.glob("run/step_*/.metadata"))[-1].removesuffix("/.metadata")
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": 0}
dcp.load(state, checkpoint_id=newest)
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
""",
        "accelerate": "accelerator.load_state()",
        "Fabric": 'fabric.load(sorted(glob.glob("run/step_*"))[-1], state)',
        "Orbax": (
            "state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))"
        ),
    },
    "keep the best steps by a metric": {
        "distckpt": """
best = CheckpointManager("best", keep_last=1, best_metric="loss", keep_best=2)
best.save(step, state, metrics={"loss": 0.5})
""",
        "Orbax": """
by_loss = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda m: m["loss"], best_mode="min")
best = ocp.CheckpointManager(f"{here}/best", options=by_loss)
best.save(step, args=ocp.args.StandardSave(state), metrics={"loss": 0.5})
""",
    },
    "load the weights alone": {
        "distckpt": 'distckpt.load({"model": model}, "one")',
        "DCP": """
weights = get_model_state_dict(model)
dcp.load({"model": weights}, checkpoint_id="one")
model.load_state_dict(weights)
""",
        "accelerate": 'model.load_state_dict(load_file("one/model.safetensors"))',
        "Fabric": 'fabric.load("one.ckpt", {"model": model})',
        "Orbax": """
some = ocp.args.PyTreeRestore({"params": params}, partial_restore=True)
params = checkpointer.restore(f"{here}/one", args=some)["params"]
""",
    },
    "stop on SIGTERM, all ranks at one step": {
        "distckpt": """
guard = PreemptionGuard().__enter__()
if guard.should_stop():
    manager.save(step, state).result()
""",
        "Orbax": """
if manager.reached_preemption(step):
    manager.save(step, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
""",
    },
    "list the steps with sizes and metrics": {"distckpt": 'distckpt.list_checkpoints("run")'},
    "list keys, shapes and dtypes": {
        "distckpt": 'distckpt.open("one").tensors',
        "DCP": 'FileSystemReader("one").read_metadata().state_dict_metadata',
        "accelerate": 'list(safe_open("one/model.safetensors", "pt").keys())',
        "Fabric": 'torch.load("one.ckpt").keys()',
        "Orbax": 'checkpointer.metadata(f"{here}/one").item_metadata.tree',
    },
    "read one tensor without the model": {
        "distckpt": 'distckpt.open("one").read("0.weight")',
        "DCP": """
weights = {"model": {"0.weight": torch.empty(64, 16)}}
dcp.load(weights, checkpoint_id="one")
""",
        "accelerate": 'safe_open("one/model.safetensors", "pt").get_tensor("0.weight")',
        "Fabric": 'torch.load("one.ckpt")["model"]["0.weight"]',
        "Orbax": """
some = ocp.args.PyTreeRestore({"params": {"0.weight": 0}}, partial_restore=True)
checkpointer.restore(f"{here}/one", args=some)["params"]["0.weight"]
""",
    },
    "read the step without the model": {
        "distckpt": 'distckpt.open("one").common_state["step"]',
        "DCP": """
state = {"step": 0}
dcp.load(state, checkpoint_id="one")
""",
        "accelerate": 'int(open("step.txt").read())',
        "Fabric": 'torch.load("one.ckpt")["step"]',
        "Orbax": """
some = ocp.args.PyTreeRestore({"step": 0}, partial_restore=True)
checkpointer.restore(f"{here}/one", args=some)["step"]
""",
    },
    "find damage": {"distckpt": 'distckpt.verify("one").problems'},
    "compare two checkpoints": {"distckpt": 'distckpt.diff("one", "with_rng")'},
    "make one file for other programs": {
        "distckpt": 'distckpt.consolidate("one", "exported")',
        "DCP": 'dcp_to_torch_save("one", "whole.pt")',
        "accelerate": 'accelerator.save_model(model, "exported")',
        "Fabric": 'torch.save(torch.load("one.ckpt")["model"], "whole.pt")',
        "Orbax": """
whole = checkpointer.restore(f"{here}/one")["params"]
save_file(jax.tree.map(np.asarray, whole), "whole.safetensors")
""",
    },
    "start from a Hugging Face directory": {
        "distckpt": 'distckpt.load({"model": model}, "hf")',
        "DCP": """
weights = get_model_state_dict(model)
dcp.load(weights, storage_reader=HuggingFaceStorageReader("hf"))
model.load_state_dict(weights)
""",
        "accelerate": 'model.load_state_dict(load_file("hf/model.safetensors"))',
        "Orbax": 'params = jax.tree.map(jnp.asarray, load_file("hf/model.safetensors"))',
    },
    "average three checkpoints": {
        "distckpt": 'distckpt.merge(["one", "with_rng", "background"], "average")',
    },
    "drop the optimizer of an old step": {
        "distckpt": 'distckpt.reshard("one", "one", keys="!optimizer.", overwrite=True)',
    },
    "replace a checkpoint, the old one stays until the new one is whole": {
        "distckpt": 'distckpt.save(state, "one", overwrite=True)',
    },
}


def num_lines(program: str | None) -> str:
    """Return how many lines a program has, as the table shows it."""
    return "" if program is None else str(len(program.strip().splitlines()))
