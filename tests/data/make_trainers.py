"""Makes `trainers.zip` with real trainers on two ranks of CPUs: `python -m tests.data.make_trainers
NEW_FILE.zip`.

Needs the packages `accelerate`, `lightning` and `torchtitan`. All three refuse FSDP without
accelerators, which is overruled here. Beside the checkpoints, `<name>.safetensors` holds the
gathered weights and moments.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import torch
from torch import nn


class Block(nn.Linear):
    """What FSDP wraps."""


class Net(nn.Module):
    """Sizes that two ranks do not divide, tied weights, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups."""
    named = list(model.named_parameters())
    biases = [param for name, param in named if name.endswith("bias")]
    others = [param for name, param in named if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def batches() -> torch.Tensor:
    """Return the data of a rank."""
    rank = int(os.environ["RANK"])
    return torch.randint(0, 7, (3, 1, 4), generator=torch.Generator().manual_seed(rank))


def shard(model: nn.Module) -> None:
    """Shard a model with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def write_expected(path: str, weights: dict, states: dict) -> None:
    """Write whole weights and moments by our keys."""
    from safetensors.torch import save_file

    tensors = {name.removeprefix("net."): weight for name, weight in weights.items()}
    for name, state in states.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.{kind}.{name.removeprefix('net.')}"
            tensors[key] = state[kind]
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, f"{path}.safetensors")


def gather(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write what a sharded model and its optimizer hold."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    # Other ranks get nothing.
    if int(os.environ["RANK"]) == 0:
        write_expected(path, weights, states["state"])


def accelerate(path: str) -> None:
    """accelerate's FSDP2 with sharded state dicts."""
    from accelerate import (
        Accelerator,
        DistributedType,
        FullyShardedDataParallelPlugin,
        PartialState,
    )

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Net()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for tokens in batches():
        accelerator.backward(model(tokens).logsumexp(-1).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(path)
    gather(path, model, optimizer.optimizer)


def lightning_task() -> type:
    """Return the class of a module of Lightning."""
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                shard(self.net)

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(tokens).logsumexp(-1).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

        def on_save_checkpoint(self, checkpoint: dict) -> None:
            checkpoint["mine"] = {"tokens": 12}

    return Task


def train_with_lightning(strategy: object, path: str) -> tuple:
    """Train for three steps and save."""
    import lightning
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    _AcceleratorConnector._check_strategy_and_fallback = lambda self: None
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    task = lightning_task()()
    trainer.fit(task, torch.utils.data.DataLoader(batches()[:, 0], batch_size=1))
    trainer.save_checkpoint(path)
    return task, trainer.optimizers[0]


def model_parallel(path: str) -> None:
    """Lightning's ModelParallelStrategy."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo")
    gather(path, *train_with_lightning(strategy, path))


def fsdp(path: str) -> None:
    """Lightning's FSDPStrategy. FSDP1 on CPUs gathers nothing: DCP's converter does."""
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.fsdp import FullyShardedDataParallel

    make = FullyShardedDataParallel.__init__

    def make_on_cpu(self: nn.Module, *args: object, **options: object) -> None:
        make(self, *args, **{**options, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = make_on_cpu
    strategy = FSDPStrategy(
        state_dict_type="sharded", auto_wrap_policy={Block}, use_orig_params=True,
        process_group_backend="gloo",
    )  # fmt: skip
    train_with_lightning(strategy, path)
    if int(os.environ["RANK"]) == 0:
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, f"{folder}/whole.pt")
            whole = torch.load(f"{folder}/whole.pt", weights_only=False)
        write_expected(path, whole["model"], whole["optimizer_0"]["state"])


def torchtitan(path: str) -> None:
    """torchtitan's checkpoint manager."""
    import torch.distributed as dist
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )

    class Values:
        """What has a state dict, as DCP asks for it."""

        def __init__(self, values: dict) -> None:
            self.values = values

        def state_dict(self) -> dict:
            return self.values

        def load_state_dict(self, values: dict) -> None:
            self.values = values

    dist.init_process_group("gloo")
    model = Net()
    shard(model)
    groups = []
    for pattern, decay in ((r"bias$", 0.0), (r".*", 0.1)):
        options = {"lr": 0.01, "weight_decay": decay}
        groups.append(
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=options)
        )
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=10
    )
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1),
        dataloader=Values({f"dp_rank_{dist.get_rank()}": {"position": 3}}),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": Values({"step": torch.tensor(3, dtype=torch.int32)})},
        sd_adapter=None,
        base_folder=f"{path}.run",
    )
    for tokens in batches():
        model(tokens).logsumexp(-1).mean().backward()
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
    manager.save(3)
    gather(path, model, next(iter(optimizers)))
    if dist.get_rank() == 0:
        os.rename(f"{path}.run/checkpoint/step-3", path)
    manager.close()


TRAINERS = {make.__name__: make for make in (accelerate, model_parallel, fsdp, torchtitan)}


def make_all(directory: pathlib.Path) -> None:
    """Make all checkpoints in a directory."""
    for name in TRAINERS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        own = ["--nproc-per-node", "2", "-m", "tests.data.make_trainers", name, str(directory)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_FSDP": "true"}
        subprocess.run([*command, *own], check=True, env=environment, timeout=200)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        torch.manual_seed(0)
        TRAINERS[sys.argv[1]](os.path.join(sys.argv[2], sys.argv[1]))
        torch.distributed.barrier()
        os._exit(0)
    with tempfile.TemporaryDirectory() as made:
        make_all(pathlib.Path(made))
        with zipfile.ZipFile(sys.argv[1], "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(pathlib.Path(made).rglob("*")):
                # States of generators are large, and not read.
                if file.is_file() and not file.name.startswith("random_states"):
                    archive.write(file, file.relative_to(made))
