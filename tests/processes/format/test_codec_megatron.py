"""Values of classes of Megatron's packages: stored without registration, and read where the program
imported them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import io
import os
import sys
import types
import warnings
from typing import NamedTuple

import pytest
import torch
from safetensors.numpy import load_file

import distckpt
from distckpt import UnsupportedObjectError, torch_dist
from distckpt._foreign.torch_dist.objects import read_object
from distckpt.cli import main
from tests.support import harness
from tests.support.forged_files import with_object
from tests.support.harness import error_of

MODULE = "megatron.nowhere.settings"


class Mode(str, enum.Enum):
    FAST = "fast"


class Caller(NamedTuple):
    message: str
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    mode: Mode
    lr: float = 0.1

    class Inner(enum.Enum):
        ONE = 1


class Plain:
    pass


CLASSES = (Mode, Caller, Config, Plain)


@pytest.fixture
def imported(monkeypatch):
    module = types.ModuleType(MODULE)
    for cls in (*CLASSES, Config.Inner):
        monkeypatch.setattr(cls, "__module__", MODULE)
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, MODULE, module)
    for parent in [MODULE.rsplit(".", n)[0] for n in range(1, MODULE.count(".") + 1)]:
        if parent not in sys.modules:
            # Where Megatron is not installed.
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    return module


VALUE = {
    "counts": {Caller("loss", 3): [1.0]},
    "config": Config(Mode.FAST),
    "inner": Config.Inner.ONE,
}


def test_classes_of_megatron_need_no_registration(imported, tmp_path):
    distckpt.save({"value": VALUE}, tmp_path / "c")
    assert distckpt.load({}, tmp_path / "c") == {"value": VALUE}
    # Protocol 2 of pickles, which torch uses, names nested classes through a function.
    saved = {name: value for name, value in VALUE.items() if name != "inner"}
    torch.save(saved, tmp_path / "saved")
    assert read_object((tmp_path / "saved").read_bytes()) == saved


def test_a_class_that_needs_functions_is_refused(imported, tmp_path):
    with pytest.raises(
        UnsupportedObjectError, match=r"Plain.*register_object_type\(Plain, to_state"
    ):
        distckpt.save({"a": Plain()}, tmp_path / "c")


def load_without_the_module(rank, path):
    loaded = distckpt.load({}, path)
    with pytest.raises(AttributeError) as caught:
        _ = loaded["config"].lr
    return loaded["step"], MODULE in sys.modules, str(caught.value)


def test_nothing_is_imported_to_load(imported, tmp_path):
    distckpt.save({"config": Config(Mode.FAST), "step": 5}, tmp_path / "c")
    ((step, is_imported, error),) = harness.run(load_without_the_module, 1, str(tmp_path / "c"))
    assert (step, is_imported) == (5, False)
    assert f"{MODULE}.Config" in error


def test_names_of_other_things_are_not_looked_up(imported, tmp_path):
    imported.call = lambda *_: pytest.fail("called")
    shard = distckpt.ShardedObject("o", Mode.FAST, (1,), (0,))
    distckpt.save({"o": shard}, tmp_path / "c")
    stored = load_file(tmp_path / "c/objects/rank-00001.safetensors")
    blob = stored["o/shard_0_1"].tobytes()
    with_object(tmp_path / "c", blob.replace(b"settings.Mode", b"settings.call"))
    with pytest.raises(UnsupportedObjectError, match=f"{MODULE}.call"):
        distckpt.load({"o": shard.without_data()}, tmp_path / "c")


def export_without_the_classes(rank, folder):
    convert = ["convert", f"{folder}/c", f"{folder}/d", "--to", "torch_dist", "--megatron-types"]
    warnings.simplefilter("ignore")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(convert)
    error = error_of(torch_dist.export, f"{folder}/o", f"{folder}/d")
    is_left = os.path.exists(f"{folder}/d")
    distckpt.reshard(f"{folder}/c", f"{folder}/e", common_state={"lr": 0.1})
    torch_dist.export(f"{folder}/e", f"{folder}/d")
    return status, said.getvalue(), error, is_left, torch.load(f"{folder}/d/common.pt")


class Own(enum.Enum):
    ONE = 1


def test_an_export_names_the_objects_whose_classes_are_not_there(imported, tmp_path):
    distckpt.register_object_type(Own, "project.Own")  # not in the process that exports
    args = argparse.Namespace(lr=0.1, graph_scope=Mode.FAST, callers=[1, Caller("loss")])
    distckpt.save({"args": args, "nested": {"own": Own.ONE}}, tmp_path / "c")
    rng = distckpt.ShardedObject("rng/0", {"mode": Mode.FAST}, (1,), (0,))
    distckpt.save({"rng": rng}, tmp_path / "o")
    ((status, said, error, is_left, common),) = harness.run(
        export_without_the_classes, 1, str(tmp_path)
    )
    assert status == 1
    for words in (
        "'args.graph_scope'",
        f"{MODULE}.Mode",
        "'args.callers.1'",
        f"{MODULE}.Caller",
        "'nested.own'",
        "register_object_type(cls, name='project.Own')",
        "common_state={...}",
    ):
        assert words in said
    assert isinstance(error, UnsupportedObjectError)
    for words in ("'rng/0'", "'mode'", f"{MODULE}.Mode"):
        assert words in str(error)
    assert not is_left
    assert common == {"lr": 0.1}
