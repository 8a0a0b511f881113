"""Train on 4 processes, and generate in two inference engines with each version of the weights.

    python examples/rl_weight_sync.py --work-dir /tmp/rl_weight_sync

Three jobs run at once, each with a process group of its own: a trainer at tensor parallel 2 x data
parallel 2, an engine on one process, and an engine at tensor parallel 2. Engines know an address
and the Hugging Face directory that training begins with. They record their weight loader once, and
a `Route` fills their parameters from the memories of the trainer, without a gather or files.

To check it, the trainer exports each version as well, and each engine has a second model that loads
these files: losses and generated tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import _tiny_lm
import torch
import torch.distributed as dist
import torch.multiprocessing
from _tiny_lm import CONTEXT, Layout, TinyLM, cross_entropy, make_layout
from _tiny_training import draw_batch, train
from torch import Tensor
from train_reshard_resume import Trainer, export

import distckpt
from distckpt.rules import Unstack

JOBS = {"trainer": (2, 2), "engine at TP1": (1, 1), "engine at TP2": (2, 1)}  # tp, dp
NUM_VERSIONS, STEPS, PROMPT = 3, 5, 48
RULES = [Unstack("decoder.layers.**", "decoder.layers.{i}.{0}")]


class Engine(TinyLM):
    """A model that generates. It has a weight loader, as the models of vLLM and SGLang have."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's part of each stored tensor into the parameters."""
        modules = dict(self.named_modules())
        for name, tensor in weights:
            module, _, own_name = name.removeprefix("decoder.").rpartition(".")
            axis = modules[module]._split_axes[own_name]
            part = tensor if axis is None else tensor.chunk(self.tp.size, axis)[self.tp.rank]
            getattr(modules[module], own_name).data.copy_(part)

    @torch.no_grad()
    def generate(self) -> tuple[list[int], float]:
        """Continue a prompt with the likeliest tokens; return them, and the loss on the text."""
        text = draw_batch(torch.Generator().manual_seed(4))[0][0, :1]
        tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
        tokens[0, :PROMPT] = text[0, :PROMPT]
        for place in range(PROMPT, CONTEXT):
            logits = self(tokens, 0)[0, place - 1]
            parts = [torch.empty_like(logits) for _ in range(self.tp.size)]
            if self.tp.size > 1:
                dist.all_gather(parts, logits, group=self.tp.group)
            else:
                parts = [logits]
            tokens[0, place] = torch.cat(parts).argmax()
        loss = cross_entropy(self(text[:, :-1], 0), text[:, 1:], self.tp)
        return tokens[0, PROMPT:].tolist(), loss.item()


def run_trainer(layout: Layout, address: str, work_dir: Path) -> dict[str, list[float]]:
    """Train, and give each version to the engines."""
    trainer = Trainer(layout, seed=1)
    source = trainer.model.sharded_state_dict()
    losses = []
    with distckpt.Route(address, source=source, rules=RULES, num_targets=3) as route:
        for version in range(NUM_VERSIONS):
            losses += train(trainer, until=version * STEPS)
            # To compare with: the move does not need it.
            trainer.save(work_dir / "checkpoint")
            export(work_dir / "checkpoint", work_dir / f"version_{version}")
            route.run(version=version)
    return {"losses": losses}


def run_engine(layout: Layout, address: str, work_dir: Path) -> dict[str, list]:
    """Take each version, and generate with it, and with a model that has read it from files."""
    _tiny_lm.DROPOUT = 0.0
    engine, other = Engine(layout, seed=2), Engine(layout, seed=3)
    target = distckpt.record_loader(engine.load_weights, work_dir / "start")
    results, expected = [], []
    with distckpt.Route(address, target=target) as route:
        for version in range(NUM_VERSIONS):
            report = route.run(version=version)
            results.append((*engine.generate(), report.num_bytes))
            files = work_dir / f"version_{version}"
            other.load_weights(distckpt.engines.stream_tensors(files))
            expected.append((*other.generate(), report.num_bytes))
    return {"results": results, "expected": expected}


def run_process(number: int, address: str, work_dir: Path, stores: str) -> None:
    """Run one process of a job."""
    torch.set_num_threads(1)
    places = [(job, rank) for job, (tp, dp) in JOBS.items() for rank in range(tp * dp)]
    job, rank = places[number]
    tp, dp = JOBS[job]
    store = f"file://{stores}/{job.replace(' ', '_')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=tp * dp)
    run_job = run_trainer if job == "trainer" else run_engine
    found = run_job(make_layout(tp, 1, dp), address, work_dir)
    if rank == 0:
        (work_dir / f"{job}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the files")
    work_dir: Path = parser.parse_args().work_dir
    Trainer(Layout(), seed=1).save(work_dir / "checkpoint")
    export(work_dir / "checkpoint", work_dir / "start")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as stores:
        torch.multiprocessing.spawn(run_process, (address, work_dir, stores), nprocs=7)
    found = {job: json.loads((work_dir / f"{job}.json").read_text()) for job in JOBS}
    losses = found.pop("trainer")["losses"]
    print(f"trained on 4 processes: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    for job, outcome in found.items():
        for version, (tokens, loss, num_bytes) in enumerate(outcome["results"]):
            print(f"{job}, version {version}: loss {loss:.4f}, {num_bytes} bytes, {tokens[:4]}")
    is_ok = all(each["results"] == each["expected"] for each in found.values())
    print(f"losses and tokens {'equal' if is_ok else 'DIFFER FROM'} those from files")
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
