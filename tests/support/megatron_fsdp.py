"""Megatron-FSDP around Megatron Core's GPT model, on gloo and the processor.

The library asks for an accelerator by name and works without one: `on_cpu` answers for it. Training
steps, state dicts and checkpoints are its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.megatron_gpt import megatron

ARGS = {"iteration": 7, "checkpoint_version": 3.0}


class Stream:
    """A stream or event of an accelerator that has none."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self


def _on_cpu(function):
    def moved(value):
        is_device = isinstance(value, str | torch.device) and "cuda" in str(value)
        return torch.device("cpu") if is_device else value

    def call(*args, **kwargs):
        named = {name: moved(value) for name, value in kwargs.items()}
        if isinstance(named.get("device"), int):
            named["device"] = "cpu"
        return function(*map(moved, args), **named)

    return call


def on_cpu():
    """Let a program that asks for an accelerator get the processor, in this process."""
    cuda = torch.cuda
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.get_rng_state = lambda *_: torch.zeros(4, dtype=torch.uint8)
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_: tensor
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for holder in (torch.Tensor, torch.nn.Module):
        holder.to = _on_cpu(holder.to)
    own_type = torch.Tensor.type

    def type_of(tensor, *args, **kwargs):
        found = own_type(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = type_of


class FusedAdam(torch.optim.Optimizer):
    """An Adam that keeps `step` in its groups, as those of Transformer Engine and Apex do."""

    def __init__(self, params, lr, weight_decay, betas, eps, **others):
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, defaults)
        del others

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                # Also of a parameter without elements on this rank, which gets no gradient: all
                # ranks must have the same keys, or they wait for each other in a save.
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                gradient = parameter.grad
                if gradient is None:
                    gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is None:
                    continue
                gradient = gradient.float()
                mean = state["exp_avg"].mul_(first).add_(gradient * (1 - first))
                square = state["exp_avg_sq"].mul_(second).add_(gradient * gradient * (1 - second))
                size = group["lr"] / (1 - first ** group["step"])
                root = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"] * group["wd_mult"])
                parameter.sub_(mean / root * size)


def config_of(**options):
    values = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 4,
        "ffn_hidden_size": 24,
        "use_cpu_initialization": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Without it gradients are averaged by an operation that gloo does not have.
        "calculate_per_token_loss": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    return megatron(".transformer.transformer_config").TransformerConfig(**{**values, **options})


def make_gpt(ep=1, tp=1, **options):
    state = megatron(".parallel_state")
    state.destroy_model_parallel()
    state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
    # A name that 0.16 defines only beside Transformer Engine.
    megatron(".transformer.moe.moe_utils").te_general_gemm = None
    tracker = megatron(".tensor_parallel.random").CudaRNGStatesTracker
    tracker.fork = lambda *_: contextlib.nullcontext()
    if ep > 1:
        options["expert_model_parallel_size"] = ep
    if tp > 1:
        options["tensor_model_parallel_size"] = tp
    specs = megatron(".models.gpt.gpt_layer_specs")
    config = config_of(**options)
    torch.manual_seed(3)
    model = megatron(".models.gpt.gpt_model").GPTModel(
        config,
        specs.get_gpt_layer_local_spec(num_experts=options.get("num_moe_experts")),
        vocab_size=40,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
    )
    # As training scripts do: it gives the names of parameters another `module.`.
    return megatron(".transformer.module").Float16Module(config, model)


def optimizer_of(model, bf16=True):
    optimizers = megatron(".optimizer")
    sharded = megatron(".optimizer.distrib_optimizer")
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, FusedAdam
    sharded.HAVE_APEX_OR_TE, sharded.USING_TE_OPTIMIZER, sharded.Adam = True, True, FusedAdam
    config = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
    return optimizers.get_megatron_optimizer(config, [model])


def rearranged(tensor, pattern, **sizes):
    """Divide the axes of a tensor and put them in another order, as `einops.rearrange` does."""
    old, new = pattern.split(" -> ")
    names = re.findall(r"\w+", old)
    sizes["dp_cp"] = sizes.get("dp_cp", -1)
    if len(names) == len(old.strip("()").split()) and "(" in old:
        tensor = tensor.reshape([sizes[name] for name in names])
    order = re.findall(r"\w+", new)
    tensor = tensor.permute([names.index(name) for name in order])
    groups = re.findall(r"\([^)]*\)|\w+", new)
    shape = []
    for group in groups:
        part = [tensor.shape[order.index(name)] for name in re.findall(r"\w+", group)]
        shape.append(math.prod(part))
    return tensor.reshape(shape)


def wrapped_by_fsdp(model):
    """Wrap a model in Megatron-FSDP, and return it with its distributed optimizer."""
    config = megatron(".distributed").DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
    )
    adapter = megatron(".distributed.fsdp.mcore_fsdp_adapter")
    # All that it uses of a package that tests do without.
    adapter.HAVE_EINOPS, adapter.einops = True, SimpleNamespace(rearrange=rearranged)
    wrapped = adapter.FullyShardedDataParallel(model.config, config, model)
    return wrapped, optimizer_of(wrapped)


def wrapped_by_ddp(model):
    """Wrap a model for plain data parallelism, and return it with its distributed optimizer."""
    config = megatron(".distributed").DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    wrapped = megatron(".distributed").DistributedDataParallel(model.config, config, model)
    return wrapped, optimizer_of(wrapped)


def train(model, optimizer, steps, first=0):
    """Train on the same tokens on all ranks; return the loss of each step."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 40, (2, 8), generator=generator)
        positions = torch.arange(8).repeat(2, 1)
        mask = torch.ones(1, 1, 8, 8).triu(1).bool()
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
        (loss / dist.get_world_size()).backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp_state(model, optimizer, swiglu=True, num_experts=None, is_loading=False):
    """Return the state dict of `generate_state_dict` for the format fsdp_dtensor, prepared."""
    checkpoint = megatron(".transformer.fsdp_dtensor_checkpoint")
    uneven = megatron(".distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
    inner = model.module
    weights = inner.state_dict_for_save_checkpoint()
    moments = optimizer.sharded_state_dict(
        {}, is_loading, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
    )
    raw = (weights, moments)
    checkpoint.handle_fp8_extra_state_case(weights)
    if swiglu:
        weights, moments = checkpoint.handle_swiglu_in_state_dict(inner, weights, moments)
    if num_experts:
        weights = checkpoint.handle_experts_in_state_dict(weights, num_experts)
    state = {**ARGS, "model": weights, "optimizer": moments}
    uneven.preprocess_state_dict_for_uneven_dtensor(state)
    return state, raw


def save_fsdp(path, model, optimizer, **options):
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    state, _ = fsdp_state(model, optimizer, **options)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def load_fsdp(path, model, optimizer, **options):
    """Load as Megatron-LM does: in place, then the raw state dicts into model and optimizer."""
    warnings.simplefilter("ignore")
    state, (weights, moments) = fsdp_state(model, optimizer, is_loading=True, **options)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    moments = {**moments, "param_to_group_meta": state["optimizer"]["param_to_group_meta"]}
    model.module.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(moments)
    return state["iteration"]


def torch_dist_state(model, optimizer, is_loading=False):
    weights = model.module.module.sharded_state_dict()
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    moments = optimizer.sharded_state_dict(weights, is_loading, metadata=metadata)
    return {**ARGS, "model": weights, "optimizer": moments}


def save_torch_dist(path, model, optimizer):
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    megatron(".dist_checkpointing").save(torch_dist_state(model, optimizer), path)


def load_torch_dist(path, model, optimizer):
    warnings.simplefilter("ignore")
    state = torch_dist_state(model, optimizer, is_loading=True)
    # Megatron-FSDP does not store the extra states of layers.
    loaded = megatron(".dist_checkpointing").load(state, path, strict="log_unexpected")
    model.module.module.load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded["iteration"]
