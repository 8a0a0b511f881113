"""Names of other libraries, and what has their place here."""

from __future__ import annotations

_HERE = {
    "Checkpointer": "distckpt.save and distckpt.load, or distckpt.CheckpointManager",
    "PyTreeCheckpointer": "distckpt.save and distckpt.load, or distckpt.CheckpointManager",
    "StandardCheckpointer": "distckpt.save and distckpt.load, or distckpt.CheckpointManager",
    "CheckpointManagerOptions": "arguments of CheckpointManager",
    "all_steps": "steps()",
    "best_fn": "best_metric",
    "best_step": "best_metric and keep_best, or list_checkpoints",
    "checkpoint_id": "the path as it is",
    "dir": "the path as it is",
    "keep_last_n": "keep_last",
    "keep_period": "keep_every",
    "latest_step": "latest()",
    "load_checkpoint": "load",
    "load_state_dict": "load",
    "map_location": (
        "nothing: tensors are loaded to where those of the state dict are, modules on the meta "
        "device with materialize='cpu'"
    ),
    "max_to_keep": "keep_last",
    "no_dist": "nothing: without a process group, one process saves and loads",
    "restore": "load",
    "save_checkpoint": "save",
    "save_state_dict": "save",
    "save_total_limit": "keep_last",
    "wait_until_finished": "wait()",
    "weights_only": "nothing: no pickle is read",
}


def used_here(name: str) -> str:
    """Return ` (here: ...)` with what has the place of a name of another library, an empty string
    if the name is unknown.
    """
    return f" (here: {_HERE[name]})" if name in _HERE else ""
