"""Makes `deepspeed_0_19.zip` with real DeepSpeed on CPUs: `python -m tests.data.make_deepspeed
NEW_FILE.zip`.

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

import torch

RUNS = {
    "zero1": {"ranks": 2, "stage": 1, "bf16": True},
    "zero2": {"ranks": 3, "stage": 2, "bf16": False},
    "zero3": {"ranks": 2, "stage": 3, "bf16": True},
}
"""ZeRO-3 with sub-groups of 40 elements at most."""


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
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(name: str, directory: str) -> None:
    """Train for three steps on one rank, and save."""
    import deepspeed

    settings = RUNS[name]
    deepspeed.init_distributed(dist_backend="gloo")
    model, optimizer = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": settings["bf16"]},
        "zero_optimization": {
            "stage": settings["stage"],
            "sub_group_size": 40,
            "stage3_param_persistence_threshold": 0,
        },
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
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


def make(directory: pathlib.Path) -> None:
    """Make all checkpoints in a directory."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, settings in RUNS.items():
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
        target = directory / f"{name}_universal"
        options = [
            "--num_extract_workers",
            "1",
            "--num_merge_workers",
            "1",
            "--inject_missing_state",
        ]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options]
        folders = [
            "--input_folder",
            str(path / "global_step3"),
            "--output_folder",
            str(target / "global_step3_universal"),
        ]
        subprocess.run([*command, *folders], check=True, env=environment)
        expected = get_fp32_state_dict_from_zero_checkpoint(str(path))
        for file in target.rglob("exp_avg*.pt"):
            key, content = file.parent.name, torch.load(file, weights_only=False)
            state = content["param"] if isinstance(content, dict) else content
            expected[f"optimizer.state.{file.stem}.{key}"] = state.reshape(expected[key].shape)
        save_file(
            {key: value.clone() for key, value in expected.items()},
            directory / f"{name}.safetensors",
        )
        for unneeded in ("zero_to_fp32.py", "zero_to_torch.py"):
            (path / unneeded).unlink()
        if settings["stage"] == 1:
            # Like that of ZeRO-2.
            shutil.rmtree(target)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as made:
            make(pathlib.Path(made))
            with zipfile.ZipFile(
                sys.argv[1], "x", zipfile.ZIP_DEFLATED, compresslevel=9
            ) as archive:
                for file in sorted(pathlib.Path(made).rglob("*")):
                    if file.is_file():
                        archive.write(file, file.relative_to(made))
