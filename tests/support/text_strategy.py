"""A format of a user: strategies that store whole tensors as text."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch

from distckpt import ShardedTensor
from distckpt.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)


class SaveText(SaveShardedStrategy):
    """Stores whole tensors as lists of numbers in one JSON file."""

    backend = "text"
    version = 3

    def save(self, sharded_state_dict, checkpoint_dir):
        content = {}
        for shard in sharded_state_dict.values():
            is_tensor = isinstance(shard, ShardedTensor)
            content[shard.key] = (
                shard.data.tolist() if is_tensor else pickle.dumps(shard.data).hex()
            )
        Path(checkpoint_dir, "all.json").write_text(json.dumps(content))
        return {"num_shards": len(content)}


class LoadText(LoadShardedStrategy):
    backend = "text"
    version = 3

    def load(self, sharded_state_dict, checkpoint_dir):
        content = json.loads(Path(checkpoint_dir, "all.json").read_text())
        return {
            name: torch.tensor(content[shard.key])
            if isinstance(shard, ShardedTensor)
            else pickle.loads(bytes.fromhex(content[shard.key]))
            for name, shard in sharded_state_dict.items()
        }

    def load_tensors_metadata(self, checkpoint_dir):
        content = json.loads(Path(checkpoint_dir, "all.json").read_text())
        tensors = {
            key: torch.tensor(value) for key, value in content.items() if isinstance(value, list)
        }
        return {
            key: ShardedTensor.from_rank_offsets(key, t).without_data()
            for key, t in tensors.items()
        }

    def load_sharded_metadata(self, checkpoint_dir):
        return self.load_tensors_metadata(checkpoint_dir)


def register_text() -> None:
    """Register the two strategies under their backend and version."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3, SaveText())
    register_default_strategy(StrategyAction.LOAD_SHARDED, "text", 3, LoadText())
