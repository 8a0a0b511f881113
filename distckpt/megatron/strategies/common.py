"""Megatron's names for common state, which distckpt keeps with the sharded objects."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from distckpt._base.errors import CheckpointingException
from distckpt._foreign.torch_dist.reader import COMMON_NAME as COMMON_STATE_FNAME
from distckpt.mapping._wrappers import CommonStateDict, StateDict
from distckpt.megatron._queries import (
    CkptShardedMetadata,
    load_common_state_dict,
    load_sharded_metadata,
)
from distckpt.megatron.strategies.base import LoadCommonStrategy, SaveCommonStrategy

__all__ = [
    "COMMON_STATE_FNAME",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "load_common",
    "save_common",
]


def load_common(checkpoint_dir: str | os.PathLike[str]) -> CommonStateDict:
    """Load common state, as `load_common_state_dict` does."""
    return load_common_state_dict(checkpoint_dir)


def save_common(common_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]) -> NoReturn:
    """Raise CheckpointingException: `distckpt.save` stores common state with everything else."""
    del common_state_dict
    raise CheckpointingException(
        f"Common state is not saved on its own (to {checkpoint_dir!r}): pass it to distckpt.save "
        "in the state dict."
    )


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Load common state, and descriptions of stored tensors and objects."""

    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> CommonStateDict:
        """Load common state, as `load_common_state_dict` does."""
        return load_common(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> CkptShardedMetadata:
        """Describe the stored tensors and objects, as `load_sharded_metadata` does."""
        return load_sharded_metadata(checkpoint_dir)


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Refuse to save common state on its own."""

    def __init__(self, *args: Any) -> None:
        save_common({}, "a directory of its own")

    def save_common(
        self, common_state_dict: CommonStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> NoReturn:
        save_common(common_state_dict, checkpoint_dir)
