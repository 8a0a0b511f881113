"""Megatron-LM's own functions that save and load, with nothing changed but the imports of
dist_checkpointing.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import warnings

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support import megatron_training as training
from tests.support.harness import error_of
from tests.support.megatron_gpt import (
    TIMEOUT,
    fill,
    leaves,
    local_part,
    make_model,
    megatron,
    needs_megatron,
)

pytestmark = needs_megatron


def start(tp, pp):
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *_: torch.zeros(4, dtype=torch.uint8)
    machines = megatron(".rerun_state_machine")
    machines.destroy_rerun_state_machine()
    machines.initialize_rerun_state_machine(mode=machines.RerunMode.VALIDATE_RESULTS)
    return make_model(tp, pp)


def save_in_all_ways(rank, folder):
    """Save two steps with one strategy, one in the background, and one in which a loss is not a
    number.
    """
    model = start(2, 1)
    fill(model)
    args, context, queue = training.arguments(folder, 2, 1), {}, training.async_queue()
    training.save_checkpoint(1, model, None, args, context)
    training.save_checkpoint(2, model, None, args, context)
    training.save_checkpoint(3, model, None, args, context, queue)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    machines = megatron(".rerun_state_machine")
    machine = machines.get_rerun_state_machine()
    machine.state = machines.RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.failed_validation_call = machines.Call(machines.Caller("loss is NaN", rank), 1)
    machine.initial_result = math.nan
    training.save_checkpoint(4, model, None, args, context)
    return sorted(os.listdir(folder))


def load_in(rank, folder, tp, pp):
    model = start(tp, pp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    loaded = training.load_checkpoint(
        model, None, training.arguments(folder, tp, pp), {}, strict="log_all"
    )
    wrong = [
        s.key for s in leaves(model.sharded_state_dict()) if not torch.equal(s.data, local_part(s))
    ]
    call = megatron(".rerun_state_machine").get_rerun_state_machine().failed_validation_call
    failed = call and (call.caller.message, call.caller.rank, call.sequence)
    rng = loaded["rng_state"][0]["position"] if "rng_state" in loaded else None
    return wrong, loaded["iteration"], loaded["args"].attention_backend.name, rng, failed


def test_saved_in_every_way_and_loaded_in_other_layouts(run, tmp_path):
    steps = [f"iter_{number:07d}" for number in (1, 2, 3, 4)]
    listed = run(save_in_all_ways, 2, str(tmp_path), group_timeout=TIMEOUT)
    assert listed == [[*steps, "latest_checkpointed_iteration.txt"]] * 2
    for tp, pp in ((2, 1), (1, 2), (1, 1)):
        for rank, (wrong, iteration, backend, rng, failed) in enumerate(
            run(load_in, tp * pp, str(tmp_path), tp, pp, group_timeout=TIMEOUT)
        ):
            assert (wrong, iteration, backend) == ([], 4, "auto")
            assert rng == ((rank, 0) if tp == 2 else None)
            assert failed == (("loss is NaN", rank, 1) if tp * pp == 2 else None)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def save_through_megatrons_queue(rank, folder):
    """As where only one of Megatron-LM's two files has its imports replaced."""
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = False
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    queue = megatron(".dist_checkpointing.strategies.async_utils").AsyncCallsQueue()
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(3), (0, rank, 2))
    queue.schedule_async_request(
        distckpt.megatron.save({"w": shard}, f"{folder}/c", async_sharded_save=True)
    )
    return str(error_of(queue.maybe_finalize_async_calls, blocking=True))


def test_a_queue_that_starts_processes_does_not_pass_for_a_save(run, tmp_path):
    for error in run(save_through_megatrons_queue, 2, str(tmp_path), group_timeout=TIMEOUT):
        assert "Import AsyncCallsQueue from distckpt.megatron.strategies.async_utils" in error
    assert not (tmp_path / "c").exists()


SHARDING_TYPES = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")
"""Those that Megatron Core 0.16 can make; `fully_sharded_model_space` ends in an error there."""


def state_of(optimizer):
    """Return all tensors of a distributed optimizer on this rank."""
    states = optimizer.chained_optimizers[0].optimizer.state_dict()["state"]
    return [value for number in sorted(states) for _, value in sorted(states[number].items())]


def save_and_load_optimizer(rank, folder):
    """Return for each type of the distributed optimizer's state how many tensors are wrong after a
    save and a load.
    """
    torch.cuda.synchronize = lambda *_: None
    wrong = {}
    with training.OnCpu():
        model = start(1, 1)
        fill(model)
        optimizer = training.with_distributed_optimizer(model)
        args = training.arguments(folder, 1, 1)
        for number, sharding_type in enumerate(SHARDING_TYPES, start=1):
            expected = [value.clone() for value in state_of(optimizer)]
            training.save_checkpoint(
                number, model, optimizer, args, {}, sharding_type=sharding_type
            )
            for value in state_of(optimizer):
                value.fill_(math.nan)
            with torch.no_grad():
                training.load_checkpoint(model, optimizer, args, {})
            pairs = zip(expected, state_of(optimizer), strict=True)
            wrong[sharding_type] = sum(not value.equal(found) for value, found in pairs)
    return wrong, len(expected)


def test_each_type_of_the_distributed_optimizer(run, tmp_path):
    for wrong, count in run(save_and_load_optimizer, 2, str(tmp_path), group_timeout=TIMEOUT):
        assert wrong == dict.fromkeys(SHARDING_TYPES, 0)
        assert count > 10


def save_by_megatron_lm(rank, folder):
    """Save a step, and one in the background."""
    model, modules = start(2, 1), training.megatron_lm()
    fill(model)
    args, context = training.arguments_of_megatron_lm(folder, 2, 1), {}
    modules.checkpointing.save_checkpoint(1, [model], None, None, 5.0, context)
    args.async_save = True
    modules.checkpointing.save_checkpoint(2, [model], None, None, 5.0, context)
    modules.async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
    return sorted(os.listdir(folder)), sorted(os.listdir(os.path.join(folder, "iter_0000002")))


def load_by_megatron_lm(rank, folder, tp, pp):
    model, modules = start(tp, pp), training.megatron_lm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    training.arguments_of_megatron_lm(folder, tp, pp)
    with training.OnCpu():
        found = modules.checkpointing.load_checkpoint([model], None, None, checkpointing_context={})
    return found, [
        s.key for s in leaves(model.sharded_state_dict()) if not torch.equal(s.data, local_part(s))
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.training") is None,
    reason="megatron.training is not installed (it comes with megatron-core 0.19, for Python 3.12)",
)
def test_the_files_of_megatron_lm_with_other_imports(run, tmp_path):
    names = ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    for listed, files in run(save_by_megatron_lm, 2, str(tmp_path), group_timeout=TIMEOUT):
        assert (listed, files) == (
            names,
            ["manifest.safetensors", "metadata.json", "objects", "tensors"],
        )
    for tp, pp in ((1, 2), (1, 1)):
        for found, wrong in run(
            load_by_megatron_lm, tp * pp, str(tmp_path), tp, pp, group_timeout=TIMEOUT
        ):
            assert (found, wrong) == ((2, 5.0), [])


def local_state(value, rank):
    """As Megatron-LM's file makes it with its imports replaced: the model's shards are Megatron's,
    the others ours.
    """
    theirs = megatron(".dist_checkpointing.mapping")
    return {
        "model": {
            "divided": theirs.ShardedTensor.from_rank_offsets(
                "divided", torch.full((2, 3), value + rank), (0, rank, 2)
            ),
            "same": theirs.ShardedTensor.from_rank_offsets(
                "same", torch.full((4,), value), replica_id=rank
            ),
        },
        "rng_state": distckpt.ShardedObject("rng_state", {"seed": value + rank}, (2,), (rank,)),
        "kept": distckpt.LocalNonpersistentObject(rank),
        "iteration": 7,
    }


def save_local_checkpoint(rank, folder, algorithm):
    warnings.simplefilter("ignore")
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )

    from distckpt.megatron.tensor_aware_state_dict import MCoreTensorAwareStateDict

    torch.cuda.synchronize = lambda *_: None
    with training.OnCpu():
        made, _ = MCoreTensorAwareStateDict.from_state_dict(local_state(5.0, rank), algo=algorithm)
        LocalCheckpointManager(folder).save(made, 7)
        manager = LocalCheckpointManager(folder)
        assert manager.find_latest() == 7
        restored, _ = manager.load()
        state = restored.to_state_dict(local_state(0.0, rank), algo=algorithm)
    model = state.pop("model")
    return model["divided"].tolist(), model["same"].tolist(), state


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="needs the package nvidia-resiliency-ext",
)
@pytest.mark.parametrize("algorithm", ["atomic", "fully_parallel"])
def test_local_checkpoints_of_nvidia_resiliency_ext(run, tmp_path, algorithm):
    found = run(save_local_checkpoint, 2, str(tmp_path), algorithm, group_timeout=TIMEOUT)
    for rank, (divided, same, state) in enumerate(found):
        assert (divided, same) == ([[5.0 + rank] * 3] * 2, [5.0] * 4)
        assert state == {"rng_state": {"seed": 5.0 + rank}, "kept": rank, "iteration": 7}
