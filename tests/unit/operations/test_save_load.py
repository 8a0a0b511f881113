from __future__ import annotations

import logging
import os
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

import distckpt
from benchmarks.measure import peak_memory_bytes
from distckpt import (
    CheckpointingException,
    CheckpointNotFoundError,
    LoadMismatchError,
    ShardedObject,
    ShardedTensor,
    UnsupportedObjectError,
)
from tests.support.one_sided_keys import (
    MISSING,
    UNEXPECTED,
    asked_for,
    described_state,
    obj,
    save_one_sided,
    tensor,
)
from tests.support.read_counts import counted_reads
from tests.support.states import whole

# ---- loading


def test_tensors_are_filled_in_place_or_allocated(tmp_path):
    distckpt.save({"a": tensor("a", 1), "b": tensor("b", 2)}, tmp_path / "c")
    target = torch.zeros(4)
    address = target.data_ptr()
    asked = {"a": ShardedTensor.from_rank_offsets("a", target), "b": tensor("b").without_data()}
    loaded = distckpt.load(asked, tmp_path / "c")
    assert loaded["a"] is target
    assert target.data_ptr() == address
    assert target.tolist() == [1, 1, 1, 1]
    assert loaded["b"].tolist() == [2, 2, 2, 2]
    assert asked["b"].data is None


def test_a_part_may_be_asked_for(tmp_path):
    state = {name: tensor(name, number) for number, name in enumerate("abcdef")}
    distckpt.save({**state, "o": obj("o", [1]), "step": 3}, tmp_path / "c")
    loaded = distckpt.load(
        {"only": ShardedTensor.from_rank_offsets("d", torch.zeros(2), (0, 1, 2))}, tmp_path / "c"
    )
    assert loaded.keys() == {"step", "only"}
    assert loaded["only"].tolist() == [3, 3]


def test_a_checkpoint_without_shards(tmp_path):
    distckpt.save({"step": 3}, tmp_path / "c")
    assert distckpt.load({}, tmp_path / "c") == {"step": 3}
    assert distckpt.open(tmp_path / "c").read_tensors() == {}
    assert distckpt.megatron.serialization.load_sharded_metadata(tmp_path / "c") == {}


def test_an_empty_state_dict(tmp_path):
    distckpt.save({}, tmp_path / "c")
    assert distckpt.load({}, tmp_path / "c") == {}


def test_only_scalars(tmp_path):
    distckpt.save({"t": ShardedTensor.from_rank_offsets("t", torch.tensor(2.5))}, tmp_path / "c")
    loaded = distckpt.load(
        {"t": ShardedTensor.from_rank_offsets("t", torch.tensor(0.0))}, tmp_path / "c"
    )
    assert loaded["t"].item() == 2.5


def test_a_checkpoint_without_its_marker_is_none(tmp_path):
    distckpt.save({"a": tensor("a"), "step": 1}, tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()
    assert not distckpt.megatron.check_is_distributed_checkpoint(tmp_path / "c")
    for function in (
        lambda path: distckpt.load({}, path),
        distckpt.megatron.load_plain_tensors,
    ):
        with pytest.raises(CheckpointNotFoundError, match=r"no metadata\.json"):
            function(tmp_path / "c")


def test_a_tensor_that_is_not_stored_is_an_error_with_the_nearest_name(tmp_path):
    distckpt.save({"a": tensor("decoder.layers.0.weight")}, tmp_path / "c")
    target = torch.full((4,), 7.0)
    asked = {
        "a": ShardedTensor.from_rank_offsets("decoder.layer.0.weight", target),
        "b": tensor("x"),
    }
    with pytest.raises(
        LoadMismatchError, match=r"did you mean 'decoder\.layers\.0\.weight'"
    ) as caught:
        distckpt.load(asked, tmp_path / "c")
    assert caught.value.unexpected == {"decoder.layer.0.weight", "x"}
    assert target.tolist() == [7] * 4


def test_a_tensor_is_no_object_and_an_object_no_tensor(tmp_path):
    distckpt.save({"t": tensor("t"), "o": obj("o", 1)}, tmp_path / "c")
    with pytest.raises(
        LoadMismatchError, match=r"'o' is an object in .* and was requested as a tensor"
    ):
        distckpt.load({"x": tensor("o")}, tmp_path / "c")
    with pytest.raises(
        LoadMismatchError, match=r"'t' is a tensor in .* and was requested as an object"
    ):
        distckpt.load({"x": obj("t")}, tmp_path / "c")


def test_metadata_are_read_anew_when_a_checkpoint_was_replaced(tmp_path):
    distckpt.save({"a": tensor("a", 1), "step": 1}, tmp_path / "c")
    assert distckpt.open(tmp_path / "c").tensors["a"].shape == (4,)
    assert distckpt.load({"a": tensor("a", 0)}, tmp_path / "c")["a"].tolist() == [1] * 4
    distckpt.save(
        {"a": tensor("a", 2, (5,)), "b": tensor("b"), "step": 2}, tmp_path / "c", overwrite=True
    )
    assert distckpt.open(tmp_path / "c").tensors["a"].shape == (5,)
    assert distckpt.open(tmp_path / "c").tensors.keys() == {"a", "b"}
    assert distckpt.load({"a": tensor("a", 0, (5,))}, tmp_path / "c")["a"].tolist() == [2] * 5
    assert distckpt.open(tmp_path / "c").common_state == {"step": 2}


@pytest.mark.parametrize("verify", ["full", "", None])
def test_verify_is_true_or_false(tmp_path, verify):
    distckpt.save({}, tmp_path / "c")
    with pytest.raises(ValueError, match="verify must be True or False"):
        distckpt.load({}, tmp_path / "c", verify=verify)


# ---- objects of each rank


def test_objects_come_back_each_to_its_place(tmp_path):
    distckpt.save({i: obj("rng", {"seed": i}, 3, i) for i in range(3)}, tmp_path / "c")
    assert distckpt.load({"mine": obj("rng", None, 3, 1)}, tmp_path / "c") == {"mine": {"seed": 1}}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_objects_is_an_error_that_says_so(tmp_path, count):
    distckpt.save({i: obj("rng", i, 3, i) for i in range(3)}, tmp_path / "c")
    with pytest.raises(
        LoadMismatchError,
        match=rf"'rng' was saved in \(3,\) parts and is requested in \({count},\)",
    ):
        distckpt.load({"mine": obj("rng", None, count, 0)}, tmp_path / "c")


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_objects_lie_in_grids_of_any_number_of_axes(tmp_path, shape):
    cells = [()] if not shape else [(i, j) for i in range(2) for j in range(2)]
    distckpt.save(
        {cell: ShardedObject("o", list(cell), shape, cell) for cell in cells}, tmp_path / "c"
    )
    for cell in cells:
        assert distckpt.load({"o": ShardedObject("o", None, shape, cell)}, tmp_path / "c") == {
            "o": list(cell)
        }


def test_a_part_of_an_object_that_was_not_saved_is_an_error(tmp_path):
    distckpt.save({"o": obj("o", 1, 2, 0)}, tmp_path / "c", validate_access_integrity=False)
    with pytest.raises(LoadMismatchError, match=r"Part \(1,\) of the object 'o' is not in"):
        distckpt.load({"o": obj("o", None, 2, 1)}, tmp_path / "c")


def test_copies_of_objects_may_differ_and_the_main_one_is_saved(tmp_path):
    main, copy = obj("o", "main"), ShardedObject("o", object(), (1,), (0,), replica_id=1)
    distckpt.save({"copy": copy, "main": main}, tmp_path / "c")
    assert distckpt.load({"o": obj("o")}, tmp_path / "c") == {"o": "main"}


# ---- keys that only one side has


@pytest.fixture
def stored(tmp_path):
    return save_one_sided(tmp_path / "c")


def test_what_is_requested_must_be_stored(stored):
    with pytest.raises(LoadMismatchError) as caught:
        distckpt.load(asked_for(), stored)
    assert caught.value.unexpected
    assert caught.value.unexpected <= UNEXPECTED
    assert distckpt.load({"a": tensor("a", 0)}, stored)["a"].tolist() == [1] * 4


def test_keys_that_differ_are_raised_in_both_directions(stored):
    with pytest.raises(LoadMismatchError) as caught:
        distckpt.load(asked_for(), stored, strict="raise")
    assert (caught.value.missing, caught.value.unexpected) == (MISSING, UNEXPECTED)
    assert all(repr(key) in str(caught.value) for key in MISSING | UNEXPECTED)


def test_keys_that_differ_are_reported(stored, caplog):
    caplog.set_level(logging.WARNING)
    reports = []
    result = distckpt.load(asked_for(), stored, strict="report", on_report=reports.append)
    assert (reports[0].missing, reports[0].unexpected) == (MISSING, UNEXPECTED)
    assert result.keys() == {"list", "o", "step"}
    assert [value.tolist() for value in result["list"]] == [[1, 1, 1, 1]]
    assert (result["o"], result["step"]) == (1, 3)
    assert "'left'" in caplog.text
    assert "'new.2'" in caplog.text


@pytest.mark.parametrize("strict", ["complete", "raise", "report"])
def test_equal_keys_are_accepted(stored, strict, caplog):
    caplog.set_level(logging.WARNING)
    asked = {"a": tensor("a", 0), "left": tensor("left", 0), "o": obj("o"), "lo": obj("left/o")}
    result = distckpt.load(asked, stored, strict=strict)
    assert (result["a"].tolist(), result["lo"], result["step"]) == ([1] * 4, 2, 3)
    assert caplog.text == ""


def test_hundreds_of_keys_are_named_in_one_line(stored):
    asked = {i: tensor(f"layers.{i}.weight") for i in range(300)}
    with pytest.raises(LoadMismatchError) as caught:
        distckpt.load(asked, stored, strict="raise")
    assert "'layers.{0..299}.weight' (300 keys)" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert len(caught.value.unexpected) == 300


# ---- what can be asked of a checkpoint


@pytest.mark.parametrize("read", [distckpt.open, partial(distckpt.load, {})])
def test_nothing_to_read_from(tmp_path, read):
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="no metadata"):
        read(tmp_path)


def test_metadata_describe_what_is_stored(tmp_path):
    distckpt.save(described_state(), tmp_path / "c")
    checkpoint = distckpt.open(tmp_path / "c")
    assert {key: (t.dtype, t.shape) for key, t in checkpoint.tensors.items()} == {
        "w": (torch.bfloat16, (4, 3)),
        "stack": (torch.float32, (1, 3)),
    }
    assert checkpoint.objects == {"o": (2,)}


def test_plain_tensors_are_all_tensors_and_nothing_else(tmp_path):
    parts = {
        i: ShardedTensor.from_rank_offsets("w", torch.full((2,), float(i)), (0, i, 3))
        for i in range(3)
    }
    distckpt.save({**parts, "s": tensor("s", 5, ()), "o": obj("o", 1), "step": 2}, tmp_path / "c")
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert {key: value.tolist() for key, value in loaded.items()} == {
        "w": [0, 0, 1, 1, 2, 2],
        "s": 5.0,
    }


def test_content_metadata_are_kept_apart(tmp_path):
    metadata = {"distrib_optim_sharding_type": "fully", "dp_cp_group": object(), "n": [1]}
    distckpt.save(
        {"step": 1}, tmp_path / "c", content_metadata=metadata, validate_access_integrity=False
    )
    kept = {"distrib_optim_sharding_type": "fully", "n": [1]}
    assert "dp_cp_group" in metadata
    assert distckpt.open(tmp_path / "c").metadata == kept
    distckpt.save({"step": 1}, tmp_path / "d")
    assert distckpt.open(tmp_path / "d").metadata is None


def test_an_entry_of_that_name_is_neither_overwritten_nor_taken_for_it(tmp_path):
    state = {"content_metadata": {"mine": 1}, "step": 1}
    metadata = {"content_metadata": {"a": 2}}
    with distckpt.CheckpointManager(tmp_path / "run") as manager:
        saves = [
            partial(distckpt.save, state, tmp_path / "c"),
            partial(distckpt.async_save, state, tmp_path / "c"),
            partial(manager.save, 1, state),
        ]
        for save in (*saves, *(partial(save, **metadata) for save in saves)):
            with pytest.raises(
                CheckpointingException, match=r"an entry 'content_metadata'.* rename the entry"
            ):
                save()
    with pytest.raises(CheckpointingException, match="an entry 'content_metadata'"):
        distckpt.megatron.save(state, tmp_path / "c", **metadata)
    assert not (tmp_path / "c").exists()
    # What a load of Megatron's returned is saved again.
    distckpt.megatron.save(state, tmp_path / "c")
    assert distckpt.open(tmp_path / "c").metadata == {"mine": 1}


# ---- tensors that share memory


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), ()])
def test_targets_that_share_memory_get_the_last_value_with_a_warning(tmp_path, caplog, shape):
    values = {key: torch.full(shape, float(number)) for number, key in enumerate("abc")}
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()},
        tmp_path / "c",
    )
    shared = torch.zeros(300, 500).t() if shape == (500, 300) else torch.zeros(shape)
    request = {key: ShardedTensor.from_rank_offsets(key, shared) for key in "ab"}
    request["c"] = ShardedTensor.from_rank_offsets("c", torch.zeros(shape))
    loaded = distckpt.load(request, tmp_path / "c")
    assert loaded["a"] is loaded["b"] is shared
    assert torch.equal(shared, values["b"])
    assert torch.equal(loaded["c"], values["c"])
    (warned,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert "'a' and 'b'" in warned


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (lambda t: t.flatten()[:20], lambda t: t.flatten()[12:32], True),
        (lambda t: t.flatten()[12:32], lambda t: t.flatten()[:20], True),
        (lambda t: t[:, :3], lambda t: t[:, 2:5], True),
        (lambda t: t[:, :3], lambda t: t[:, 3:6], False),
        (lambda t: t, lambda t: t[3], True),
        (lambda t: t.flatten()[:24], lambda t: t.flatten()[24:], False),
    ],
)
def test_targets_that_share_some_elements(tmp_path, caplog, first, second, meet):
    memory = torch.zeros(8, 8)
    targets = {"a": first(memory), "b": second(memory)}
    values = {key: torch.rand(t.shape) for key, t in targets.items()}
    of = ShardedTensor.from_rank_offsets
    distckpt.save({key: of(key, value) for key, value in values.items()}, tmp_path / "c")
    distckpt.load({key: of(key, target) for key, target in targets.items()}, tmp_path / "c")
    expected = torch.zeros(8, 8)
    first(expected).copy_(values["a"])
    second(expected).copy_(values["b"])
    assert torch.equal(memory, expected)
    assert ["'a' and 'b'" in record.message for record in caplog.records] == [True] * meet


def test_tied_targets_with_equal_values_are_no_reason_to_warn(tmp_path, caplog):
    value = torch.randn(300, 500)
    apart = {key: ShardedTensor.from_rank_offsets(key, value.clone()) for key in "ab"}
    tied = {key: ShardedTensor.from_rank_offsets(key, value) for key in "ab"}
    for name, state in (("apart", apart), ("tied", tied)):
        distckpt.save(state, tmp_path / name)
        shared = torch.zeros(300, 500)
        distckpt.load(
            {key: ShardedTensor.from_rank_offsets(key, shared) for key in "ab"}, tmp_path / name
        )
        assert torch.equal(shared, value)
    assert caplog.text == ""


def one_item_that_steps_by_two():
    """Make a tensor that counts as contiguous although the stride of its last axis is not 1."""
    return torch.zeros(1, 8)[:, ::2][:, :1]


@pytest.mark.parametrize(
    "tied", [one_item_that_steps_by_two(), torch.zeros(1, 1, dtype=torch.complex64).conj()]
)
def test_tied_targets_of_unusual_memory(tmp_path, caplog, tied):
    value = torch.full((1, 1), 3.0).to(tied.dtype)
    of = ShardedTensor.from_rank_offsets
    distckpt.save({key: of(key, value.clone()) for key in "ab"}, tmp_path / "c")
    distckpt.load({key: of(key, tied) for key in "ab"}, tmp_path / "c")
    assert torch.equal(tied, value)
    assert caplog.text == ""


def test_one_item_of_any_strides_has_a_fingerprint(tmp_path):
    item = one_item_that_steps_by_two().fill_(3)
    state = {"a": ShardedTensor.from_rank_offsets("a", item)}
    distckpt.save(state, tmp_path / "c", fingerprint=True)
    assert distckpt.fingerprint(state) == distckpt.open(tmp_path / "c").fingerprints(stored=True)
    assert distckpt.verify(tmp_path / "c", live=state).is_whole


# ---- arguments


def test_a_process_group_needs_torch_distributed(tmp_path):
    with pytest.raises(CheckpointingException, match=r"torch\.distributed is not initialized"):
        distckpt.save({}, tmp_path / "c", process_group=object())


# ---- what loading does not do


def test_containers_that_were_saved_empty_come_back_empty(tmp_path):
    distckpt.save({"a": [], "d": {}, "t": (), "b": 1}, tmp_path / "c")
    asked = {"a": [1, 2], "d": {"x": 3}, "t": (4,), "b": 2}
    assert distckpt.load(asked, tmp_path / "c") == {"a": [], "d": {}, "t": (), "b": 1}


@pytest.mark.parametrize("budget", [16 << 20, 256 << 20])
def test_a_save_stays_within_its_memory(tmp_path, budget):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(32 << 20))}
    distckpt.save(state, tmp_path / "first")
    grown = peak_memory_bytes(
        lambda: distckpt.save(state, tmp_path / "c", max_inflight_bytes=budget)
    )
    assert grown < min(budget, 64 << 20) + (8 << 20)


def test_plain_tensors_that_are_not_named_are_not_read(tmp_path):
    state = {"large": torch.zeros(1 << 21), "small": torch.arange(5)}
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()},
        tmp_path / "c",
    )
    with counted_reads() as counts:
        loaded = distckpt.open(tmp_path / "c").read_tensors(["small"])
    assert list(loaded) == ["small"]
    assert torch.equal(loaded["small"], state["small"])
    assert counts.num_bytes < 1 << 20
    with pytest.raises(distckpt.LoadMismatchError, match=r"smal'.*small"):
        distckpt.open(tmp_path / "c").read_tensors(["large", "smal"])
    with pytest.raises(TypeError, match=r"\['small'\]"):
        distckpt.open(tmp_path / "c").read_tensors("small")


SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, lambda epoch: 0.9
    ),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 3
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.PolynomialLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [5])]
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [make(optimizer) for make in (lr_scheduler.ConstantLR, lr_scheduler.LinearLR)],
        [2],
    ),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05),
}
NOT_BY_NAME = {"LRScheduler", "PolynomialLR", "ConstantLR", "LinearLR"}


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter:UserWarning"
)  # of SequentialLR in torch 2.6 itself
def test_every_scheduler_of_torch_resumes(tmp_path):
    """Goes on with the learning rates of one that was never stopped."""
    assert set(lr_scheduler.__all__) - set(SCHEDULERS) == NOT_BY_NAME
    made = {}
    for name, make in SCHEDULERS.items():
        pairs = []
        for _ in range(2):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
            pairs.append((optimizer, make(optimizer)))
        # Torch 2.6 keeps a function in the state of SWALR.
        if not callable(pairs[0][1].state_dict().get("anneal_func")):
            made[name] = pairs
    rates_of(pairs[0] for pairs in made.values())
    state = {
        name: {"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}
        for name, ((optimizer, scheduler), _) in made.items()
    }
    distckpt.save(state, tmp_path / "c")
    loaded = distckpt.load({}, tmp_path / "c")
    for name, (_, (optimizer, scheduler)) in made.items():
        optimizer.load_state_dict(loaded[name]["optimizer"])
        scheduler.load_state_dict(loaded[name]["scheduler"])
    assert rates_of(pairs[0] for pairs in made.values()) == rates_of(
        pairs[1] for pairs in made.values()
    )


def rates_of(pairs):
    rates = []
    for optimizer, scheduler in pairs:
        for _ in range(4):
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


# ---- what cannot be stored


class Plot:
    """What a program keeps beside its metrics, from some save on."""


def with_metrics(value):
    return {"w of this test": whole("w", torch.ones(3)), "metrics": {"loss": 0.5, "plot": value}}


def test_a_value_that_cannot_be_stored_is_refused_by_any_save(tmp_path, caplog):
    refused = pytest.raises(UnsupportedObjectError, match=r"\['metrics'\]\['plot'\] of type .*Plot")
    for number in range(2):
        with refused:
            distckpt.save(with_metrics(Plot()), tmp_path / "new")
        distckpt.save(with_metrics(None), tmp_path / str(number))
    with refused:
        distckpt.async_save(with_metrics(Plot()), tmp_path / "2")
    with refused:
        distckpt.dcp.save(with_metrics(Plot()), checkpoint_id=tmp_path / "2")
    assert caplog.messages == []
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_a_value_that_cannot_be_stored_is_left_out_with_a_warning(tmp_path, caplog):
    with pytest.raises(ValueError, match="unsupported must be 'raise', 'warn' or None"):
        distckpt.save({}, tmp_path / "1", unsupported="ignore")
    distckpt.save(with_metrics([Plot(), 1.5]), tmp_path / "2", unsupported="warn")
    (warning,) = caplog.messages
    assert "Common state is stored without 1 of its values" in warning
    assert "'metrics.plot.0': Cannot store the object of type" in warning
    assert os.listdir(tmp_path) == ["2"]

    assert torch.equal(distckpt.open(tmp_path / "2").read_tensors()["w"], torch.ones(3))
    loaded = distckpt.load({"w of this test": whole("w", torch.zeros(3))}, tmp_path / "2")
    left_out, kept = loaded["metrics"]["plot"]
    assert (loaded["metrics"]["loss"], kept) == (0.5, 1.5)
    assert isinstance(left_out, distckpt.UnknownObject)
    with pytest.raises(UnsupportedObjectError, match="the save left out this value"):
        distckpt.load({"metrics": {"plot": [0, 0]}}, tmp_path / "2")


@pytest.mark.parametrize("async_save", [False, True])
def test_an_entry_that_is_new_costs_a_run_no_checkpoint(async_save, tmp_path, caplog):
    """A program adds entries while it runs, such as an average or the best metric."""
    state = {"w of this test": whole("w", torch.ones(3)), "step": 1}
    with_plot = state | {"step": 2, "plot": Plot()}
    with distckpt.CheckpointManager(tmp_path, async_save=async_save) as manager:
        for _ in range(2):
            with pytest.raises(UnsupportedObjectError, match="plot"):
                manager.save(1, with_plot)
        manager.save(1, state)
        manager.save(2, with_plot)
        manager.wait()
        (warning,) = caplog.messages
        assert "'plot': Cannot store the object of type" in warning
        loaded = manager.load({"w of this test": whole("w", torch.zeros(3))})
        assert (loaded["step"], loaded["w of this test"].tolist()) == (2, [1, 1, 1])
    with distckpt.CheckpointManager(tmp_path, unsupported="raise") as manager:
        manager.save(3, state)
        with pytest.raises(UnsupportedObjectError, match="plot"):
            manager.save(4, with_plot)


@pytest.mark.parametrize("key", [Plot(), (1, Plot())])
def test_a_dict_with_a_key_that_cannot_be_stored_is_left_out(key, tmp_path, caplog):
    distckpt.save(with_metrics({key: 1}), tmp_path / "2", unsupported="warn")
    (warning,) = caplog.messages
    assert "'metrics.plot': Cannot store <key>" in warning
    loaded = distckpt.load({"w of this test": whole("w", torch.zeros(3))}, tmp_path / "2")
    assert loaded["metrics"]["loss"] == 0.5
    assert isinstance(loaded["metrics"]["plot"], distckpt.UnknownObject)


def test_an_object_of_which_a_part_cannot_be_stored(tmp_path, caplog):
    cell = ShardedObject("cell", {"a": 2, "b": Plot()}, (1,), (0,))
    with pytest.raises(UnsupportedObjectError, match="The object 'cell' cannot be saved"):
        distckpt.save({"object of this test": cell}, tmp_path / "1")
    distckpt.save({"object of this test": cell}, tmp_path / "2", unsupported="warn")
    (warning,) = caplog.messages
    assert "The object 'cell' is stored without 1 of its values" in warning
    request = {"object of this test": ShardedObject("cell", None, (1,), (0,))}
    with pytest.raises(UnsupportedObjectError, match="the save left out this value"):
        distckpt.load(request, tmp_path / "2")
    stored = distckpt.open(tmp_path / "2").objects["cell"]
    assert stored is not None


class Odd:
    """Registered, and fails when it is stored."""


distckpt.register_object_type(
    Odd, "tests.Odd", to_state=lambda odd: odd.missing, from_state=lambda state: Odd()
)


@pytest.mark.parametrize("odd", [Plot(), Odd()])
def test_an_option_of_an_optimizer_that_cannot_be_stored_costs_no_checkpoint(odd, tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    optimizer.param_groups[0]["odd"] = odd
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(UnsupportedObjectError, match="odd"):
        distckpt.save(state, tmp_path / "saved")
    distckpt.save(state, tmp_path / "saved", unsupported="warn")
    assert "'optimizer' is stored without 1 of its options" in caplog.text
    new = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.5)
    distckpt.load({"model": model, "optimizer": new}, tmp_path / "saved")
    assert new.param_groups[0]["lr"] == 0.1
    for param, momentum in zip(model.parameters(), momenta, strict=True):
        assert torch.equal(new.state[param]["momentum_buffer"], momentum)


def test_an_option_that_cannot_be_stored_beside_state_of_no_parameter(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["steps"] = 3
    optimizer.param_groups[0]["odd"] = Odd()
    state = {"model": model, "optimizer": optimizer}
    distckpt.save(state, tmp_path / "saved", unsupported="warn")
    assert "'optimizer' is stored without 1 of its options" in caplog.text
    new = torch.optim.SGD(model.parameters(), lr=9.0)
    distckpt.load({"model": model, "optimizer": new}, tmp_path / "saved")
    assert (new.param_groups[0]["lr"], new.state["steps"]) == (0.1, 3)


@pytest.mark.parametrize("odd", [Plot(), Odd()])
def test_a_key_or_value_that_cannot_be_stored_leaves_its_neighbors(odd, tmp_path, caplog):
    state = {"w": whole("w", torch.ones(3)), "step": 2, odd: 5, "x": {odd: 1, "b": 2, "c": odd}}
    distckpt.save(state, tmp_path / "saved", unsupported="warn")
    assert "stored without 3 of its values" in caplog.text
    target = {"w": whole("w", torch.zeros(3)), "step": 0, "x": {"b": 0}}
    caplog.clear()
    loaded = distckpt.load(target, tmp_path / "saved")
    assert (loaded["step"], loaded["x"]["b"]) == (2, 2)
    assert "'x.c' is <object" in caplog.text
    assert "the save left out this value" in caplog.text
    for asked in (0, {}, []):
        with pytest.raises(UnsupportedObjectError, match="the save left out this value"):
            distckpt.load({"x": {"c": asked}}, tmp_path / "saved")


def test_what_a_save_left_out_is_said_by_the_load_and_refused_by_the_next_save(tmp_path, caplog):
    counts = {Plot(): 1, "b": 2, "c": Plot()}
    distckpt.save({"counts": counts}, tmp_path / "saved", unsupported="warn")
    caplog.clear()
    loaded = distckpt.load({"counts": {"b": 0}}, tmp_path / "saved")["counts"]
    keys = sorted({*loaded} - {"b", "c"})
    assert len(loaded) == 3
    assert keys == [f"<key 0 of type {__name__}.Plot>"]
    assert all(repr(f"counts.{key}") in caplog.text for key in (*keys, "c"))

    with pytest.raises(UnsupportedObjectError, match=r"\['counts'\].*was left out.*Plot"):
        distckpt.save({"counts": loaded}, tmp_path / "again")
    caplog.clear()
    distckpt.save({"counts": loaded}, tmp_path / "again", unsupported="warn")
    assert "stored without 2 of its values" in caplog.text
    again = distckpt.open(tmp_path / "again").common_state["counts"]
    assert again == loaded
    cell = ShardedObject("cell", loaded, (1,), (0,))
    with pytest.raises(UnsupportedObjectError, match="The object 'cell' cannot be saved"):
        distckpt.save({"cell": cell}, tmp_path / "cell")


class Log:
    """An object with state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def cyclic():
    items = [1]
    items.append(items)
    return items


@pytest.mark.parametrize(
    "value",
    [
        cyclic(),
        {"a": cyclic(), "b": 2},
        distckpt.PerRank(cyclic()),
        Log({"history": cyclic()}),
        ShardedObject("odd", cyclic(), (1,), (0,)),
    ],
    ids=["list", "in a dict", "per rank", "stateful", "sharded object"],
)
def test_a_value_that_contains_itself_costs_a_run_no_checkpoint(value, tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "step": 2, "odd": value}
    with pytest.raises(UnsupportedObjectError, match="contains itself"):
        distckpt.save(state, tmp_path / "refused")
    with distckpt.CheckpointManager(tmp_path / "run", async_save=False) as manager:
        manager.save(1, {"model": model, "step": 1})
        manager.save(2, state)
        assert "it contains itself" in caplog.text
        target = {"model": torch.nn.Linear(2, 2), "step": 0}
        manager.load(target)
    assert target["step"] == 2
    assert torch.equal(target["model"].weight, model.weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_buffer_that_cannot_be_stored_costs_a_run_no_checkpoint(device, tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    with distckpt.CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(1, {"model": model, "step": 1})
        odd = torch.eye(2).to_sparse() if device == "cpu" else torch.empty(2, device="meta")
        model.register_buffer("odd", odd)
        state = {"model": model, "step": 2}
        assert manager.reserve_staging_memory(state).result() > 0
        caplog.clear()
        manager.save(2, state)
        (warning,) = [text for text in caplog.messages if "left out" in text]
        assert "tensors that cannot be stored are left out (1)" in warning
        assert "Key 'odd'" in warning
        assert sorted(distckpt.open(manager.location(2)).tensors) == ["bias", "weight"]
    with pytest.raises(UnsupportedObjectError, match="Key 'odd'"):
        distckpt.save(state, tmp_path / "refused")


class Moved:
    """Registered with functions that do not fit any more."""


def test_a_class_that_refuses_its_state_is_no_damage(tmp_path, caplog):
    distckpt.register_object_type(
        Moved, "tests.Moved", to_state=lambda moved: {"x": 1}, from_state=lambda state: state["y"]
    )
    with distckpt.CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(1, {"step": 1})
        manager.save(2, {"step": 2, "moved": Moved()})
        target = {"step": 0, "moved": None}
        with pytest.raises(UnsupportedObjectError, match=r"'tests\.Moved' does not fit.*KeyError"):
            manager.load(target)
        assert target["step"] == 0
        loaded = manager.load({"step": 0})
        assert (loaded["step"], loaded["moved"].state) == (2, {"x": 1})
        distckpt.save(loaded, tmp_path / "again")
        assert distckpt.open(tmp_path / "again").common_state["moved"] == loaded["moved"]
