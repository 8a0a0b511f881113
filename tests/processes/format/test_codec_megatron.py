"""Values of classes of Megatron's packages: stored without registration, and read where the program
imported them.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from typing import NamedTuple

import pytest
import torch

import distckpt
from distckpt import UnsupportedObjectError
from distckpt._foreign.torch_dist.objects import read_object
from distckpt._format.codec import decode, encode
from tests.support import harness

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
    assert decode(encode(VALUE)) == VALUE
    # Protocol 2 of pickles, which torch uses, names nested classes through a function.
    saved = {name: value for name, value in VALUE.items() if name != "inner"}
    torch.save(saved, tmp_path / "saved")
    assert read_object((tmp_path / "saved").read_bytes()) == saved


def test_a_class_that_needs_functions_is_refused(imported):
    with pytest.raises(
        UnsupportedObjectError, match=r"Plain.*register_object_type\(Plain, to_state"
    ):
        encode({"a": Plain()})


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


def test_names_of_other_things_are_not_looked_up(imported):
    imported.call = lambda *_: pytest.fail("called")
    with pytest.raises(UnsupportedObjectError, match=f"{MODULE}.call"):
        decode(encode(Mode.FAST).replace(b"settings.Mode", b"settings.call"))
