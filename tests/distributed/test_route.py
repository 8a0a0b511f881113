"""Moving versions between jobs that know only an address."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import CheckpointingException, LoadMismatchError, RankFailedError, ShardedTensor
from distckpt._move import carry, inbox, redistribute, roll_call
from distckpt._ranks.attendance import lost_contact
from distckpt.rules import Rename
from tests.support.addresses import reserved_address
from tests.support.harness import ask_parent, error_of, kept_ranks, launched, signal_parent
from tests.support.machines import on_machine
from tests.support.reference import has_routes

pytestmark = has_routes

SHAPE = (24, 8)
TIMEOUT = 30.0


@pytest.fixture(scope="module")
def run():
    with kept_ranks() as run_ranks:
        yield lambda *args: run_ranks(*args, backend=None)


@pytest.fixture
def address():
    with reserved_address() as reserved:
        yield reserved


def values(version: int) -> torch.Tensor:
    return torch.arange(24.0 * 8).view(SHAPE) + version


def part(rank: int, size: int, axis: int = 0) -> ShardedTensor:
    data = torch.full(SHAPE, torch.nan).chunk(size, axis)[rank].contiguous()
    return ShardedTensor.from_rank_offsets("weight", data, (axis, rank, size))


def is_of(shard: ShardedTensor, version: int) -> bool:
    return torch.equal(shard.data, values(version)[shard.global_slice()])


def _trainer_and_engines(rank: int, address: str) -> list[Any]:
    if rank == 0:
        weight = values(0)
        route = distckpt.Route(address, source={"weight": weight}, num_targets=2, timeout=TIMEOUT)
    else:
        shard = part(rank - 1, 2, axis=1)
        route = distckpt.Route(address, target={"weight": shard}, timeout=TIMEOUT)
    reports = []
    for version in (3, 5, 6):
        if rank == 0:
            weight.copy_(values(version))
        reports.append(route.run(version=version if rank < 2 else None))
        assert rank == 0 or is_of(shard, version)
    route.close()
    return [(report.version, report.num_bytes) for report in reports]


def _trainer_and_renaming_engine(rank: int, address: str) -> None:
    """The engine alone has rules, one of which matches nothing."""
    if rank == 0:
        weight = values(1)
        route = distckpt.Route(address, source={"weight": weight}, timeout=TIMEOUT)
    else:
        weight = torch.zeros_like(values(1))
        rules = [Rename("engine.weight", "weight"), Rename("none", "other")]
        target = {"engine": {"weight": weight}}
        route = distckpt.Route(address, target=target, rules=rules, timeout=TIMEOUT)
    route.run(version=1 if rank == 0 else None)
    assert torch.equal(weight, values(1))
    route.close()


def test_an_engine_has_rules_of_its_own(run, address):
    run(_trainer_and_renaming_engine, 2, address)


def test_engines_get_every_version(run, address):
    assert run(_trainer_and_engines, 3, address) == [[(3, 768), (5, 768), (6, 768)]] * 3


def _two_trainer_ranks(rank: int, address: str, meeting: str) -> None:
    """Both trainer ranks have a process group of their own job."""
    if rank < 2:
        dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=rank, world_size=2)
        shard = part(rank, 2)
        shard.key = "trainer.weight"
        route = distckpt.Route(
            address,
            source={"weight": shard},
            rules=[Rename("trainer.weight", "weight")],
            timeout=TIMEOUT,
        )
    else:
        shard = part(0, 1)
        route = distckpt.Route(address, target={"weight": shard}, timeout=TIMEOUT)
    for version in (1, 2):
        if rank < 2:
            shard.data.copy_(values(version)[shard.global_slice()])
        assert route.run(version=version).version == version
        assert is_of(shard, version)
    if rank < 2:
        dist.destroy_process_group()


def test_all_ranks_of_a_trainer_give(address, tmp_path):
    meeting = str(tmp_path / "meeting")
    with launched(_two_trainer_ranks, 3, address, meeting, backend=None) as launch:
        launch.values()


def _two_jobs(rank: int, address: str, meetings: list[str]) -> str:
    """Two trainers of two ranks have been given one address."""
    job, rank_in_job = divmod(rank, 2)
    meeting = dist.FileStore(meetings[job], 2)
    dist.init_process_group("gloo", store=meeting, rank=rank_in_job, world_size=2)
    source, text = {"weight": part(rank_in_job, 2)}, ""
    if job == 0:
        route = distckpt.Route(address, source=source, timeout=TIMEOUT)
        ask_parent()
        route.close()
    else:
        ask_parent()
        text = str(error_of(distckpt.Route, address, source=source, timeout=TIMEOUT))
    dist.destroy_process_group()
    return text


def test_no_rank_of_a_trainer_joins_another_trainer(address, tmp_path):
    meetings = [str(tmp_path / "one"), str(tmp_path / "other")]
    with launched(_two_jobs, 4, address, meetings, backend=None) as launch:
        for rank in range(4):
            launch.wait_for_signal(rank)
        launch.answer(2)
        launch.answer(3)
        launch.wait_for_end(2, 3)
        launch.answer(0)
        launch.answer(1)
        for text in launch.values()[2:]:
            assert f"{address} cannot be hosted here" in text


def _of_other_release(rank: int, address: str) -> str:
    if rank == 0:
        with distckpt.Route(address, source={"weight": values(0)}, timeout=TIMEOUT):
            ask_parent()
        return ""
    ask_parent()
    inbox.__version__ = "999.0"
    error = error_of(distckpt.Route, address, target={"weight": part(0, 1)}, timeout=TIMEOUT)
    inbox.__version__ = distckpt.__version__
    return str(error)


def test_another_release_is_refused(address):
    with launched(_of_other_release, 2, address, backend=None) as launch:
        launch.wait_for_signal(0)
        launch.wait_for_signal(1)
        launch.answer(1)
        launch.wait_for_end(1)
        launch.answer(0)
        _, text = launch.values()
    assert f"has distckpt {distckpt.__version__}, and this process 999.0" in text


def test_the_store_of_another_program_is_not_joined(address):
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    with pytest.raises(CheckpointingException, match="not the trainer of a Route"):
        distckpt.Route(address, target={"weight": part(0, 1)}, timeout=0.1)
    assert not store.check(["targets"])


def _late(rank: int, address: str) -> list[int]:
    seen = []
    if rank == 2:
        ask_parent()
    if rank == 0:
        weight = values(0)
        route = distckpt.Route(address, source={"weight": weight}, timeout=TIMEOUT)
    else:
        shard = part(0, 1)
        route = distckpt.Route(address, target={"weight": shard}, timeout=TIMEOUT)
        if rank == 2:
            signal_parent()
    for version in range(4):
        if rank == 0:
            weight.copy_(values(version))
            if version == 2:
                ask_parent()
                # The late one has asked by then.
                while b'"target 2", 1, "ask"' not in route._store.get("inbox"):
                    time.sleep(0.01)
        if rank == 2 and version > 1:
            break
        report = route.run(version=version if rank < 2 else None)
        assert rank == 0 or is_of(shard, report.version)
        seen.append(report.version)
    return seen


def test_a_late_engine_joins_at_the_next_version(address):
    with launched(_late, 3, address, backend=None) as launch:
        launch.wait_for_signal(0)
        launch.wait_for_signal(2)
        launch.answer(2)
        launch.wait_for_signal(2)
        launch.answer(0)
        assert launch.values() == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 3]]


def _engine_dies(rank: int, address: str, at_round: int) -> list[int]:
    if rank == 0:
        weight = values(0)
        state = {"source": {"weight": weight}, "num_targets": 3}
    else:
        shard = part((rank - 1) % 2, 2)
        state = {"target": {"weight": shard}}
    route = distckpt.Route(address, **state, atomic=True, timeout=TIMEOUT)
    original = carry._Carrier.do_round
    seen = []
    for version in range(3):
        if rank == 0:
            weight.copy_(values(version))
        if version == 1 and rank == 3:

            def stopping(self: Any, number: int) -> None:
                if number == at_round:
                    ask_parent()
                original(self, number)

            carry._Carrier.do_round = stopping
        seen.append(route.run(version=version).version)
        assert rank == 0 or is_of(shard, version)
    return seen


@pytest.mark.parametrize("at_round", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_engine_that_dies_is_named_and_the_others_go_on(address, at_round):
    with launched(_engine_dies, 4, address, at_round, backend=None) as launch:
        launch.wait_for_signal(3)
        launch.kill(3)
        outcomes = launch.outcomes()
    assert [outcome and outcome.value for outcome in outcomes] == [[0, 1, 2]] * 3 + [None]
    lost, left_out = outcomes[0].warnings_logged
    assert "lost contact with target" in lost
    assert "in version 1" in lost
    assert "did not come to version 1: left out" in left_out


NUM_ENGINES = 5


def _engine_that_passes_on_dies(rank: int, address: str, atomic: bool) -> list[int]:
    with on_machine(rank):
        return _spread_versions(rank, address, atomic)


def _spread_versions(rank: int, address: str, atomic: bool) -> list[int]:
    """All engines take all that the trainer has; they join by rank."""
    if rank == 0:
        weight = values(0)
        sides: dict[str, Any] = {"source": {"weight": weight}, "num_targets": NUM_ENGINES}
    else:
        ask_parent()
        shard = part(0, 1)
        sides = {"target": {"weight": shard}}
    route = distckpt.Route(address, **sides, atomic=atomic, timeout=TIMEOUT)
    if rank:
        signal_parent()
    original = carry._Carrier.do_round

    def stopping(self: Any, number: int) -> None:
        if rank == 1 and number == 2:
            assert self._forwards[number - 1]
            ask_parent()
        original(self, number)

    seen = []
    for version in range(3):
        if rank == 0:
            weight.copy_(values(version))
        if version == 1:
            carry._Carrier.do_round = stopping
        report = route.run(version=version)
        # Everyone who is there gets it once.
        num_engines = NUM_ENGINES - (version > 0)
        assert report.sent_bytes == num_engines * values(0).nbytes
        assert rank == 0 or is_of(shard, version)
        seen.append(report.version)
    return seen


@pytest.mark.parametrize("atomic", [False, True])
def test_engines_get_a_version_although_one_that_passes_it_on_dies(address, atomic):
    arguments = (1 + NUM_ENGINES, address, atomic)
    with launched(_engine_that_passes_on_dies, *arguments, backend=None) as launch:
        for rank in range(1, 1 + NUM_ENGINES):
            launch.wait_for_signal(rank)
            launch.answer(rank)
            launch.wait_for_signal(rank)
        launch.wait_for_signal(1)
        launch.kill(1)
        outcomes = launch.outcomes()
    texts = [outcome and outcome.error for outcome in outcomes]
    assert [outcome and outcome.value for outcome in outcomes] == [
        None if rank == 1 else [0, 1, 2] for rank in range(1 + NUM_ENGINES)
    ], texts
    lost, left_out = outcomes[0].warnings_logged
    assert "target 1" in lost
    assert "in version 1" in lost
    assert "target 1 did not come to version 1: left out" in left_out


def _engine_ends(rank: int, address: str, closes: bool) -> list[int]:
    """One of two targets ends between two versions."""
    # The source has waited for the one that is gone for longer than the other one's timeout.
    timeout = TIMEOUT if closes else 3.0 if rank == 0 else 2.0
    if rank == 0:
        sides: dict[str, Any] = {"source": {"weight": values(0)}, "num_targets": 2}
    else:
        sides = {"target": {"weight": part(rank - 1, 2)}}
    route = distckpt.Route(address, **sides, timeout=timeout)
    seen = [route.run(version=0).version]
    if rank == 2:
        if closes:
            route.close()
        return seen
    for version in (1, 2):
        seen.append(route.run(version=version if rank == 0 else None).version)
    return seen


@pytest.mark.parametrize("closes", [True, False])
def test_others_go_on_when_an_engine_ends_between_versions(address, closes):
    started = time.monotonic()
    with launched(_engine_ends, 3, address, closes, backend=None) as launch:
        outcomes = launch.outcomes()
    assert [outcome.value for outcome in outcomes] == [[0, 1, 2], [0, 1, 2], [0]], outcomes
    # One that has left is not waited for.
    assert len(outcomes[0].warnings_logged) == (0 if closes else 1)
    assert not closes or time.monotonic() - started < TIMEOUT


def _all_engines_are_restarted(rank: int, address: str) -> list[int]:
    if rank == 0:
        route = distckpt.Route(address, source={"weight": values(0)}, timeout=TIMEOUT)
        seen = [route.run(version=0).version]
        while b'"target 1", 3, "ask"' not in route._store.get("inbox"):
            time.sleep(0.01)
        ask_parent()
        return [*seen, route.run(version=1).version]
    if rank == 2:
        ask_parent()
    route = distckpt.Route(address, target={"weight": part(0, 1)}, timeout=TIMEOUT)
    seen = [route.run().version]
    return seen if rank == 2 else [*seen, route.run().version]


def test_a_version_is_not_moved_to_nobody(address):
    """The only engine dies while it waits, and is started again."""
    with launched(_all_engines_are_restarted, 3, address, backend=None) as launch:
        launch.wait_for_signal(0)
        launch.wait_for_signal(2)
        launch.kill(1)
        launch.answer(0)
        launch.answer(2)
        assert launch.values() == [[0, 1], None, [1]]


def _contact_is_lost_at_the_end(rank: int, address: str) -> list[int]:
    """The targets have all of version 1 when the source loses contact: it moves that again."""
    if rank == 0:
        sides: dict[str, Any] = {"source": {"weight": values(0)}, "num_targets": 2}
    else:
        sides = {"target": {"weight": part(rank - 1, 2)}}
    route = distckpt.Route(address, **sides, timeout=TIMEOUT)
    seen = [route.run(version=0).version]
    original = redistribute.restore

    def losing(*args: Any) -> Any:
        restored = original(*args)
        redistribute.restore = original
        raise lost_contact({1: TimeoutError()}, f"lost after {restored[-1][0]} bytes")

    if rank == 0:
        redistribute.restore = losing
    for version in (1, 2):
        seen.append(route.run(version=version).version)
    return seen


def test_targets_that_have_a_version_which_is_moved_again_wait_for_the_next(run, address):
    assert run(_contact_is_lost_at_the_end, 3, address) == [[0, 1, 2]] * 3


def _trainer_dies(rank: int, address: str) -> tuple[str, bool]:
    if rank == 0:
        route = distckpt.Route(address, source={"weight": values(0)}, timeout=TIMEOUT)
        route.run(version=0)
        ask_parent()
    shard = part(0, 1)
    route = distckpt.Route(address, target={"weight": shard}, timeout=TIMEOUT)
    route.run()
    signal_parent()
    error = error_of(route.run)
    assert isinstance(error, RankFailedError)
    return str(error), is_of(shard, 0)


def test_engines_name_a_trainer_that_is_gone(address):
    with launched(_trainer_dies, 2, address, backend=None) as launch:
        launch.wait_for_signal(0)
        launch.wait_for_signal(1)
        launch.kill(0)
        text, is_old = launch.values()[1]
    assert "source rank 0" in text
    assert is_old


def _as_an_engine_keeps_it(rank: int, address: str) -> None:
    """Some tensors are converted, transposed, padded or wanted by several; some have NaN."""
    weight, codes = values(0), torch.arange(96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    narrow, step = torch.randn(300).bfloat16(), torch.tensor(7)
    weight[3, 3] = torch.nan
    narrow[[0, 17, 299]] = torch.nan
    if rank == 0:
        source = {"weight": weight, "codes": codes, "narrow": narrow, "step": step}
        sides: dict[str, Any] = {"source": source, "num_targets": 2}
    else:
        memory = torch.zeros(8, 24, dtype=torch.bfloat16)
        wide, padded = torch.zeros(150), torch.ones(24, 10)
        part_of_narrow = ShardedTensor(
            "narrow", wide, wide.dtype, (150,), (300,), (150 * (rank - 1),), None
        )
        padded_weight = ShardedTensor.from_rank_offsets("weight", padded, allow_shape_mismatch=True)
        target = {
            "weight": ShardedTensor.from_rank_offsets("weight", memory.t()),
            "padded": padded_weight,
            "narrow": part_of_narrow,
            "codes": torch.zeros(96, dtype=torch.float8_e4m3fn),
            "step": torch.tensor(0),
        }
        sides = {"target": target}
    route = distckpt.Route(address, **sides, allow_dtype_cast=True, timeout=TIMEOUT)
    for version in range(2):
        route.run(version=version, verify=True)
    # Without comparing, again.
    route.run(version=2)
    if rank:
        assert torch.equal(memory.nan_to_num(), weight.t().bfloat16().nan_to_num())
        assert (padded[:, 8:] == 0).all()
        assert target["step"] == 7


def test_versions_are_compared_as_targets_keep_them(run, address):
    run(_as_an_engine_keeps_it, 3, address)


def _one_bit_is_wrong(rank: int, address: str, atomic: bool) -> tuple[str, str]:
    if rank == 0:
        sides: dict[str, Any] = {"source": {"weight": values(1), "bias": values(2)}}
        route = distckpt.Route(address, **sides, num_targets=2, atomic=atomic, timeout=TIMEOUT)
    else:
        shard, bias = part(rank - 1, 2), torch.zeros(SHAPE)
        sides = {"target": {"weight": shard, "bias": bias}}
        route = distckpt.Route(address, **sides, atomic=atomic, timeout=TIMEOUT)
    original = carry._Carrier._take

    def take(self: Any, wave: int, is_landed: bool) -> None:
        original(self, wave, is_landed)
        if rank == 2 and wave == 0 and not is_landed:
            flipped = next(view for view in self.targets if view.shape == (12, 8))
            flipped.view(torch.int32)[5, 6] ^= 1 << 9

    carry._Carrier._take = take
    try:
        error = error_of(route.run, 1, verify=True)
    finally:
        carry._Carrier._take = original
    assert type(error) is CheckpointingException
    if rank and atomic:
        assert shard.data.isnan().all()
        assert not bias.any()
    route.run(2, verify=True)
    assert rank == 0 or is_of(shard, 1)
    # Targets are numbered as they join.
    return str(error), f"key 'weight' on rank {route._member.name[-1] if rank else 0}"


@pytest.mark.parametrize("atomic", [False, True])
def test_what_arrives_otherwise_than_it_was_sent_is_named(run, address, atomic):
    texts, names = zip(*run(_one_bit_is_wrong, 3, address, atomic), strict=True)
    assert len(set(texts)) == 1
    assert [name in texts[0] for name in names] == [False, False, True]
    assert "bias" not in texts[0]


def _only_one_side_compares(rank: int, address: str) -> str:
    sides: dict[str, Any] = {"source": {"weight": values(1)}}
    if rank:
        sides = {"target": {"weight": part(0, 1)}}
    route = distckpt.Route(address, **sides, timeout=TIMEOUT)
    return str(error_of(route.run, 1, verify=rank == 0))


def test_both_sides_must_ask_to_compare(run, address):
    for text in run(_only_one_side_compares, 2, address):
        assert "must give the same verify" in text


def _mistakes(rank: int, address: str) -> list[str]:
    if rank == 0:
        route = distckpt.Route(address, source={"weight": values(0)}, timeout=TIMEOUT)
        gap = error_of(route.run, 0)
        assert isinstance(gap, LoadMismatchError)
        route.run(1)
        route.run(2)
        return [str(gap), str(error_of(route.run)), ""]
    shard = part(0, 1)
    unknown = {"weight": shard, "bias": torch.zeros(2)}
    route = distckpt.Route(address, target=unknown, timeout=TIMEOUT)
    gap = error_of(route.run)
    assert isinstance(gap, LoadMismatchError)
    assert shard.data.isnan().all()
    # What a route moves may change.
    del unknown["bias"]
    other = error_of(route.run, version=7)
    assert isinstance(other, CheckpointingException)
    assert route.run().version == 1
    assert is_of(shard, 0)
    over = error_of(route.run, version=1)
    assert isinstance(over, CheckpointingException)
    assert route.run().version == 2
    return [str(gap), str(other), str(over)]


def test_mistakes_are_named(run, address):
    (gap, no_version, _), (same_gap, other, over) = run(_mistakes, 2, address)
    assert gap == same_gap
    assert "'bias'" in gap
    assert "names the version" in no_version
    assert "asks for version 7, and version 1 is moved" in other
    assert "asks for version 1, and version 2 is moved" in over
    assert "Version 1 is over" in over


def _cannot_connect(rank: int, address: str) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    sides: dict[str, Any] = {"source": {"weight": values(0)}}
    if rank:
        sides = {"target": {"weight": part(0, 1)}}
    error = error_of(distckpt.Route(address, **sides, timeout=TIMEOUT).run, 1)
    assert isinstance(error, RankFailedError)
    ask_parent()
    return str(error)


def test_contact_that_cannot_last_is_an_error(address):
    with launched(_cannot_connect, 2, address, backend=None) as launch:
        launch.wait_for_signal(0)
        launch.wait_for_signal(1)
        launch.answer(0)
        launch.answer(1)
        for text in launch.values():
            assert "'make a process group'" in text
            assert "nosuch0" in text


def _runs_once(rank: int, address: str) -> int | None:
    sides: dict[str, Any] = {"source": {"weight": values(0)}}
    if rank:
        sides = {"target": {"weight": part(0, 1)}}
    return distckpt.Route(address, **sides, timeout=TIMEOUT).run(1).version


def test_an_address_may_have_brackets(run, address):
    host, port = address.split(":")
    assert run(_runs_once, 2, f"[{host}]:{port}") == [1, 1]


def _stays_small(rank: int, address: str) -> int:
    """One target takes all versions; others come for one, and leave or die."""
    if rank == 0:
        route = distckpt.Route(address, source={"weight": values(0)}, timeout=TIMEOUT)
        for version in range(12):
            route.run(version)
        return route._store.num_keys()
    route = distckpt.Route(address, target={"weight": part(0, 1)}, timeout=TIMEOUT)
    # On a busy machine a target may be left out of a version, even of the last one.
    with contextlib.suppress(distckpt.CheckpointingException):
        while (version := route.run().version) < 11:
            if version % 3 == 0 and version < 9:
                with distckpt.Route(
                    address, target={"weight": part(0, 1)}, timeout=TIMEOUT
                ) as other:
                    other_run = threading.Thread(target=other.run)
                    other_run.start()
                    route.run()
                    other_run.join()
    return 0


def test_the_store_does_not_grow_with_versions_and_targets(address):
    with launched(_stays_small, 2, address, backend=None) as launch:
        num_keys, _ = launch.values()
    # Three of the route, an answer to each target, and two members in each of two groups.
    assert num_keys <= 3 + 2 + 2 * 2 * 3


def _listening_addresses() -> set[str]:
    """Return the addresses, in the kernel's words, on which this process listens."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for fields in map(str.split, lines):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    found.add(fields[1].split(":")[0])
    return found


def _listens(rank: int, address: str) -> tuple[set[str], set[str]]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    sides: dict[str, Any] = {"source": {"weight": values(0)}}
    if rank:
        sides = {"target": {"weight": part(0, 1)}}
    before = _listening_addresses()
    with distckpt.Route(address, **sides, timeout=TIMEOUT) as route:
        hosting = _listening_addresses()
        route.run(1)
        return hosting - before, _listening_addresses() - before


def test_a_route_listens_on_the_address_that_it_is_given_alone():
    with (
        reserved_address("127.0.0.5") as address,
        launched(_listens, 2, address, backend=None) as launch,
    ):
        (hosting, source), (_, target) = launch.values()
    assert hosting == {"0500007F"}
    # Members reach each other on the interface of that address.
    assert source | target <= {"0500007F", "0100007F"}


def test_an_address_of_another_machine_is_not_hosted():
    with pytest.raises(CheckpointingException, match=r"77 is no address of this machine"):
        distckpt.Route("192.0.2.77:29700", source={}, timeout=1)


@pytest.fixture
def route(address, monkeypatch):
    """A Route that gives, and does not wait long for others."""
    monkeypatch.setattr(roll_call, "ANSWER_SECONDS", 0.1)
    with distckpt.Route(address, source={"weight": values(0)}, timeout=0.4) as source:
        yield source


def client(address: str) -> Any:
    host, port = address.split(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)


def ask(store: Any, name: str, number: int) -> None:
    store.append("inbox", json.dumps([name, number, "ask", None]) + "\n")


def test_a_target_that_asks_again_and_again_is_not_waited_for(route, address):
    store, is_over = client(address), threading.Event()

    def ask_without_coming() -> None:
        for number in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count(1)):
            ask(store, "target 1", number)

    asking = threading.Thread(target=ask_without_coming)
    asking.start()
    error = error_of(route.run, 1)
    is_over.set()
    asking.join()
    assert isinstance(error, RankFailedError)
    assert "No target that asked for version 1 came when it was called" in str(error)
    assert store.num_keys() <= 3 + 1


def test_answers_that_nobody_reads_are_forgotten(route, address):
    store = client(address)
    for number in range(20):
        ask(store, f"target {number}", 1)
    assert isinstance(error_of(route.run, 1), RankFailedError)
    assert store.num_keys() > 3 + 10
    while store.num_keys() > 3:
        # Each start looks for those that wait no longer.
        assert isinstance(error_of(route.run, 2), RankFailedError)


def test_the_number_of_targets_is_bounded(route, address, monkeypatch):
    monkeypatch.setattr(roll_call, "MAX_TARGETS", 2)
    store = client(address)
    for number in range(1, 5):
        ask(store, f"target {number}", 1)
    error_of(route.run, 1)
    answers = [store.get(f"answer 1 to target {number}").decode() for number in range(1, 5)]
    assert ["More than 2 targets" in answer for answer in answers] == [False, False, False, True]
    with pytest.raises(ValueError, match="num_targets is at most"):
        distckpt.Route(address, source={}, num_targets=10**6)


OTHER_VALUES = [b"\xff\xfe", b"[" * 100_000, b"{}", b"[]", b"7", b'["target 1", 1, "ask"]']


@pytest.mark.parametrize("value", OTHER_VALUES)
def test_messages_of_another_form_are_named_and_change_nothing(route, address, value, caplog):
    store = client(address)
    store.append("inbox", value + b"\n")
    assert "of 1" in str(error_of(route.run, 1))
    assert "messages to this Route are of another form" in caplog.text


@pytest.mark.parametrize("message", [["target 1", 1, "come", 1], ["rank 1", 1, "ask", 1]])
def test_messages_of_nobody_are_named(route, address, message, caplog):
    client(address).append("inbox", json.dumps(message) + "\n")
    assert "of 1" in str(error_of(route.run, 1))
    assert "messages to this Route are of another form" in caplog.text


@pytest.mark.parametrize("value", OTHER_VALUES)
def test_answers_of_another_form_are_errors(address, value):
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    store.set("distckpt", value)
    with pytest.raises(CheckpointingException, match="not the trainer of a Route"):
        distckpt.Route(address, target={"weight": part(0, 1)}, timeout=1)
    inbox.name_host(store)
    with distckpt.Route(address, target={"weight": part(0, 1)}, timeout=1) as route:
        store.set("answer 1 to target 1", value)
        with pytest.raises(CheckpointingException, match="under 'answer 1 to target 1', which no"):
            route.run()
        store.set("answer 2 to target 1", '[1, ""]')
        store.set("answer 3 to target 1", value)
        with pytest.raises(CheckpointingException, match="under 'answer 3 to target 1', which no"):
            route.run()


def test_a_store_that_others_change_is_an_error_of_the_trainer(route, address):
    client(address).delete_key("inbox")
    with pytest.raises(CheckpointingException, match="The store that this process hosts"):
        route.run(1)


def _moves_beside_garbage(rank: int, address: str) -> int | None:
    sides: dict[str, Any] = {"source": {"weight": values(0)}}
    if rank:
        sides = {"target": {"weight": part(0, 1)}}
    route = distckpt.Route(address, **sides, timeout=TIMEOUT)
    route.run(1)
    if rank:
        host, port = address.split(":")
        for number in range(300):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(random.Random(number).randbytes(200))
    return route.run(2).version


def test_versions_move_beside_connections_of_other_programs(run, address):
    assert run(_moves_beside_garbage, 2, address) == [2, 2]


def _asks_for_more_at_first(rank: int, address: str) -> tuple[str, int | None, int]:
    if rank == 0:
        route = distckpt.Route(address, source={"weight": values(0)}, timeout=TIMEOUT)
        report = route.run(0)
        return "", report.version, report.num_bytes
    route = distckpt.Route(address, target={"weight": part(0, 1)}, timeout=TIMEOUT)
    refusal = str(error_of(route.run, 5))
    report = route.run()
    return refusal, report.version, report.num_bytes


def test_the_first_version_is_not_moved_to_nobody(run, address):
    """The only engine asks for a later one than the trainer begins with."""
    (_, *given), (refusal, *taken) = run(_asks_for_more_at_first, 2, address)
    assert given == taken == [0, values(0).nbytes]
    assert "asks for version 5, and version 0 is moved" in refusal


def test_arguments_are_checked(address):
    with pytest.raises(ValueError, match="either a source or a target"):
        distckpt.Route(address)
    with pytest.raises(ValueError, match="host:port"):
        distckpt.Route("nowhere", source={})
    with pytest.raises(ValueError, match=r"no directory to read here: give the path"):
        distckpt.Route(address, source={}, family="auto")
    for name in ("127.0.0.1:0", "tcp://127.0.0.1:29700", ":29700"):
        with pytest.raises(ValueError, match="host:port"):
            distckpt.Route(name, source={})
    with distckpt.Route(address, source={}) as route:
        for version in ("3", 1.5):
            with pytest.raises(TypeError, match="version is a whole number"):
                route.run(version)
    with pytest.raises(TypeError, match="has no option 'atomc'"):
        distckpt.Route(address, source={}, atomc=True)
    with pytest.raises(CheckpointingException, match="did not answer within 1 s"):
        distckpt.Route(address, target={}, timeout=1)
