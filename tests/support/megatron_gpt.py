"""Megatron Core's GPT model on a few ranks, and checkpoints of it that Megatron writes.

Every element of the model has a value that follows from its key and its place in the global tensor,
so any layout can be checked alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import multiprocessing
import os
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or not hasattr(np, "dtypes"),
    reason="megatron-core is not installed (it is part of the test extra), or lacks numpy 1.25",
)

TIMEOUT = 85.0
"""Of the process group, in seconds: each rank imports Megatron."""


def megatron(name=""):
    """Import a part of Megatron, which imports much and warns of much."""
    warnings.simplefilter("ignore")
    return importlib.import_module(f"megatron.core{name}")


def make_model(tp, pp):
    """Make a small GPT model on the ranks of this group; its last pipeline stage has the output
    layer.
    """
    state = megatron(".parallel_state")
    state.destroy_model_parallel()
    state.initialize_model_parallel(tp, pp)
    specs = megatron(".models.gpt.gpt_layer_specs")
    config = megatron(".transformer.transformer_config").TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        add_bias_linear=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        perform_initialization=False,
    )
    return megatron(".models.gpt.gpt_model").GPTModel(
        config,
        specs.get_gpt_layer_local_spec(),
        vocab_size=40,
        max_sequence_length=8,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def leaves(tree):
    """Yield the sharded tensors of a state dict, those that factories build included; their data
    share memory.
    """
    for node in tree.values() if isinstance(tree, dict) else tree:
        if hasattr(node, "build_fn"):
            node = node.build()
        if isinstance(node, dict | list):
            yield from leaves(node)
        elif hasattr(node, "local_shape"):
            yield node


def whole(key, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=generator)


def local_part(shard):
    return whole(shard.key, shard.global_shape)[
        tuple(
            offset if axis < shard.prepend_axis_num else slice(offset, offset + size)
            for axis, (offset, size) in enumerate(
                zip(
                    shard.global_offset,
                    (1,) * shard.prepend_axis_num + tuple(shard.local_shape),
                    strict=True,
                )
            )
        )
    ]


def fill(model):
    with torch.no_grad():
        for shard in leaves(model.sharded_state_dict()):
            shard.data.copy_(local_part(shard))


def request_of(model):
    return {"model": model.sharded_state_dict()}


def save_with_megatron(rank, path):
    """Save with Megatron itself, in its own format, with what its training scripts put beside the
    model.
    """
    multiprocessing.current_process()._config["daemon"] = (
        False  # Megatron starts a process for every save.
    )
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    checkpointing = megatron(".dist_checkpointing")
    model = make_model(2, 1)
    fill(model)
    objects = {
        "rng": checkpointing.ShardedObject("rng", {"rank": rank}, (2,), (rank,)),
        "flags": checkpointing.ShardedObject(
            "a/flags", np.arange(3), (1, 1), (0, 0), replica_id=rank
        ),
        "hidden": checkpointing.ShardedObject(
            "hidden", io.BytesIO(b"state"), (1,), (0,), replica_id=rank
        ),
    }
    backend = megatron(".transformer.enums").AttnBackend.auto
    mode, config = (
        megatron(".rerun_state_machine").RerunMode.DISABLED,
        megatron(".optimizer").OptimizerConfig(lr=0.5),
    )
    args = argparse.Namespace(
        dtype=torch.bfloat16, backend=backend, betas=(0.9, 0.95), mode=mode, config=config
    )
    if rank == 0:
        Path(path).mkdir()
    dist.barrier()
    state = {
        **request_of(model),
        **objects,
        "iteration": 7,
        "args": args,
        "optimizer": {"groups": [{"lr": 0.1}]},
    }
    checkpointing.save(state, path, content_metadata={"layout": "plain"})
    return sorted(os.listdir(path))
