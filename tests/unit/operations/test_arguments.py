"""What a user meets who has read the documentation only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import LoadReport
from tests.support.states import whole


def reported(state: dict[str, Any], path: Path) -> tuple[dict[str, Any], LoadReport]:
    reports: list[LoadReport] = []
    loaded = distckpt.load(state, path, strict="report", on_report=reports.append)
    return loaded, reports[0]


def test_report_names_a_value_that_is_not_stored(tmp_path: Path) -> None:
    distckpt.save({"w": whole("w", torch.ones(2)), "step": 5}, tmp_path / "c")

    _, report = reported({"w": whole("w", torch.zeros(2)), "step": 0, "epoch": 3}, tmp_path / "c")

    assert any("epoch" in key for key in report.unexpected)


def test_report_names_a_scheduler_that_is_not_stored(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    distckpt.save({"model": model}, tmp_path / "c")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    _, report = reported({"model": model, "scheduler": scheduler}, tmp_path / "c")

    assert any("scheduler" in key for key in report.unexpected)


def test_report_names_a_plain_tensor_that_is_not_stored(tmp_path: Path) -> None:
    distckpt.save({"model": {"w": torch.ones(2)}}, tmp_path / "c")

    _, report = reported({"model": {"w": torch.ones(2), "v": torch.ones(2)}}, tmp_path / "c")

    assert any("v" in key for key in report.unexpected)


def test_report_returns_objects_for_which_nothing_is_stored(tmp_path: Path) -> None:
    distckpt.save({"w": whole("w", torch.ones(2))}, tmp_path / "c")
    model = torch.nn.Linear(2, 2)

    loaded, _ = reported({"model": model}, tmp_path / "c")

    assert loaded["model"] is model


def test_a_loaded_state_is_saved_again_with_content_metadata(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": whole("w", torch.ones(2)), "step": 1}
    distckpt.save(state, tmp_path / "1", content_metadata={"version": 1})

    state = distckpt.load(state, tmp_path / "1")
    distckpt.save(
        {**state, "w": whole("w", torch.ones(2))}, tmp_path / "2", content_metadata={"version": 2}
    )

    assert distckpt.open(tmp_path / "2").metadata == {"version": 2}


def test_on_report_that_cannot_be_called_is_found_before_the_save(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="on_report"):
        distckpt.save({"step": 1}, tmp_path / "c", on_report="print")

    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("option", ["progress", "on_report"])
def test_a_callback_that_cannot_be_called_is_named(tmp_path: Path, option: str) -> None:
    distckpt.save({"w": whole("w", torch.ones(2))}, tmp_path / "c")

    with pytest.raises(TypeError, match=option):
        distckpt.load({"w": whole("w", torch.ones(2))}, tmp_path / "c", **{option: 3})
    with pytest.raises(TypeError, match=option):
        distckpt.CheckpointManager(tmp_path / "run", **{option: 3})


@pytest.mark.parametrize("value", ["no", "false"])
def test_overwrite_is_a_bool(tmp_path: Path, value: Any) -> None:
    distckpt.save({"step": 1}, tmp_path / "c")

    with pytest.raises((TypeError, ValueError, distckpt.CheckpointExistsError)):
        distckpt.save({"step": 2}, tmp_path / "c", overwrite=value)

    assert distckpt.open(tmp_path / "c").common_state == {"step": 1}


@pytest.mark.parametrize("option", ["durable", "validate_replicas", "validate_access_integrity"])
def test_switches_of_a_save_are_bools(tmp_path: Path, option: str) -> None:
    with pytest.raises((TypeError, ValueError), match=option):
        distckpt.save({"step": 1}, tmp_path / "c", **{option: "no"})


def test_allow_dtype_cast_is_a_bool(tmp_path: Path) -> None:
    distckpt.save({"step": 1}, tmp_path / "c")
    with pytest.raises((TypeError, ValueError), match="allow_dtype_cast"):
        distckpt.load({"step": 0}, tmp_path / "c", allow_dtype_cast="no")


@pytest.mark.parametrize("rules", [None, 3, "x", [1]])
def test_rules_of_a_wrong_type_are_named(tmp_path: Path, rules: Any) -> None:
    distckpt.save({"w": whole("w", torch.ones(2))}, tmp_path / "c")

    with pytest.raises(TypeError, match="rules"):
        distckpt.load({"w": whole("w", torch.ones(2))}, tmp_path / "c", rules=rules)
    with pytest.raises(TypeError, match="rules"):
        distckpt.consolidate(tmp_path / "c", tmp_path / "e", rules=rules)


def test_wrong_types_are_named(tmp_path: Path) -> None:
    distckpt.save({"w": whole("w", torch.ones(2))}, tmp_path / "c")

    with pytest.raises((TypeError, ValueError), match="content_metadata"):
        distckpt.save({"step": 1}, tmp_path / "d", content_metadata=3)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="strict"):
        distckpt.load({}, tmp_path / "c", strict=["raise"])  # type: ignore[arg-type]


def test_a_megatron_load_names_a_mode_that_it_has(tmp_path: Path) -> None:
    from distckpt import megatron

    megatron.save({"w": whole("w", torch.ones(2))}, tmp_path / "c")

    with pytest.raises(distckpt.LoadMismatchError) as caught:
        megatron.load({"v": whole("v", torch.ones(2))}, tmp_path / "c")

    assert "log_all" in str(caught.value).lower()


def test_a_callback_that_raises_does_not_end_retention(tmp_path: Path) -> None:
    def fail(report: Any) -> None:
        raise ZeroDivisionError

    with distckpt.CheckpointManager(
        tmp_path / "run", keep_last=1, on_failure="log", on_report=fail
    ) as manager:
        for step in range(3):
            manager.save(step, {"step": step})

    # They are committed: either they have not failed and are removed, or they are not there.
    assert set(manager.steps()).isdisjoint(manager.failures)


@pytest.mark.parametrize("name", ["overwrit", "content_metdata"])
def test_a_misspelled_argument_is_named_as_an_option_is(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match="did you mean"):
        distckpt.save({"step": 1}, tmp_path / "c", **{name: True})


def test_a_misspelled_argument_of_the_manager_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="keep_last"):
        distckpt.CheckpointManager(tmp_path / "run", keep_lst=3)


def test_a_module_alone_is_saved_and_filled(tmp_path: Path) -> None:
    saved, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    distckpt.save(saved, tmp_path / "c")  # type: ignore[arg-type]

    assert distckpt.load(target, tmp_path / "c") is target  # type: ignore[arg-type]

    assert torch.equal(target.weight, saved.weight)
    assert torch.equal(target.bias, saved.bias)


def _checkpoint(place: Path) -> Path:
    distckpt.save({"w": whole("w", torch.ones(4, 2))}, place / "c")
    return place / "c"


EXPORTS = {
    "max_file_bytes": ["5GB", True, None],
    "quantize": [True, False, 5, ["fp8-block"], ""],
    "family": [5],
    "like": [5],
    "merge_adapter": [5],
    "extra_files_from": [5],
    "fqn_to_index_mapping": [5, ["w"]],
    "rename": [5],
    "max_inflight_bytes": ["1GB", True, -1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in EXPORTS.items() for value in values]
)
def test_wrong_arguments_of_exports_are_named(tmp_path: Path, name: str, value: object) -> None:
    source = _checkpoint(tmp_path)

    with pytest.raises((TypeError, ValueError), match=f"^{name} "):
        distckpt.consolidate(source, tmp_path / "out", **{name: value})  # type: ignore[arg-type]

    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grids", 5),
        ("grids", "w"),
        ("grids", {"w": 5}),
        ("grids", {"w": "ab"}),
        ("grids", {"w": (1.5, 1)}),
        ("num_ranks", "2"),
        ("num_ranks", 2.5),
        ("num_ranks", 0),
        ("rules", 5),
        ("rename", 5),
        ("common_state", 5),
        ("overwrite", 1),
        ("max_inflight_bytes", "1GB"),
        ("max_inflight_bytes", -1),
    ],
    ids=str,
)
def test_wrong_arguments_of_reshard_are_named(tmp_path: Path, name: str, value: object) -> None:
    source = _checkpoint(tmp_path)

    with pytest.raises((TypeError, ValueError), match=f"^{name} "):
        distckpt.reshard(source, tmp_path / "out", **{name: value})  # type: ignore[arg-type]

    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("atol", "x"), ("rtol", None), ("atol", -1), ("rtol", float("nan")), ("rename", 5)],
    ids=str,
)
def test_wrong_arguments_of_diff_are_named(tmp_path: Path, name: str, value: object) -> None:
    source = _checkpoint(tmp_path)

    with pytest.raises((TypeError, ValueError), match=f"^{name} "):
        distckpt.diff(source, source, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["save", "load", "redistribute"])
def test_negative_numbers_of_bytes_are_refused(tmp_path: Path, verb: str) -> None:
    call: Any = getattr(distckpt, verb)
    state = {"w": whole("w", torch.ones(4, 2))}
    place = state if verb == "redistribute" else _checkpoint(tmp_path)

    with pytest.raises(ValueError, match=r"^max_inflight_bytes .* must not be negative, got -1$"):
        call(state, place, max_inflight_bytes=-1)


@pytest.mark.parametrize("value", [0, -1, "2", 1.5])
def test_wrong_numbers_of_threads_are_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^num_threads "):
        distckpt.verify(_checkpoint(tmp_path), num_threads=value)


@pytest.mark.parametrize("value", [None, 5, b"w"])
def test_what_is_no_key_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"^key is the name of a tensor, got"):
        distckpt.open(_checkpoint(tmp_path)).read(value)


@pytest.mark.parametrize("call", [distckpt.open, distckpt.verify])
@pytest.mark.parametrize("value", [None, 5])
def test_what_is_no_place_is_named(call: Any, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^A location is a path or a URL, got {value}\.$"):
        call(value)


def test_what_is_no_family_is_named(tmp_path: Path) -> None:
    family: Any = 5
    with pytest.raises(TypeError, match=r"^family is a path or a URL, got 5"):
        distckpt.load({"w": whole("w", torch.ones(4, 2))}, _checkpoint(tmp_path), family=family)
