"""Save with the arguments of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import SaveReport
from distckpt._operations.background_save import async_save as save_in_background
from distckpt._operations.save import save as save_now
from distckpt._ranks.collectives import Ranks, collective
from distckpt.dcp import _arguments as arguments
from distckpt.dcp import _state_dicts as state_dicts


@collective(arguments.group_of)
def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveReport:
    """Save a state dict that `torch.distributed.checkpoint.save` takes.

        dcp.save({"model": model.state_dict(), "step": 100}, checkpoint_id="checkpoints/step_100")

    A checkpoint that is there is replaced, as PyTorch's writer does by default; it stays until the
    new one is complete.

    Collective operation: all ranks of the process group must call it, unless `no_dist` is set.

    Args:
        state_dict: nested dicts and lists of DTensors, other tensors (the same on all ranks that
            have them), and values that are saved as objects. Values at the top that have
            `state_dict` and `load_state_dict` are replaced by their state dicts.
        checkpoint_id: a path or fsspec URL.
        storage_writer: a `FileSystemWriter` or `FsspecWriter` of PyTorch, whose path is used when
            `checkpoint_id` is not given; its `overwrite` and `sync_files` are used too.
        planner: None or a `DefaultSavePlanner`.
        process_group: the ranks that save together; None for the default group.
        no_dist: save from this process alone.
        use_collectives: must be True.

    Returns:
        A report of the saved data and the time it took (PyTorch returns its metadata).

    Raises:
        InvalidShardingError: a DTensor is a partial sum, or two values have one key.
        UnsupportedObjectError: a value is of a class that is not registered, see
            `distckpt.register_object_type`.
        CheckpointExistsError: a checkpoint is there and the writer's `overwrite` is False.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    arguments.check_planner(planner, "DefaultSavePlanner")
    converted = _save_arguments(
        state_dict, checkpoint_id, storage_writer, process_group, no_dist, use_collectives
    )
    return save_now(**converted)


@collective(arguments.group_of)
def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[SaveReport]:
    """Save like `save`, in the background. Tensors may change as soon as this returns.

        future = dcp.async_save(state, checkpoint_id="checkpoints/step_100")
        ...              # train on
        future.result()  # raises an error of any rank

    Collective operation: all ranks of the process group must call it, unless `no_dist` is set.

    All further arguments are as in `save`.

    Args:
        async_checkpointer_type: accepted and ignored: no process is started.
        async_stager: must be None: tensors are copied before this returns.

    Returns:
        The future of the result of `save`. When the save fails and the result is never read, the
        next save raises the error.

    Raises:
        CheckpointingException: as `save` does, for errors found before anything is written.
    """
    del async_checkpointer_type
    arguments.check_planner(planner, "DefaultSavePlanner")
    if async_stager is not None:
        raise CheckpointingException(
            f"async_stager ({type(async_stager).__name__}) must be None: distckpt copies what it "
            "saves itself, into memory that it uses again. Leave it out; distckpt.async_save can "
            "limit that memory."
        )
    return save_in_background(
        **_save_arguments(
            state_dict, checkpoint_id, storage_writer, process_group, no_dist, use_collectives
        )
    )


def _save_arguments(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: Any,
    process_group: Any,
    no_dist: bool,
    use_collectives: bool,
) -> dict[str, Any]:
    """Convert the arguments to those for `distckpt.save`."""
    if not use_collectives:
        raise CheckpointingException(
            "use_collectives must be True: ranks agree on what is saved and commit it together. "
            "To save from one process alone pass no_dist=True."
        )
    group = arguments.group_of(process_group=process_group, no_dist=no_dist)
    ranks = Ranks(group)
    with ranks.phase("collect the state dicts"):
        location = arguments.location_in(checkpoint_id, storage_writer, "storage_writer")
        values = state_dicts.unwrap_stateful(state_dict)
    return {
        "state_dict": state_dicts.sharded(values, ranks),
        "path": location,
        "overwrite": getattr(storage_writer, "overwrite", True),
        "durable": getattr(storage_writer, "sync_files", True),
        "process_group": group,
    }
