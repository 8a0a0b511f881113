"""Optimizer state that a manager keeps for fewer steps than weights."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, LoadMismatchError, ShardedTensor
from tests.support.cli_command import call, call_json
from tests.support.disk import flip
from tests.support.states import state_of

pytestmark = pytest.mark.usefixtures("no_saves_left")

PATIENCE = 200.0


def trained(step):
    """Return a state after a training step; its values depend on the step."""
    torch.manual_seed(step)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": step}


def save_steps(root, steps, **settings):
    with CheckpointManager(root, **settings) as manager:
        for step in steps:
            manager.save(step, trained(step)).result(PATIENCE)
        manager.wait()


def keys_of(location):
    return set(distckpt.open(location).tensors)


def has_optimizer(location):
    return any(key.startswith("optimizer.") for key in keys_of(location))


def weights_of(location):
    return distckpt.open(location).read("weight").numpy()


@pytest.fixture(params=["directory", "memory"])
def root(request, tmp_path, memory):
    if request.param == "directory":
        return str(tmp_path / "run")
    return f"{memory}/run"


def step_of(root, step):
    return f"{root}/step_{step:08d}"


def files_of(location):
    """Return the content of all files below a location, by path."""
    files, path = fsspec.core.url_to_fs(location)
    names = files.find(path)
    return {name.removeprefix(path).lstrip("/"): files.cat_file(name) for name in names}


def test_older_steps_lose_the_optimizer_state_alone(root):
    save_steps(root, range(1, 6), keep_optimizer=2)
    assert [has_optimizer(step_of(root, step)) for step in range(1, 6)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    for step in range(1, 6):
        location = step_of(root, step)
        report = distckpt.verify(location)
        assert report.is_whole
        assert not report.strays
        expected = trained(step)["model"].weight.detach().numpy()
        np.testing.assert_array_equal(weights_of(location), expected)


def test_the_files_of_weights_stay_as_they_are(root):
    save_steps(root, [1], keep_optimizer=1)
    before = files_of(step_of(root, 1))
    save_steps(root, [2], keep_optimizer=1)
    after = files_of(step_of(root, 1))
    gone = [name for name in before if name.startswith("tensors") and name not in after]
    stay = [name for name in before if name.startswith("tensors") and name in after]
    assert gone
    assert stay
    assert all(after[name] == before[name] for name in stay)
    size_of_optimizer = 2 * 4 * (8 * 4 + 4) + 2 * 4
    saved_bytes = sum(map(len, before.values())) - sum(map(len, after.values()))
    assert saved_bytes > size_of_optimizer


def test_a_step_without_optimizer_is_loaded_for_its_weights(root, caplog):
    save_steps(root, range(1, 4), keep_optimizer=1)
    state = trained(9)
    manager = CheckpointManager(root)
    with pytest.raises(LoadMismatchError, match="settings of 'optimizer' are stored, and none of"):
        manager.load(state, step=1)
    assert "holds weights only" in caplog.text
    model = trained(9)["model"]
    assert manager.load({"model": model, "step": 0}, step=1)["step"] == 1
    np.testing.assert_array_equal(
        model.weight.detach().numpy(), trained(1)["model"].weight.detach().numpy()
    )
    caplog.clear()
    assert manager.load(state)["step"] == 3
    assert "weights only" not in caplog.text


def test_metrics_pins_and_rejections_stay(root):
    with CheckpointManager(root, keep_last=1, best_metric="loss", keep_optimizer=1) as manager:
        for step, loss in [(1, 5.0), (2, 0.5), (3, 4.0), (4, 3.0)]:
            manager.save(step, trained(step), metrics={"loss": loss}, pinned=step == 1)
            manager.wait()
        assert manager.steps() == [1, 2, 4]
        manager.reject(2, "spike")
    infos = {info.step: info for info in distckpt.list_checkpoints(root)}
    assert [infos[step].has_optimizer for step in (1, 2, 4)] == [True, False, True]
    assert infos[2].metrics == {"loss": 0.5}
    assert infos[2].rejected == "spike"
    assert infos[2].seconds is not None
    assert infos[1].pinned
    # A pinned step is kept as it is.
    assert [has_optimizer(step_of(root, step)) for step in (1, 2, 4)] == [True, False, True]


def test_rejected_and_damaged_steps_do_not_count(tmp_path):
    root = str(tmp_path / "run")
    with CheckpointManager(root, keep_optimizer=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, trained(step)).result(PATIENCE)
        manager.reject(3, "spike")
        manager.save(4, trained(4)).result(PATIENCE)
        manager.wait()
        assert [has_optimizer(step_of(root, step)) for step in (1, 2, 3)] == [False, True, True]
        manager.save(5, trained(5)).result(PATIENCE)
        manager.wait()
        assert [has_optimizer(step_of(root, step)) for step in (2, 3, 4)] == [False, False, True]
        flip(tmp_path / "run/step_00000005/manifest.safetensors", -3)
        manager.save(6, trained(6)).result(PATIENCE)
        manager.wait()
    assert has_optimizer(step_of(root, 4))


def test_mixed_files_are_divided_in_a_directory_and_named_in_a_store(root, caplog):
    save_steps(root, [1])
    save_steps(root, [2], keep_optimizer=1)
    assert distckpt.verify(step_of(root, 1)).is_whole
    if root.startswith("memory:"):
        assert has_optimizer(step_of(root, 1))
        assert "separate_optimizer" in caplog.text
        return
    assert not has_optimizer(step_of(root, 1))
    expected = trained(1)["model"].weight.detach().numpy()
    np.testing.assert_array_equal(weights_of(step_of(root, 1)), expected)


def test_a_state_whose_optimizer_cannot_be_told_is_named(root, caplog):
    with CheckpointManager(root, keep_optimizer=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step)).result(PATIENCE)
        manager.wait()
        assert set(manager.not_removed) == {2}
    assert caplog.text.count("the optimizer state of step 1 cannot be removed") == 1
    assert distckpt.verify(step_of(root, 1)).is_whole


def test_an_overwritten_step_has_its_optimizer_again(root):
    save_steps(root, [1, 2], keep_optimizer=1)
    assert not has_optimizer(step_of(root, 1))
    with CheckpointManager(root) as manager:
        manager.save(1, trained(1), overwrite=True).result(PATIENCE)
    report = distckpt.verify(step_of(root, 1))
    assert report.is_whole
    assert not report.strays
    assert has_optimizer(step_of(root, 1))


def test_damage_of_weights_leaves_the_step_alone(tmp_path, caplog):
    root = tmp_path / "run"
    save_steps(root, [1])
    (file,) = (root / "step_00000001/tensors").iterdir()
    weights = trained(1)["model"].weight.detach().numpy().tobytes()
    flip(file, file.read_bytes().index(weights))
    before = files_of(str(root / "step_00000001"))
    save_steps(root, [2], keep_optimizer=1)
    assert files_of(str(root / "step_00000001")) == before
    assert "checksum mismatch" in caplog.text


@pytest.mark.parametrize("wrong", [0, 1.5, True])
def test_wrong_numbers_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="keep_optimizer"):
        CheckpointManager(tmp_path, keep_optimizer=wrong)


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.state.exp_avg.{}",
        "chained_0.optimizer.state.fp32_param.{}",
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param.{}.exp_avg_sq",
        "optim.state.{}.exp_avg",
    ],
)
def test_names_of_other_frameworks(root, key):
    name = "decoder.layers.0.weight"
    for step in (1, 2):
        values = torch.full((64,), float(step))
        state = {
            "model": ShardedTensor.from_rank_offsets(name, values),
            "average": ShardedTensor.from_rank_offsets(key.format(name), -values),
        }
        with CheckpointManager(root, keep_optimizer=1) as manager:
            manager.save(step, state).result(PATIENCE)
    assert keys_of(step_of(root, 1)) == {name}
    assert keys_of(step_of(root, 2)) == {name, key.format(name)}


def test_prune_removes_optimizer_states(root, capsys):
    save_steps(root, range(1, 4), separate_optimizer=True)
    arguments = ("prune", root, "--keep-optimizer", 2)
    assert "would remove the optimizer state of step_00000001\n" in call(
        capsys, *arguments, "--dry-run"
    )
    assert has_optimizer(step_of(root, 1))
    outcome = call_json(capsys, *arguments)
    assert outcome["optimizer_removed"] == [1]
    assert outcome["kept"] == [1, 2, 3]
    assert [has_optimizer(step_of(root, step)) for step in (1, 2, 3)] == [False, True, True]
    assert call_json(capsys, *arguments)["optimizer_removed"] == []


@pytest.mark.parametrize("entry", ["optim", "optimizer"])
def test_a_module_with_the_name_of_an_optimizer_stays_whole(root, entry):
    for step in (1, 2):
        torch.manual_seed(step)
        learned = torch.nn.ModuleDict({"state": torch.nn.Linear(2, 2), "exp_avg": torch.nn.Tanh()})
        learned.register_buffer("momentum", torch.rand(3))
        state = trained(step)
        state["adam"] = state.pop("optimizer")
        state[entry] = learned
        with CheckpointManager(root, keep_optimizer=1) as manager:
            manager.save(step, state).result(PATIENCE)
    left = keys_of(step_of(root, 1))
    assert {f"{entry}.{name}" for name in learned.state_dict()} <= left
    if root.startswith("memory:"):
        # A file with an optimizer's name holds tensors of both, and stays.
        assert "adam.state.exp_avg.weight" in left
        return
    assert not any(key.startswith("adam.") for key in left)


def test_an_optimizer_without_states_has_nothing_to_remove(root, caplog):
    model = torch.nn.Linear(8, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with CheckpointManager(root, keep_optimizer=1) as manager:
        for step in (1, 2):
            manager.save(step, state).result(PATIENCE)
        manager.wait()
        assert not manager.not_removed
    assert "cannot be removed" not in caplog.text
