"""Makes `deepspeed_0_19.zip` with real DeepSpeed on CPUs: `python -m tests.data.make_deepspeed
NEW_FILE.zip zero1 zero2 zero3`, and with the other names `deepspeed_0_19_more.zip`.

Needs the package `deepspeed`, which no extra installs, and a C++ compiler. Beside the checkpoints
is in `<run>.safetensors` what DeepSpeed's own programs make of it: the weights of `zero_to_fp32`,
and the optimizer states of `ds_to_universal`.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

import torch

RUNS = {
    "zero1": {"ranks": 2, "stage": 1, "bf16": True},
    "zero2": {"ranks": 3, "stage": 2, "bf16": False},
    "zero3": {"ranks": 2, "stage": 3, "bf16": True},
    "round_robin": {"ranks": 2, "stage": 2, "bf16": True, "zero": {"round_robin_gradients": True}},
    "plain": {"ranks": 2, "stage": 0, "bf16": False},
    "muon2": {"ranks": 2, "stage": 2, "bf16": True, "muon": True},
    "muon3": {
        "ranks": 2,
        "stage": 3,
        "bf16": True,
        "muon": True,
        "zero": {"reduce_scatter": False},
    },
    "bf16_states": {
        "ranks": 2,
        "stage": 2,
        "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    },
}
"""ZeRO-3 with sub-groups of 40 elements at most. The converter fails on Muon and without ZeRO."""
CONVERTED = ("zero2", "zero3", "round_robin")


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, tied weights, frozen parameters, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.frozen = torch.nn.Linear(5, 3)
        self.up = torch.nn.Linear(5, 9)
        self.norm = torch.nn.LayerNorm(9)
        self.down = torch.nn.Linear(9, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.frozen(hidden).sum() * 0.01
        return self.head(hidden + self.down(self.norm(self.up(hidden)).relu()))


def make_model() -> tuple[Net, torch.optim.Optimizer]:
    """Return the model, and an optimizer with two groups of parameters."""
    torch.manual_seed(0)
    model = Net()
    model.frozen.requires_grad_(False)
    return model, make_optimizer(model)


def make_optimizer(model: Net) -> torch.optim.Optimizer:
    """Return an optimizer with two groups of parameters."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train(name: str, directory: str) -> None:
    """Train for three steps on one rank, and save."""
    import deepspeed

    settings = RUNS[name]
    deepspeed.init_distributed(dist_backend="gloo")
    model, optimizer = make_model()
    bf16 = settings["bf16"]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bool(bf16), **(bf16 if isinstance(bf16, dict) else {})},
        "zero_optimization": {
            "stage": settings["stage"],
            "sub_group_size": 40,
            "stage3_param_persistence_threshold": 0,
            **settings.get("zero", {}),
        },
    }
    options: dict = {"optimizer": optimizer}
    options["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if settings.get("muon"):
        options = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
        for param in options["model_parameters"]:
            param.use_muon = param.ndim > 1
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.95}}
    engine, *_ = deepspeed.initialize(model=model, config=config, **options)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for step in range(3):
        tokens = torch.randint(
            0, 7, (2, 4), generator=torch.Generator().manual_seed(step * size + rank)
        )
        engine.backward(engine(tokens).float().logsumexp(-1).mean())
        engine.step()
    engine.save_checkpoint(
        directory, client_state={"iteration": 3, "rng": torch.arange(4, dtype=torch.uint8)}
    )
    if not settings["stage"] and not rank:
        expected = dict(model.named_parameters())
        for key, param in model.named_parameters():
            for state, value in optimizer.state[param].items():
                expected[f"optimizer.state.{state}.{key}"] = value
        torch.save(expected, f"{directory}.pt")


def make(directory: pathlib.Path, names: Sequence[str] = tuple(RUNS)) -> None:
    """Make checkpoints in a directory."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name in names:
        settings = RUNS[name]
        path = directory / name
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            environment["MASTER_PORT"] = str(listener.getsockname()[1])
        size = str(settings["ranks"])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.data.make_deepspeed", "train", name, str(path)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size},
            )
            for rank in range(settings["ranks"])
        ]
        assert not any(rank.wait(300) for rank in ranks)
        if settings["stage"]:
            expected = get_fp32_state_dict_from_zero_checkpoint(str(path))
        else:
            expected = torch.load(f"{path}.pt")
            pathlib.Path(f"{path}.pt").unlink()
        if name in ("zero1", *CONVERTED):
            states = convert(path, environment, expected)
            # The converter mixes up those of `round_robin`.
            expected.update(states if name != "round_robin" else {})
        save_file(
            {key: value.detach().clone() for key, value in expected.items()},
            directory / f"{name}.safetensors",
        )
        for unneeded in path.glob("zero_to_*.py"):
            unneeded.unlink()
        if name not in CONVERTED:
            # That of ZeRO-1 is like that of ZeRO-2.
            shutil.rmtree(directory / f"{name}_universal", ignore_errors=True)


def convert(path: pathlib.Path, environment: dict, weights: dict) -> dict:
    """Convert a checkpoint to a Universal one beside it; return the states in that."""
    target = path.with_name(f"{path.name}_universal")
    options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options]
    folders = [
        "--input_folder",
        str(path / "global_step3"),
        "--output_folder",
        str(target / "global_step3_universal"),
    ]
    subprocess.run([*command, *folders], check=True, env=environment)
    states = {}
    for file in target.rglob("exp_avg*.pt"):
        key, content = file.parent.name, torch.load(file, weights_only=False)
        state = content["param"] if isinstance(content, dict) else content
        states[f"optimizer.state.{file.stem}.{key}"] = state.reshape(weights[key].shape)
    return states


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as made:
            make(pathlib.Path(made), sys.argv[2:])
            with zipfile.ZipFile(
                sys.argv[1], "x", zipfile.ZIP_DEFLATED, compresslevel=9
            ) as archive:
                for file in sorted(pathlib.Path(made).rglob("*")):
                    if file.is_file():
                        archive.write(file, file.relative_to(made))
