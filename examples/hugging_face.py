"""Load a Hugging Face model into FSDP2 on 2 processes, train, save, and export it again.

    torchrun --standalone --nproc-per-node 2 examples/hugging_face.py --work-dir /tmp/hugging_face

The model is a tiny Llama with random weights; any `transformers` model works the same way. Each
process creates the model on the meta device, shards it, and reads its slices of
`model.safetensors`. After training, the checkpoint is exported to a directory for
`from_pretrained`; no process ever holds the entire model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import distckpt

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def make_tokens(step: int) -> Tensor:
    """Make training data, [8, 32]: numbers that increase by one."""
    first = torch.randint(128, (8, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(32)) % 128


def load_divided(source: Path) -> torch.nn.Module:
    """Load a Hugging Face model of which this process holds only its shards."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(source), dtype=torch.float32
        )
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    # No file has the table of rotary frequencies: it is computed.
    distckpt.load({"model": model}, source, family="auto", materialize="cpu")
    return model


def train(model: torch.nn.Module, num_steps: int) -> list[float]:
    """Train on half of each batch per process; return the losses averaged over both."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(num_steps):
        tokens = make_tokens(step)[rank::size]
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work-dir", required=True, type=Path, help="where to put models and checkpoint"
    )
    work_dir: Path = parser.parse_args().work_dir
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    source, checkpoint, target = (
        work_dir / "pretrained",
        work_dir / "step_20",
        work_dir / "exported",
    )
    if rank == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(source)
    dist.barrier()

    model = load_divided(source)
    losses = train(model, num_steps=20)
    distckpt.save({"model": model}, checkpoint, overwrite=True)
    report = distckpt.consolidate(checkpoint, target, family="auto", like=source, overwrite=True)

    tokens = make_tokens(100)
    divided = model(
        input_ids=tokens, labels=tokens
    ).loss.item()  # on both ranks: FSDP gathers the weights
    if rank == 0:
        exported = AutoModelForCausalLM.from_pretrained(target)
        whole = exported(input_ids=tokens, labels=tokens).loss.item()
        print(
            f"loss {losses[0]:.4f} with the weights that were loaded, {losses[-1]:.4f} after "
            f"{len(losses)} steps"
        )
        print(f"exported {report.num_tensors} tensors to {', '.join(report.files)}")
        print(f"on other text: {divided:.6f} with FSDP2, {whole:.6f} with from_pretrained")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
