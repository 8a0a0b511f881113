"""Dicts of objects of several ranks, saved under one layout and loaded under others.

The oracle is training in one process that is not interrupted.
"""

from __future__ import annotations

import operator
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import distckpt
from tests.support.exchanges import watching_exchanges
from tests.support.harness import error_of, launched, run
from tests.support.parallel_modules import fsdp, plain, tp
from tests.support.reference import fsdp2_trains


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).clone()


class Loader:
    """Counts, as a data loader with a state does; each rank counts differently."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __iter__(self):
        return iter(())

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


def make(layout, seed: int) -> dict:
    net = Net(seed)
    layout(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }


def train(state: dict, steps: range) -> list[float]:
    """Train on the same data on all ranks."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randn(8, 6, generator=generator)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return train(make(plain, 1), range(5))


def train_and_save(rank: int, path: str) -> float:
    state = make(fsdp, 1)
    train(state, range(3))
    mesh = init_device_mesh("cpu", (2,))
    table = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    random.seed(rank)
    distckpt.save(
        {
            **state,
            "more": {"table": table},
            "rng": distckpt.RngState(),
            "loader": Loader(rank),
            "n": 3,
        },
        path,
    )
    drawn = random.random()
    return drawn


def resume(rank: int, path: str) -> tuple[list[float], list[float], int, float]:
    layout = [plain, fsdp, tp][dist.get_world_size() if dist.is_initialized() else 0]
    state = make(layout, 2)
    table, loader = torch.zeros(6), Loader(-1)
    if layout is not plain:
        table = distribute_tensor(
            table, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()]
        )
    else:
        table = distckpt.ShardedTensor.from_rank_offsets("more.table", table)
    objects = {
        **state,
        "more": {"table": table},
        "rng": distckpt.RngState(),
        "loader": loader,
        "n": 0,
    }
    loaded = distckpt.load(objects, path, strict="raise")
    assert loaded["n"] == 3
    found = loaded["more"]["table"]
    values = found.full_tensor() if isinstance(found, DTensor) else found
    return train(state, range(3, 5)), values.tolist(), loader.count, random.random()


@fsdp2_trains
def test_a_dict_of_objects_resumes_under_other_layouts(tmp_path, losses, caplog):
    path = str(tmp_path / "saved")
    drawn = run(train_and_save, 2, path)
    for rank, (resumed, table, count, number) in enumerate(run(resume, 2, path)):
        assert resumed == pytest.approx(losses[3:], rel=1e-5)
        assert (table, count, number) == ([0, 1, 2, 3, 4, 5], rank, drawn[rank])
    resumed, table, count, _ = resume(0, path)
    assert resumed == pytest.approx(losses[3:], rel=1e-5)
    assert (table, count) == ([0, 1, 2, 3, 4, 5], -1)
    warned = [record.getMessage() for record in caplog.records]
    for name in ("loader", "rng"):
        assert [
            text
            for text in warned
            if f"'{name}' is not restored" in text and "(2,)" in text and "(1,)" in text
        ]


def make_zero(seed: int) -> dict:
    with warnings.catch_warnings(action="ignore"):
        # Of functions that PyTorch uses itself.
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DistributedDataParallel(Net(seed))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }


def save_zero(rank: int, path: str) -> list[float]:
    state = make_zero(1)
    train(state, range(3))
    before = [p.detach().clone() for p in state["model"].parameters()]
    held = {id(p) for p in state["optimizer"].optim.state}
    distckpt.save(state, path)
    assert held == {id(p) for p in state["optimizer"].optim.state}, "each rank has its part"
    assert all(map(torch.equal, before, state["model"].parameters()))
    return train(state, range(3, 5))


def load_zero(rank: int, path: str) -> list[float]:
    state = make_zero(2)
    distckpt.load(state, path, strict="raise")
    assert 0 < len(state["optimizer"].optim.state) < 4
    return train(state, range(3, 5))


def test_zero_redundancy_optimizers_resume_here_and_as_others(tmp_path, losses):
    path = str(tmp_path / "saved")
    for ranks in (run(save_zero, 2, path), run(load_zero, 2, path)):
        for resumed in ranks:
            assert resumed == pytest.approx(losses[3:], rel=1e-5)
    state = make(plain, 2)
    distckpt.load(state, path, strict="raise")
    assert train(state, range(3, 5)) == pytest.approx(losses[3:], rel=1e-5)


def save_zero_for_each_parameter(rank: int, path: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DistributedDataParallel(Net(1))
    optimizers = [
        ZeroRedundancyOptimizer([param], torch.optim.AdamW, lr=0.01) for param in net.parameters()
    ]
    net(torch.ones(2, 6)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    distckpt.save({"model": net, "optimizer": optimizers}, path)
    other = [torch.optim.AdamW([param]) for param in net.parameters()]
    distckpt.load({"model": net, "optimizer": other}, path)
    owned = [state for each in optimizers for state in each.optim.state.values()]
    loaded = [state["exp_avg"] for each in other for state in each.state.values()]
    assert len(loaded) == len(optimizers)
    assert len(owned) == (0 if rank else len(loaded))
    assert all(any(torch.equal(state["exp_avg"], one) for one in loaded) for state in owned)


def test_optimizers_whose_states_are_all_on_another_rank(tmp_path):
    with launched(save_zero_for_each_parameter, 2, str(tmp_path / "saved")) as launch:
        outcomes = launch.outcomes()
    assert [(outcome.error, outcome.warnings_logged) for outcome in outcomes] == [(None, [])] * 2


def load_by_stored_names(rank: int, path: str) -> list[float]:
    """Return a moment of each weight of a stage, whose optimizer has the names of the weights."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(4)))
    if not rank:
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full((2, 2), float(number))
        optimizer.step()
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        distckpt.dcp.save(state, checkpoint_id=path, no_dist=True)
    torch.distributed.barrier()
    stage = {f"{number}.weight": model[number].weight for number in (3 - rank, 1 - rank)}
    optimizer = torch.optim.SGD(list(stage.items()), lr=0.5, momentum=0.9)
    distckpt.load({"model": model, "optim": optimizer}, path)
    return [optimizer.state[param]["momentum_buffer"][0, 0].item() for param in stage.values()]


def test_stages_load_a_state_by_the_names_that_were_stored_with_numbers(tmp_path):
    assert run(load_by_stored_names, 2, str(tmp_path / "saved")) == [[3.0, 1.0], [2.0, 0.0]]


def save_running_statistics(rank: int, path: str) -> list[torch.Tensor]:
    net = torch.nn.Sequential(*[torch.nn.BatchNorm1d(2048) for _ in range(4)])
    # As under DistributedDataParallel: each rank normalizes its own part of the data.
    net(torch.randn(4, 2048, generator=torch.Generator().manual_seed(rank)))
    distckpt.save({"model": net}, path, validate_replicas=True)
    return [layer.running_mean.clone() for layer in net]


def test_buffers_that_differ_between_ranks_are_those_of_rank_0(tmp_path):
    path = str(tmp_path / "saved")
    first, second = run(save_running_statistics, 2, path)
    assert not any(map(torch.equal, first, second))
    net = torch.nn.Sequential(*[torch.nn.BatchNorm1d(2048) for _ in range(4)])
    distckpt.load({"model": net}, path)
    assert all(torch.equal(layer.running_mean, own) for layer, own in zip(net, first, strict=True))


def save_what_drifts_apart(
    rank: int, path: str
) -> tuple[list[str], list[bool], list[torch.Tensor]]:
    """Save a module that each rank makes, and trains, on its own; copies are on their way apart
    from the third save.
    """
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 40).to(torch.bfloat16))
    shards = distckpt.modules.sharded_state_dict(Net(1), "part.")
    texts = [str(error_of(distckpt.save, {"model": net, "part": shards}, f"{path}_0"))]
    with distckpt.CheckpointManager(f"{path}_run", validate_replicas=False) as manager:
        manager.save(1, {"model": net})
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(float("nan"))
    reused = []
    for number, change in enumerate((0.0, 0.0, float(rank))):
        with torch.no_grad():
            net[0].weight[100:200] += change
            net[1].weight.T[7] = 1.0 + change  # The last block of a sample ends there.
            net[1].weight[-1, -1] = change
        state = {"model": net, "part": shards}
        texts.append(
            str(error_of(distckpt.save, state, f"{path}_{number + 1}", on_report=reused.append))
        )
    weights = [net[1].weight.detach().view(torch.int16).clone()]
    with torch.no_grad():
        net[1].weight.fill_(1.0)
        net[1].weight.view(-1)[6200:7200] += rank  # A twelfth of it.
    weights.append(net[1].weight.detach().view(torch.int16).clone())
    texts.append(str(error_of(distckpt.save, state, f"{path}_4", on_report=reused.append)))
    return texts, [report.plan_reused for report in reused], weights


def test_replicas_that_come_apart_are_stored_whole(tmp_path):
    with launched(save_what_drifts_apart, 2, str(tmp_path / "saved")) as launch:
        outcomes = launch.outcomes()
    for outcome in outcomes:
        texts, reused, _ = outcome.value
        assert "'{0..1}.bias' (2 keys), '{0..1}.weight' (2 keys)" in texts[0]
        assert "differs between rank 0 and rank 1" in texts[0]
        assert "'part." not in texts[0]
        assert texts[1:] == ["None"] * 4
        assert reused == [False, True, False, False], "each save is judged by what it holds"
    of_rank_0, of_rank_1 = [outcome.value[2] for outcome in outcomes]
    for number in (3, 4):
        saved = distckpt.open(tmp_path / f"saved_{number}").read_tensors()
        bits = saved["1.weight"].view(torch.int16)
        assert torch.equal(bits, of_rank_0[number - 3])
        assert not torch.equal(bits, of_rank_1[number - 3])
    _, *warnings_of_saves = outcomes[0].warnings_logged
    assert len(warnings_of_saves) == 2
    for warning in warnings_of_saves:
        assert "replicas differ: '1.weight' on rank 1 differ" in warning
    assert outcomes[1].warnings_logged == []


def save_in_turns(rank: int, path: str) -> list[str]:
    """Save replicas that are equal, drift apart, have nothing in common, and are equal again."""
    texts = []
    for number, kind in enumerate(["equal", "drift", "more", "unrelated", "equal", "unrelated"]):
        torch.manual_seed(rank if kind == "unrelated" else 0)
        net = torch.nn.Linear(40, 40)
        with torch.no_grad():
            net.weight *= 1.0 + rank * {"drift": 1e-5, "more": 1e-2}.get(kind, 0.0)
        texts.append(str(error_of(distckpt.save, {"model": net}, f"{path}_{number}")))
    return texts


def test_each_save_judges_its_replicas(tmp_path):
    with launched(save_in_turns, 2, str(tmp_path / "saved")) as launch:
        outcomes = launch.outcomes()
    for outcome in outcomes:
        saved = [text == "None" for text in outcome.value]
        assert saved == [True, True, True, False, True, False]
        assert "differs between rank 0 and rank 1" in outcome.value[3]
    warned = [text for text in outcomes[0].warnings_logged if "replicas differ" in text]
    assert len(warned) == 2


def save_a_head_that_was_not_sent(rank: int, path: str) -> None:
    """Save a body that has drifted, and a smaller head that has nothing in common."""
    torch.manual_seed(0)
    body, head = torch.nn.Linear(40, 40), torch.nn.Linear(40, 4)
    with torch.no_grad():
        body.weight *= 1.0 + rank * 1e-4
        head.weight += rank * torch.randn(4, 40)
        head.weight *= 1.0 - 2 * rank
    distckpt.save({"model": torch.nn.ModuleDict({"body": body, "head": head})}, path)


def test_what_has_nothing_in_common_is_named_beside_what_has_drifted(tmp_path):
    with launched(save_a_head_that_was_not_sent, 2, str(tmp_path / "saved")) as launch:
        (warning,) = launch.outcomes()[0].warnings_logged
    assert "replicas differ: 'body.weight', 'head.weight' on rank 1" in warning
    assert "'head.weight' have nothing in common" in warning
    assert "'body.weight' have" not in warning


def resume_own_head(rank: int, path: str) -> bool:
    """Save and load a module and an optimizer that only rank 1 has."""

    def state(seed: int) -> dict:
        shared, own = make(DistributedDataParallel, 1), make(plain, seed)
        return (
            {**shared, "head": {"model": own["model"], "optimizer": own["optimizer"]}}
            if rank == 1
            else shared
        )

    def step(head: dict) -> list[torch.Tensor]:
        head["optimizer"].zero_grad()
        head["model"](torch.ones(1, 6)).sum().backward()
        head["optimizer"].step()
        return [param.detach().clone() for param in head["model"].parameters()]

    saved, loaded = state(2), state(3)
    if rank == 1:
        step(saved["head"])
    distckpt.save(saved, path)
    distckpt.load(loaded, path)
    with pytest.raises(
        distckpt.InvalidShardingError, match=r"Rank 1 has 'own', and rank 0 does not, whose"
    ):
        distckpt.save(
            saved | ({"own": saved["scheduler"]} if rank == 1 else {}), path, overwrite=True
        )
    return rank == 0 or all(map(torch.equal, step(loaded["head"]), step(saved["head"])))


def test_an_optimizer_that_rank_0_does_not_have(tmp_path):
    assert run(resume_own_head, 2, str(tmp_path / "saved")) == [True, True]


def count_exchanges(rank: int, path: str) -> list[int]:
    state, counts = make(DistributedDataParallel, 1), []
    train(state, range(1))
    state["rng"] = distckpt.RngState()
    calls = [
        lambda: distckpt.save(state, path),
        lambda: distckpt.save(state, path, overwrite=True),
        lambda: distckpt.load(state, path),
    ]
    for call in calls:
        names: list[str] = []
        with watching_exchanges(names.append):
            call()
        counts.append(len(names))
    return counts


def test_a_save_and_a_load_make_few_exchanges(tmp_path):
    for counts in run(count_exchanges, 2, str(tmp_path / "saved")):
        # Half of them tell the coordinator something, which the others answer.
        assert all(map(operator.le, counts, (11, 4, 24))), counts


class Stage(torch.nn.Module):
    """Some layers of a model."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict(
            {str(number): torch.nn.Linear(2, 2) for number in numbers}
        )


def save_and_load_stages(rank: int, path: str) -> str:
    saved = Stage(rank, 2 + rank)
    distckpt.save({"model": saved}, path)
    loaded = distckpt.load({"model": Stage(rank, 2 + rank)}, path)["model"]
    assert all(map(torch.equal, loaded.parameters(), saved.parameters()))
    with pytest.raises(distckpt.LoadMismatchError) as caught:
        distckpt.load({"model": Stage(rank)}, path)
    if rank:
        saved.head = torch.nn.Linear(2, 2)
    distckpt.save({"model": saved}, path, overwrite=True)
    dist.barrier()
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"holds 'head.bias', 'head.weight', which"
    ):
        distckpt.load({"model": Stage(*range(4))}, path, process_group=dist.new_subgroups(1)[0])
    return str(caught.value)


def test_stages_together_take_all_of_a_model(tmp_path):
    for text in run(save_and_load_stages, 2, str(tmp_path / "saved")):
        assert "holds 'layers.{2..3}.bias' (2 keys), 'layers.{2..3}.weight' (2 keys), which" in text


class Heads(torch.nn.Module):
    """Two layers with one weight or two."""

    def __init__(self, are_tied: bool) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        torch.nn.init.constant_(self.b.weight, 7.0)
        if are_tied:
            self.b = self.a


def save_and_load_what_is_left_out(rank: int, path: str) -> tuple[list[str], str]:
    torch.manual_seed(0)
    saved = {"model": Heads(are_tied=False)}
    saved["optimizer"] = torch.optim.Adam(saved["model"].parameters())
    sum(p.square().sum() for p in saved["model"].parameters()).backward()
    saved["optimizer"].step()
    saved["scheduler"] = torch.optim.lr_scheduler.LambdaLR(saved["optimizer"], lambda step: 1.0)
    distckpt.save(saved, path)
    loaded = {"model": Heads(are_tied=True)}
    # Only one rank has less than was saved: the others still take all of it.
    if rank:
        loaded["model"] = Heads(are_tied=False)
    loaded["optimizer"] = torch.optim.RAdam([loaded["model"].a.weight])
    reports = []
    distckpt.load(loaded, path, on_report=reports.append)
    error = error_of(distckpt.load, loaded, path, strict="raise")
    return sorted(reports[0].missing), type(error).__name__


def test_reports_of_all_ranks_name_what_is_left_out(tmp_path):
    results = run(save_and_load_what_is_left_out, 2, str(tmp_path / "saved"))
    assert (
        results
        == [
            (
                [
                    "a.weight",
                    "optimizer.state.exp_avg.b.weight",
                    "optimizer.state.exp_avg_sq.b.weight",
                ],
                "LoadMismatchError",
            )
        ]
        * 2
    )
