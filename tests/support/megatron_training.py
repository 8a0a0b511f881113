"""The calls that Megatron-LM's `training/checkpointing.py` makes, with its imports of
dist_checkpointing replaced.

Where that file is installed (megatron-core 0.19, for Python 3.12), tests run the file itself, see
`megatron_lm`. The other functions make the calls of that file, in its order and with its arguments,
on what 0.16.1 has.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from distckpt import megatron as dist_checkpointing
from distckpt.mapping import ShardedObject
from distckpt.megatron.strategies.async_utils import _disable_gc
from distckpt.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from distckpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    get_async_strategy,
)
from distckpt.megatron.utils import _clean_metadata_for_serialization
from tests.support.megatron_gpt import megatron


class FusedAdam(torch.optim.Optimizer):
    """An Adam that keeps `step` in its groups, as those of Transformer Engine and Apex do; Megatron
    requires that.
    """

    def __init__(self, params, lr, weight_decay, betas, eps, **others):
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )
        del others

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state, gradient = self.state[parameter], torch.zeros_like(parameter)
                gradient = gradient if parameter.grad is None else parameter.grad
                for name, value in (("exp_avg", gradient), ("exp_avg_sq", gradient.square())):
                    state.setdefault(name, torch.zeros_like(parameter)).lerp_(value, 0.1)
                parameter.sub_(group["lr"] * state["exp_avg"])


class OnCpu(TorchFunctionMode):
    """Lets programs that ask for an accelerator get the processor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def substituted(source):
    """Replace the imports of Megatron's dist_checkpointing in a program, and nothing else."""
    whole = r"from megatron\.core import ([^\n(]*)\bdist_checkpointing, ([^\n]*)"
    ours = r"from distckpt import megatron as dist_checkpointing; from megatron.core import \1\2"
    source = re.sub(whole, ours, source)
    for path in ("..core.dist_checkpointing", "megatron.core.dist_checkpointing"):
        source = source.replace(path, "distckpt.megatron")
    return source


def megatron_lm():
    """Return Megatron-LM's modules `checkpointing` and `async_utils`, with their imports
    replaced.
    """
    package = importlib.import_module("megatron.training")
    for name in ("async_utils", "checkpointing"):
        spec = importlib.util.find_spec(f"megatron.training.{name}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(package, name, module)
        exec(compile(substituted(Path(spec.origin).read_text()), spec.origin, "exec"), vars(module))
    return package


def arguments_of_megatron_lm(folder, tp, pp):
    """Make the arguments of a training run, as its command line would, and pass them to
    Megatron-LM.
    """
    options = {
        "num-layers": 4,
        "hidden-size": 16,
        "num-attention-heads": 4,
        "seq-length": 8,
        "max-position-embeddings": 8,
        "micro-batch-size": 1,
        "save": folder,
        "load": folder,
        "ckpt-format": "torch_dist",
    }
    own, sys.argv = sys.argv, ["train", *(f"--{name}={value}" for name, value in options.items())]
    try:
        args = importlib.import_module("megatron.training.arguments").parse_args()
    finally:
        sys.argv = own
    args.use_dist_ckpt, args.world_size, args.rank = True, dist.get_world_size(), dist.get_rank()
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size = (
        tp,
        pp,
        1,
    )
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = (
        args.iteration
    ) = 0
    args.no_save_optim = args.no_load_optim = True
    # Random states of an accelerator.
    args.no_save_rng = args.no_load_rng = True
    importlib.import_module("megatron.training.global_vars")._GLOBAL_ARGS = args
    calculator = megatron(".num_microbatches_calculator")
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 8, 1, 1)
    return args


def rng_state(parallel_state):
    """As `get_rng_state`: one list for each tensor and pipeline parallel rank, which data-parallel
    ranks share.
    """
    tp, pp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    grid = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    state = [{"torch_rng_state": torch.get_rng_state(), "position": (tp, pp)}]
    replica_id = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", state, grid, (pp, tp), replica_id=replica_id)


def state_dict_of(args, model, optimizer, metadata, iteration, is_loading=False):
    """As `generate_state_dict`."""
    parallel_state = megatron(".parallel_state")
    machine = megatron(".rerun_state_machine").get_rerun_state_machine()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    state["model"] = model.sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
    state["rerun_state_machine"] = machine.state_dict(
        data_iterator=None, ckpt_format="torch_dist", force=is_loading
    )
    state["rng_state"] = rng_state(parallel_state)
    return state


def save_checkpoint(
    iteration, model, optimizer, args, context, queue=None, sharding_type="dp_reshardable"
):
    """As `save_checkpoint`, for the format torch_dist."""
    parallel_state = megatron(".parallel_state")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "distrib_optim_sharding_type": sharding_type,
        "dp_cp_group": group,
        "chained_optim_avoid_prefix": True,
    }
    state = state_dict_of(args, model, optimizer, metadata, iteration)
    state["num_floating_point_operations_so_far"] = 0
    name = os.path.join(args.save, f"iter_{iteration:07d}")
    if dist.get_rank() == 0:
        os.makedirs(name, exist_ok=True)
    is_known = "save_strategy" in context
    if not is_known:
        strategy = TorchDistSaveShardedStrategy()
        strategy.use_cached_ckpt_structure = True
        strategy.thread_count = 2
        if "load_strategy" in context:
            cached = getattr(context["load_strategy"], "cached_global_metadata", None)
            strategy.cached_global_metadata = cached
        context["save_strategy"] = FullyParallelSaveStrategyWrapper(strategy, group, True)
    request = dist_checkpointing.save(
        state,
        name,
        context["save_strategy"],
        async_sharded_save=queue is not None,
        validate_access_integrity=not is_known,
        preprocess_common_before_consistancy_check=lambda common: {
            k: v for k, v in common.items() if k != "args"
        },
        content_metadata=_clean_metadata_for_serialization(metadata),
        async_strategy="nvrx",
        verify_integrity=False,
    )
    tracker = Path(args.save, "latest_checkpointed_iteration.txt")
    if queue is None:
        assert request is None
        dist.barrier()
        if dist.get_rank() == 0:
            tracker.write_text(str(iteration))
    else:
        if dist.get_rank() == 0:
            request.add_finalize_fn(lambda: tracker.write_text(str(iteration)))
        queue.schedule_async_request(request)
    dist.barrier()


def load_checkpoint(model, optimizer, args, context, strict="assume_ok_unexpected"):
    """As `load_checkpoint`: common state first, on each rank; then everything, with what that says
    about the layout.
    """
    parallel_state = megatron(".parallel_state")
    name = os.path.join(
        args.load,
        f"iter_{int(Path(args.load, 'latest_checkpointed_iteration.txt').read_text()):07d}",
    )
    assert dist_checkpointing.check_is_distributed_checkpoint(name)
    common = dist_checkpointing.load_common_state_dict(name)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = state_dict_of(
        args, model, optimizer, {**metadata, "dp_cp_group": group}, common["iteration"], True
    )
    saved_grid = (
        common["args"].tensor_model_parallel_size,
        common["args"].pipeline_model_parallel_size,
    )
    if saved_grid != (args.tensor_model_parallel_size, args.pipeline_model_parallel_size):
        del state["rng_state"]
    machine = megatron(".rerun_state_machine").get_rerun_state_machine()
    is_stored = machine.validate_state_dict(common["rerun_state_machine"])
    if not is_stored or common["args"].world_size != args.world_size:
        del state["rerun_state_machine"]
    strategy = TorchDistLoadShardedStrategy(cache_metadata=True)
    context["load_strategy"] = FullyParallelLoadStrategyWrapper(
        strategy, group, exchange_algo="broadcast"
    )
    loaded = dist_checkpointing.load(
        state,
        name,
        context["load_strategy"],
        validate_access_integrity=True,
        strict=strict,
        verify_integrity=False,
    )
    model.load_state_dict(loaded["model"])
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
    if "rerun_state_machine" in state:
        machine.load_state_dict(loaded["rerun_state_machine"])
    return loaded


def async_queue():
    """As `_get_async_calls_queue` and `init_persistent_async_worker`."""
    _, modules = get_async_strategy("nvrx")
    queue = modules["AsyncCallsQueue"](persistent=True)
    modules["AsyncCallsQueue"].warmup_persistent_caller(
        dist.get_rank(), cpu_priority=10, io_priority=3
    )
    modules["get_write_results_queue"](mp_mode="fork")
    return queue


@_disable_gc()
def arguments(folder, tp, pp):
    """Return a Namespace with values as Megatron's arguments have them."""
    backend, mode = (
        megatron(".transformer.enums").AttnBackend.auto,
        megatron(".rerun_state_machine").RerunMode,
    )
    return Namespace(
        save=folder,
        load=folder,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        params_dtype=torch.bfloat16,
        attention_backend=backend,
        rerun_mode=mode.VALIDATE_RESULTS,
        adam_betas=(0.9, 0.95),
    )


def with_distributed_optimizer(model):
    """Wrap a model for data parallelism, and return a distributed optimizer that has made a
    step.
    """
    distributed, optimizers = megatron(".distributed"), megatron(".optimizer")
    config = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = distributed.DistributedDataParallel(model.config, config, model)
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, FusedAdam
    sharded = megatron(".optimizer.distrib_optimizer")
    sharded.HAVE_APEX_OR_TE, sharded.USING_TE_OPTIMIZER, sharded.Adam = True, True, FusedAdam
    config = optimizers.OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
    optimizer = optimizers.get_megatron_optimizer(config, [wrapped])
    for number, parameter in enumerate(wrapped.parameters()):
        parameter.main_grad.fill_(1.0 + number)
    optimizer.step()
    return optimizer
