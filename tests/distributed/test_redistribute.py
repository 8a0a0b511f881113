"""Moving state dicts between layouts on real ranks."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import distckpt
from distckpt import InvalidShardingError, LoadMismatchError, ShardedTensor
from distckpt.modules import sharded_state_dict
from distckpt.rules import Concat, Drop, Rename
from tests.support.harness import ask_parent, error_of, kept_ranks, launched, sum_over_ranks
from tests.support.harness import run as run_once
from tests.support.machines import on_machine

KEYS = [f"layers.{number}.weight" for number in range(5)]


@pytest.fixture(scope="module")
def run():
    with kept_ranks() as run_ranks:
        yield run_ranks


def values_of(key: str, shape: tuple[int, ...] = (24, 12)) -> torch.Tensor:
    """Return the global tensor of a key."""
    seed = sum(map(ord, key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part_of(key: str, axis: int, rank: int, size: int, empty: bool = False) -> ShardedTensor:
    part = values_of(key).chunk(size, axis)[rank].clone()
    data = torch.full_like(part, torch.nan) if empty else part
    return ShardedTensor.from_rank_offsets(key, data, (axis, rank, size))


def split(axis: int, rank: int, size: int, empty: bool = False) -> dict[str, ShardedTensor]:
    return {key: part_of(key, axis, rank, size, empty) for key in KEYS}


def is_right(state: dict[str, ShardedTensor]) -> bool:
    return all(
        torch.equal(shard.data, values_of(shard.key)[shard.global_slice()])
        for shard in state.values()
    )


# --- Layouts --------------------------------------------------------------------------------------


def _rows_to_columns(rank: int, hosts: list[int] | None) -> Any:
    size = dist.get_world_size()
    reports = []
    with on_machine(hosts[rank]) if hosts else contextlib.nullcontext():
        for _ in range(3):
            old, new = split(0, rank, size), split(1, rank, size, empty=True)
            reports.append(distckpt.redistribute(old, new, max_inflight_bytes=4 * 4096))
            assert is_right(new)
    return reports[-1].num_bytes, reports[-1].sent_bytes


@pytest.mark.parametrize(
    ("size", "hosts", "share_sent"),
    [(1, None, 0), (2, None, 0), (4, None, 0), (4, [0, 0, 1, 1], 1 / 2), (3, [0, 1, 2], 2 / 3)],
)
def test_rows_become_columns(run, size, hosts, share_sent):
    total = 24 * 12 * 4 * len(KEYS)
    for num_bytes, sent in run(_rows_to_columns, size, hosts):
        assert num_bytes == total
        # What a machine wants and does not hold.
        assert sent == total * share_sent


def _grown_and_shrunk(rank: int) -> None:
    small = split(0, rank, 2) if rank < 2 else {}
    large = split(1, rank, 4, empty=True)
    distckpt.redistribute(small, large)
    assert is_right(large)
    back = split(0, rank - 1, 3, empty=True) if rank else {}
    distckpt.redistribute(large, back)
    assert is_right(back)


def test_ranks_that_only_give_or_only_take(run):
    run(_grown_and_shrunk, 4)


def _every_rank_takes_all(rank: int) -> int:
    own = split(0, rank, 2) if rank < 2 else {}
    whole = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(24, 12), replica_id=rank)
        for key in KEYS
    }
    with on_machine(rank // 2):
        report = distckpt.redistribute(own, whole)
    assert is_right(whole)
    return report.sent_bytes


def test_a_machine_gets_what_its_ranks_want_once(run):
    assert run(_every_rank_takes_all, 4) == [24 * 12 * 4 * len(KEYS)] * 4


def _views(rank: int) -> None:
    """As an engine holds weights: fused, transposed, of another dtype, twice."""
    own = {key: part_of(key, 0, rank, 2) for key in KEYS[:2]}
    fused = torch.zeros(12, 48, dtype=torch.bfloat16)
    again = torch.zeros(12, 12)
    target = {
        "first": sharded(KEYS[0], fused[:, :24].t(), (0, 0)),
        "second": sharded(KEYS[1], fused[:, 24:].t(), (0, 0)),
        "rows": sharded(KEYS[0], again, (6, 0)),
        "same rows": sharded(KEYS[0], again.clone(), (6, 0)),
    }
    distckpt.redistribute(own, target, allow_dtype_cast=True)
    expected = torch.cat([values_of(key) for key in KEYS[:2]]).t().bfloat16()
    assert torch.equal(fused, expected)
    for name in ("rows", "same rows"):
        assert torch.equal(target[name].data, values_of(KEYS[0])[6:18])


def sharded(key: str, view: torch.Tensor, offset: tuple[int, int]) -> ShardedTensor:
    return ShardedTensor(key, view, view.dtype, tuple(view.shape), (24, 12), offset, None)


def test_views_of_parameters_of_an_engine(run):
    run(_views, 2)


def _in_place(rank: int) -> None:
    """Both layouts are views of one buffer."""
    memory = values_of(KEYS[0]).chunk(2)[rank].clone().flatten()
    old = {"a": ShardedTensor.from_rank_offsets(KEYS[0], memory.view(12, 12), (0, rank, 2))}
    new = {"a": ShardedTensor.from_rank_offsets(KEYS[0], memory.view(24, 6), (1, rank, 2))}
    distckpt.redistribute(old, new, max_inflight_bytes=4 * 4096)
    assert is_right(new)


def test_old_and_new_may_be_the_same_memory(run):
    run(_in_place, 2)


# --- State dicts ----------------------------------------------------------------------------------


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.BatchNorm1d(12))


def trained(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        torch.manual_seed(step)
        module(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _objects(rank: int) -> None:
    old_model, new_model = model_of(0), model_of(1)
    old_optimizer, new_optimizer = trained(old_model), trained(new_model)
    fully_shard(new_model, mesh=init_device_mesh("cpu", (2,)))
    new_optimizer = torch.optim.AdamW(new_model.parameters(), lr=0.5)
    old = {"model": old_model, "optimizer": old_optimizer, "step": 7, "scale": torch.ones(3)}
    new = {"model": new_model, "optimizer": new_optimizer, "step": 0, "scale": torch.zeros(3)}
    distckpt.redistribute(old, new)
    assert new["step"] == 7
    assert torch.equal(new["scale"], torch.ones(3))
    assert new_optimizer.param_groups[0]["lr"] == 0.01
    for (name, given), taken in zip(
        old_model.state_dict().items(), new_model.state_dict().values(), strict=True
    ):
        taken = taken.full_tensor() if isinstance(taken, DTensor) else taken
        assert torch.equal(given, taken), name
    states = zip(old_optimizer.state.values(), new_optimizer.state.values(), strict=True)
    for given, taken in states:
        assert torch.equal(given["exp_avg"], taken["exp_avg"].full_tensor())


def test_modules_optimizers_and_values():
    run_once(_objects, 2)


def _rank_0_is_new(rank: int) -> None:
    old_model, new_model = model_of(0), model_of(1)
    old_optimizer, new_optimizer = trained(old_model), torch.optim.AdamW(new_model.parameters())
    decay = torch.optim.lr_scheduler.StepLR
    old_scheduler, new_scheduler = decay(old_optimizer, 1), decay(new_optimizer, 1)
    old_optimizer.step()
    old_scheduler.step()
    old = {"model": old_model, "optimizer": old_optimizer, "scheduler": old_scheduler, "step": 7}
    new = {"model": new_model, "optimizer": new_optimizer, "scheduler": new_scheduler, "step": 0}
    distckpt.redistribute(old if rank else {}, new)
    assert new["step"] == 7
    assert new_scheduler.last_epoch == 1
    assert new_optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    given, taken = old_optimizer.state_dict()["state"], new_optimizer.state_dict()["state"]
    assert all(torch.equal(given[i]["exp_avg"], taken[i]["exp_avg"]) for i in range(4))


def test_rank_0_may_have_nothing(run):
    run(_rank_0_is_new, 2)


def _values_of_several_ranks(rank: int) -> None:
    new = {"step": 0, "epoch": 0, "scale": torch.zeros(2)}
    distckpt.redistribute({"epoch": 2} if rank else {"step": 7, "scale": torch.ones(2)}, new)
    assert (new["step"], new["epoch"], new["scale"].tolist()) == (7, 2, [1.0, 1.0])


def test_ranks_may_give_different_values(run):
    run(_values_of_several_ranks, 2)


def _values_that_differ(rank: int) -> int:
    new = {"step": 0, "args": {}}
    old = {"step": 7 + rank // 2, "args": {"lr": 0.5}}
    distckpt.redistribute(old if rank else {}, new)
    return new["step"]


def test_values_that_differ_between_ranks_are_named():
    with launched(_values_that_differ, 3) as launch:
        outcomes = launch.outcomes()
    assert [outcome.value for outcome in outcomes] == [7, 7, 7]
    (warning,) = outcomes[0].warnings_logged
    assert "ranks 1 and 2 give different values for 'step'" in warning
    assert "that of rank 1" in warning


@pytest.mark.parametrize("place", ["alone", "below a name"])
def test_state_dicts_of_modules_are_moved_as_tensors(place):
    old, new = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).bfloat16()
    named = {"alone": lambda state: state, "below a name": lambda state: {"model": state}}[place]
    with pytest.raises(LoadMismatchError, match="allow_dtype_cast=True"):
        distckpt.redistribute(named(old.state_dict()), named(new.state_dict()))
    report = distckpt.redistribute(
        named(old.state_dict()), named(new.state_dict()), allow_dtype_cast=True
    )
    assert report.num_bytes == 15 * 4
    assert torch.equal(new.weight, old.weight.bfloat16())
    wider = torch.nn.Linear(4, 5)
    with pytest.raises(LoadMismatchError, match="global shape"):
        distckpt.redistribute(named(old.state_dict()), named(wider.state_dict()))


def _smaller_module(rank: int) -> str:
    old, new = model_of(0), model_of(1)[:1]
    text = str(error_of(distckpt.redistribute, {"model": old}, {"model": new}))
    distckpt.redistribute({"model": old}, {"model": sharded_state_dict(new)})
    assert torch.equal(new[0].weight, old[0].weight)
    return text


def test_a_module_that_takes_a_part_is_told_how(run):
    for text in run(_smaller_module, 2):
        assert "'1.bias'" in text
        assert "sharded_state_dict" in text
        assert "checkpoint" not in text


class _TwoNames(torch.nn.Module):
    """A model whose head may be its embedding."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 6, bias=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def test_tied_targets_of_different_values_are_named(caplog):
    apart, tied = _TwoNames(False), _TwoNames(True)
    distckpt.redistribute({"model": apart}, {"model": tied})
    assert torch.equal(tied.head.weight, apart.head.weight)
    (warning,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert "'embed.weight' and 'head.weight' have different values" in warning
    assert "that of 'head.weight'" in warning


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((8,), lambda memory: memory[4:]),
        ((2, 4), lambda memory: memory[:8].view(2, 4)),
        ((2, 4), lambda memory: memory.as_strided((2, 4), (6, 1), 1)),
        ((8,), lambda memory: memory[:8].view(torch.int32)),
    ],
    ids=["flat buffer", "other shape", "strided", "other dtype"],
)
def test_targets_that_have_memory_in_common_are_named(shape, other, atomic, caplog):
    memory = torch.zeros(12)
    state = {"one": memory[:8], "two": other(memory)}
    two = torch.ones(shape, dtype=state["two"].dtype)
    distckpt.redistribute({"one": torch.arange(8.0), "two": two}, state, atomic=atomic)
    assert torch.equal(state["two"], two)
    (warning,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert "'one' and 'two' have different values" in warning
    caplog.clear()
    apart = {"one": memory[:6].view(2, 3)[:, :2], "two": memory[:6].view(2, 3)[:, 2]}
    distckpt.redistribute({"one": torch.ones(2, 2), "two": torch.zeros(2)}, apart)
    assert memory[:6].tolist() == [1, 1, 0, 1, 1, 0]
    assert not caplog.records


def test_wider_complex_numbers_are_filled():
    given = torch.randn(4, dtype=torch.complex64)
    target = torch.zeros(4, dtype=torch.complex128)
    distckpt.redistribute({"weight": given}, {"weight": target})
    assert torch.equal(target, given.to(torch.complex128))


def test_a_conversion_that_no_option_allows_is_told_without_one():
    given, taken = {"weight": torch.ones(4, dtype=torch.int8)}, torch.zeros(4, dtype=torch.bool)
    with pytest.raises(LoadMismatchError, match=r"or a wider one\.$"):
        distckpt.redistribute(given, {"weight": taken}, allow_dtype_cast=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_are_not_converted_as_if_they_were_values(dtype):
    codes = torch.ones(4, 4).to(dtype)
    given = {"up.weight": codes, "up.weight_scale": torch.full((4, 1), 0.5)}
    values = torch.zeros(4, 4, dtype=torch.bfloat16)
    with pytest.raises(LoadMismatchError, match=r"'up\.weight' .*'up\.weight_scale' beside it"):
        distckpt.redistribute(given, {"up.weight": values})
    taken = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    distckpt.redistribute(given, taken)
    assert torch.equal(taken["up.weight"].float(), codes.float())


def test_a_target_that_overlaps_itself_is_refused():
    given = {"weight": torch.arange(8.0).view(2, 4)}
    for strides in ((2, 1), (0, 1)):
        target = torch.zeros(12).as_strided((2, 4), strides)
        with pytest.raises(InvalidShardingError, match=r"'weight'.*several of its elements"):
            distckpt.redistribute(given, {"weight": target})
    woven = torch.zeros(12).as_strided((2, 4), (3, 2))
    distckpt.redistribute(given, {"weight": woven})
    assert torch.equal(woven, given["weight"])


def test_tied_targets_of_equal_values_are_not(caplog):
    apart, tied, other = _TwoNames(False), _TwoNames(True), _TwoNames(True)
    distckpt.redistribute({"model": tied}, {"model": apart})
    assert torch.equal(apart.head.weight, tied.head.weight)
    for old in (apart, tied):
        torch.nn.init.zeros_(other.head.weight)
        distckpt.redistribute({"model": old}, {"model": other})
        assert torch.equal(other.embed.weight, tied.embed.weight)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_values_that_overflow_are_named(caplog):
    given = {"a": torch.tensor([1e6, 1.0]), "b": torch.tensor(1e6), "c": torch.tensor(1e6)}
    taken = {
        "a": torch.zeros(2).half(),
        "b": torch.tensor(0.0).half(),
        "c": torch.zeros(()).double(),
    }
    distckpt.redistribute(given, taken, allow_dtype_cast=True)
    (warning,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert "2 values are not finite" in warning
    assert "'a', 'b'" in warning


def test_what_no_rank_takes_is_named_once(caplog):
    tied = torch.ones(4)
    given = {
        "embed": tied,
        "head": tied,
        "up.base_layer": torch.ones(4, 4),
        "up.lora_A": torch.ones(2, 4),
        "up.lora_B": torch.ones(4, 2),
    }
    taken = {"embed": torch.zeros(4), "up": torch.zeros(4, 4)}
    rules = [Rename("up.base_layer", "up")]
    for _ in range(2):
        distckpt.redistribute(given, taken, rules=rules)
    (warning,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert "no rank takes 'up.lora_A', 'up.lora_B', which is given" in warning


def test_what_rules_leave_out_is_not_given(caplog):
    given = {"up": torch.ones(4), "up_lora": torch.ones(3)}
    rules = [Drop("*_lora"), Rename("up", "down")]
    distckpt.redistribute(given, {"down": torch.zeros(4)}, rules=rules)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    with pytest.raises(LoadMismatchError, match="'up_lora'"):
        distckpt.redistribute(given, {"up_lora": torch.zeros(3)}, rules=rules)


def test_what_is_given_otherwise_is_told_how():
    module = torch.nn.Linear(3, 3)
    with pytest.raises(LoadMismatchError) as plain:
        distckpt.redistribute({"model": module.state_dict()}, {"model": module})
    assert "given with the prefix 'model.'" in str(plain.value)
    assert "state dicts on both" in str(plain.value)
    with pytest.raises(LoadMismatchError) as absent:
        distckpt.redistribute({"model": module}, {"model": module, "step": 0})
    assert "What is given holds no value for 'step'" in str(absent.value)
    assert "checkpoint" not in str(absent.value)


def test_what_the_fallback_lacks_is_told(tmp_path):
    average, other = torch.ones(3), ShardedTensor.from_rank_offsets("other", torch.ones(3))
    distckpt.save({"other": other, "ema": average}, tmp_path / "step")
    with pytest.raises(LoadMismatchError) as absent:
        distckpt.redistribute({}, {"ema": torch.zeros(3)}, fallback=tmp_path / "step")
    assert "No rank holds 'ema', and neither does the fallback" in str(absent.value)
    assert "common_state" in str(absent.value)
    assert "strict" not in str(absent.value)


@pytest.mark.parametrize("bits", [60, 80])
def test_buffers_that_do_not_fit_memory_are_named(bits):
    texts = run_once(_huge_buffers, 2, bits)
    assert texts[0] == texts[1]
    assert "max_inflight_bytes" in texts[0]


def _huge_buffers(rank: int, bits: int) -> str:
    held, target = split(0, rank, 2), split(1, rank, 2, empty=True)
    error = error_of(distckpt.redistribute, held, target, max_inflight_bytes=1 << bits)
    assert isinstance(error, distckpt.CheckpointingException)
    assert sum_over_ranks(1) == 2
    return str(error)


class _Unknown:
    """A value that cannot be sent."""


def _unknown_value(rank: int) -> str:
    old = {"extra": _Unknown()} if rank == 1 else {"step": 1}
    text = str(error_of(distckpt.redistribute, old, {"step": 0}))
    new = {"step": 0}
    distckpt.redistribute({"step": 2}, new)
    assert new["step"] == 2
    return text


def test_a_value_that_cannot_be_sent_is_named_on_all_ranks(run):
    for text in run(_unknown_value, 2):
        assert "rank 1" in text
        assert "'extra'" in text
        assert "_Unknown" in text


def _dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = values_of("weight", (10, 7))
    for old, new in [
        ((Shard(0), Replicate()), (Replicate(), Shard(1))),
        ((Shard(0), Shard(0)), (Shard(1), Shard(0))),
        ((Replicate(), Replicate()), (Shard(1), Shard(1))),
    ]:
        given = DTensor.from_local(full, mesh, [Replicate()] * 2).redistribute(mesh, old)
        taken = DTensor.from_local(full * 0, mesh, [Replicate()] * 2).redistribute(mesh, new)
        distckpt.redistribute({"weight": given}, {"weight": taken})
        assert torch.equal(taken.full_tensor(), full)
        plain = torch.zeros(10, 7)
        distckpt.redistribute({"weight": given}, {"weight": plain})
        assert torch.equal(plain, full)


def test_dtensors_and_plain_tensors():
    run_once(_dtensors, 4)


def _rules(rank: int) -> None:
    own = {key: part_of(key, 0, rank, 2) for key in KEYS[:2]}
    fused = torch.zeros(48, 12)
    target = {"fused.weight": fused}
    rules = [Concat(tuple(KEYS[:2]), "fused.weight", axis=0)]
    distckpt.redistribute(own, target, rules=rules)
    assert torch.equal(fused, torch.cat([values_of(key) for key in KEYS[:2]]))
    renamed = torch.zeros(24, 12)
    distckpt.redistribute(own, {"x": renamed}, rules=[Rename(KEYS[0], "x")])
    assert torch.equal(renamed, values_of(KEYS[0]))


def test_rules_lead_from_the_old_names_to_the_new_ones(run):
    run(_rules, 2)


# --- What no rank holds ---------------------------------------------------------------------------


def _lost_rank(rank: int, path: str) -> None:
    size = dist.get_world_size()
    saved = {**split(0, rank, size), "step": 3}
    distckpt.save(saved, path)
    # The last rank has lost its memory; what the others have is newer than the checkpoint.
    held = {} if rank == size - 1 else split(0, rank, size)
    for shard in held.values():
        shard.data += 1
    target = {**split(1, rank, size, empty=True), "step": 0}
    error = error_of(distckpt.redistribute, held, target)
    assert isinstance(error, LoadMismatchError)
    distckpt.redistribute(held, target, fallback=path)
    first = 24 // size * (size - 1)
    for key in KEYS:
        expected = values_of(key)
        expected[:first] += 1
        assert torch.equal(target[key].data, expected.chunk(size, 1)[rank])
    assert target["step"] == 3


def test_what_no_rank_holds_comes_from_the_fallback(run, tmp_path):
    run(_lost_rank, 3, str(tmp_path / "step"))


def _gap(rank: int) -> str:
    held = split(0, rank, 2)
    if rank == 1:
        del held[KEYS[2]]
    target = split(1, rank, 2, empty=True)
    error = error_of(distckpt.redistribute, held, target)
    assert isinstance(error, LoadMismatchError)
    assert all(shard.data.isnan().all() for shard in target.values())
    assert sum_over_ranks(1) == 2
    return str(error)


def test_a_gap_is_named_and_nothing_changes(run):
    first, second = run(_gap, 2)
    assert first == second
    assert KEYS[2] in first
    assert "[12:24, 0:6]" in first
    assert "rank 0" in first


def _overlap(rank: int) -> str:
    held = {"experts": ShardedTensor.from_rank_offsets(KEYS[0], torch.zeros(24, 12))}
    error = error_of(distckpt.redistribute, held, {KEYS[0]: part_of(KEYS[0], 0, rank, 2)})
    assert isinstance(error, InvalidShardingError)
    return str(error)


def test_an_overlap_is_named(run):
    for text in run(_overlap, 2):
        assert KEYS[0] in text
        assert "on rank 0" in text
        assert "on rank 1" in text


def _mistakes(rank: int) -> list[str]:
    held = split(0, rank, 2)
    half = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(12, 12).half(), (0, rank, 2))
        for key in KEYS
    }
    other_shape = {"a": ShardedTensor.from_rank_offsets(KEYS[0], torch.zeros(5, 5))}
    empty = {"a": part_of(KEYS[0], 0, rank, 2).without_data()}
    unknown = {"a": torch.zeros(2)}
    expanded = {"a": ShardedTensor.from_rank_offsets(KEYS[0], torch.zeros(1, 12).expand(24, 12))}
    windows = {"a": ShardedTensor.from_rank_offsets(KEYS[0], torch.zeros(35).unfold(0, 12, 1))}
    return [
        str(error_of(distckpt.redistribute, held, target))
        for target in (half, other_shape, empty, unknown, expanded, windows)
    ]


def test_mistakes_are_named(run):
    for half, shape, empty, unknown, expanded, windows in run(_mistakes, 2):
        assert "allow_dtype_cast=True" in half
        assert KEYS[0] in half
        assert "(24, 12)" in shape
        assert "(5, 5)" in shape
        assert "has no data" in empty
        assert "'a'" in unknown
        for repeated in (expanded, windows):
            assert "several of its elements are one" in repeated
            assert KEYS[0] in repeated


# --- Buffers --------------------------------------------------------------------------------------


def _files_in_memory() -> set[int]:
    """Return the inodes of the files in memory that this process has open for moves."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = f"/proc/self/fd/{name}"
            if os.readlink(path).startswith("/memfd:distckpt"):
                found.add(os.stat(path).st_ino)
    return found


def _moves(rank: int, size: int, group: Any = None, **options: Any) -> set[int]:
    target = split(1, rank, size, empty=True)
    distckpt.redistribute(split(0, rank, size), target, process_group=group, **options)
    assert is_right(target)
    return _files_in_memory()


def _same_buffers(rank: int) -> None:
    first = _moves(rank, 2)
    assert len(first) == 2
    assert _moves(rank, 2) == first
    held = split(0, rank, 2)
    del held[KEYS[0]]
    error_of(distckpt.redistribute, held, split(1, rank, 2))
    gc.collect()
    assert not _files_in_memory()
    second = _moves(rank, 2)
    assert not second & first
    larger = _moves(rank, 2, max_inflight_bytes=1 << 20)
    assert len(larger) == 2
    assert not larger & second
    group = dist.new_group()
    _moves(rank, 2, group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not _files_in_memory()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no files in memory")
def test_buffers_are_used_again_and_never_kept_twice():
    run_once(_same_buffers, 2)


def _groups_in_turn(rank: int) -> None:
    pairs = [(0, 1), (2, 3), (0, 3), (1, 2), (0, 1)]
    groups = [dist.new_group(list(pair)) for pair in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            _moves(pair.index(rank), 2, group)
        _moves(rank, 4, max_inflight_bytes=4 * 4096)
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            _moves(pair.index(rank), 2, group)


def test_groups_that_have_ranks_in_common_move_in_turn(run):
    run(_groups_in_turn, 4)


# --- Failures -------------------------------------------------------------------------------------


def _one_fails(rank: int, atomic: bool) -> str:
    target = split(1, rank, 2, empty=True)
    held = split(0, rank, 2)
    if rank == 1:
        held["bad"] = "a value"
        held[KEYS[0]].data = torch.empty(12, 12, device="meta")
    error = error_of(distckpt.redistribute, held, target, atomic=atomic)
    if atomic:
        assert all(shard.data.isnan().all() for shard in target.values())
    assert sum_over_ranks(1) == 2
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("atomic", [False, True])
def test_an_error_on_one_rank_is_raised_on_all(run, atomic):
    for text in run(_one_fails, 2, atomic):
        assert text.startswith("RankFailedError")
        assert "rank 1" in text


def _killed_in_the_middle(rank: int, at_round: int) -> tuple[str, str]:
    from distckpt._move import carry

    original = carry._Carrier.do_round

    def stopping(self: Any, number: int) -> None:
        if number == at_round:
            ask_parent()
        original(self, number)

    carry._Carrier.do_round = stopping
    target = split(1, rank, 4, empty=True)
    own = split(0, rank, 4)
    error = error_of(distckpt.redistribute, own, target, atomic=True, max_inflight_bytes=4 * 4096)
    data = torch.cat([shard.data.flatten() for shard in target.values()])
    state = "new" if is_right(target) else "old" if data.isnan().all() else "mixed"
    return str(error), state


@pytest.mark.parametrize("at_round", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_and_targets_stay_as_they_were(at_round):
    with launched(_killed_in_the_middle, 4, at_round, group_timeout=5.0) as launch:
        outcomes = launch.lose(2)
    for rank, outcome in enumerate(outcomes):
        if rank != 2:
            error, state = outcome
            assert "Lost contact with rank 2" in error
            assert state == "old"
