"""Ranks that do not do the same: an invalid argument, another call or another setting on one of
them.
"""

import logging
import re
from functools import partial

import torch
from safetensors.torch import save_file

from distckpt import (
    CheckpointManager,
    PreemptionGuard,
    ShardedTensor,
    async_save,
    consolidate,
    dcp,
    load,
    megatron,
    merge,
    reshard,
    save,
)
from distckpt.rules import Rename
from tests.support.harness import error_of, run, sum_over_ranks
from tests.support.states import state_of, value_of


def make_different_calls(rank, root):
    state, whole = state_of(1, rank, 2, 4), f"{root}/whole"
    save(state, whole)
    guard = PreemptionGuard()
    is_first = rank == 0

    def managed(**settings):
        return CheckpointManager(f"{root}/run", **settings).save(3, state)

    calls = {
        # An invalid location on one rank.
        "location: load": lambda: load(state, whole if is_first else None),
        "location: load, broken URL": lambda: load(state, whole if is_first else "s3:/bucket"),
        "location: save": lambda: save(state, f"{root}/new" if is_first else None),
        "location: save, on rank 0": lambda: save(state, "" if is_first else f"{root}/new"),
        "location: async_save": lambda: async_save(state, f"{root}/new" if is_first else None),
        "location: consolidate": lambda: consolidate(whole if is_first else None, f"{root}/out"),
        "location: consolidate, output": lambda: consolidate(
            whole, f"{root}/out" if is_first else None
        ),
        "location: dcp.save": lambda: dcp.save(
            {"a": 1}, checkpoint_id=f"{root}/new" if is_first else None
        ),
        "location: dcp.load": lambda: dcp.load({"a": 1}, checkpoint_id=whole if is_first else None),
        "location: reshard": lambda: reshard(whole if is_first else None, f"{root}/new"),
        "location: a choice instead": lambda: consolidate(
            whole, f"{root}/out", tied="drop" if is_first else "path"
        ),
        # Other settings.
        "setting: overwrite": lambda: save(state, f"{root}/new", overwrite=is_first),
        "setting: durable": lambda: save(state, f"{root}/new", durable=is_first),
        "setting: validate_access_integrity": lambda: save(
            state, f"{root}/new", validate_access_integrity=is_first
        ),
        "setting: timeout": lambda: async_save(state, f"{root}/new", timeout=60 + rank),
        "setting: strict": lambda: load(state, whole, strict="raise" if is_first else "report"),
        "setting: number of rules": lambda: load(
            state, whole, rules=[Rename("none", "other", optional=True)] if is_first else []
        ),
        "setting: share_reads": lambda: load(state, whole, share_reads="on" if is_first else "off"),
        "setting: dtype": lambda: consolidate(
            whole, f"{root}/out", dtype=torch.float16 if is_first else torch.bfloat16
        ),
        "setting: weights": lambda: merge([whole, whole], f"{root}/out", weights=(1, rank)),
        "setting: async_save": lambda: managed(async_save=is_first),
        "setting: on_failure": lambda: managed(on_failure="log" if is_first else "raise"),
        "setting: keep_last": lambda: managed(keep_last=1 + rank),
        "setting: step": lambda: CheckpointManager(f"{root}/run").save(3 + rank, state),
        # Other calls.
        "call: save and async_save": lambda: (save if is_first else async_save)(
            state, f"{root}/new"
        ),
        "call: save and load": lambda: (save if is_first else load)(state, whole),
        "call: load and should_stop": lambda: (
            load(state, whole) if is_first else guard.should_stop()
        ),
        "call: managers": lambda: (
            CheckpointManager(f"{root}/run").load(state)
            if is_first
            else CheckpointManager(f"{root}/run").save(1, state)
        ),
    }
    # An argument that there is not, on one rank.
    wrong = {} if is_first else {"wrong": 1}
    taking = {
        "save": lambda **more: save(state, f"{root}/new", **more),
        "async_save": lambda **more: async_save(state, f"{root}/new", **more),
        "load": lambda **more: load(state, whole, **more),
        "consolidate": lambda **more: consolidate(whole, f"{root}/out", **more),
        "merge": lambda **more: merge([whole, whole], f"{root}/out", **more),
        "reshard": lambda **more: reshard(whole, f"{root}/new", **more),
        "dcp.save": lambda **more: dcp.save({"a": 1}, checkpoint_id=f"{root}/new", **more),
        "dcp.load": lambda **more: dcp.load({"a": 1}, checkpoint_id=whole, **more),
        "megatron.save": lambda **more: megatron.save(state, f"{root}/new", **more),
        "megatron.load": lambda **more: megatron.load(state, whole, **more),
        "manager.save": lambda **more: CheckpointManager(f"{root}/run").save(1, state, **more),
        "manager.load": lambda **more: CheckpointManager(f"{root}/run").load(state, **more),
    }
    for name, call in taking.items():
        calls[f"argument: {name}"] = partial(call, **wrong)
        error = error_of(call, wrong=1)
        assert isinstance(error, TypeError), (name, error)
        assert sum_over_ranks(1) == 2, name
    messages = {}
    for name, call in calls.items():
        messages[name] = str(error_of(call))
        assert sum_over_ranks(1) == 2, name
    save(state_of(2, rank, 2, 4), whole, overwrite=True)
    async_save(state_of(3, rank, 2, 4), f"{root}/new").result()
    return messages, [
        value_of(load(state_of(-1, rank, 2, 4), f"{root}/{name}")) for name in ("whole", "new")
    ]


def test_all_ranks_raise_at_once_and_may_go_on(run, tmp_path):
    (messages, values), others = run(make_different_calls, 2, str(tmp_path))
    assert (messages, values) == others
    assert values == [2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "new"}
    for name, message in messages.items():
        kind, _, culprit = name.partition(": ")
        assert ("rank 0: " if culprit.endswith("rank 0") else "rank 1") in message, (name, message)
        if kind == "location":
            assert re.search("1 rank failed during[^$]*(?:path|Path|URL)", message), (name, message)
        elif kind == "argument":
            assert re.search("1 rank failed during[^$]*TypeError: [^$]*wrong", message), (
                name,
                message,
            )
        elif kind == "setting":
            assert f"All ranks must give the same {culprit} in '" in message, (name, message)
        else:
            assert "All ranks must make the same calls, but rank 0 calls " in message, (
                name,
                message,
            )


class Messages(logging.Handler):
    """A handler that keeps the texts."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def warnings_of_loading(rank, paths):
    messages = Messages()
    logging.getLogger("distckpt").addHandler(messages)
    tensor = torch.zeros(4)
    load({"w": ShardedTensor.from_rank_offsets("w", tensor, replica_id=rank)}, paths[rank])
    logging.getLogger("distckpt").removeHandler(messages)
    return messages.texts


def test_a_directory_beside_the_one_of_rank_0_is_named(tmp_path):
    first, other, link = (tmp_path / name for name in ("first", "other", "link"))
    for number, folder in enumerate((first, other)):
        folder.mkdir()
        save_file({"w": torch.full((4,), float(number))}, folder / "model.safetensors")
    link.symlink_to(first)
    assert run(warnings_of_loading, 2, (str(first), str(link))) == [[], []]
    of_first, (warning,) = run(warnings_of_loading, 2, (str(first), str(other)))
    assert of_first == []
    assert f"rank 1 reads {str(other)!r}, and rank 0 reads {str(first)!r}" in warning
