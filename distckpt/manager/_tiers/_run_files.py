"""Small files of a run: its identity, and the states of its steps on a host."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from distckpt._storage import locations
from distckpt.manager import _steps as steps

RUN_FILE = "run.json"
"""File that identifies a run, in its root and local directories."""
RUN = "run"
STATES_FILE = "states.json"
"""File with the states of steps, in a local directory."""
_NEW = "new"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class StepState:
    """The tiers that a step has reached.

    Attributes:
        is_local: committed on all hosts.
        is_replicated: each file is on two hosts.
        is_uploaded: committed in the root.
        problem: the reason why a copy or an upload failed, or stands still.
    """

    is_local: bool = False
    is_replicated: bool = False
    is_uploaded: bool = False
    problem: str | None = None

    @property
    def tier(self) -> str:
        """Return the safest tier in a word or two."""
        if self.is_uploaded:
            return "uploaded"
        return "replicated" if self.is_replicated else "local only"


def encode_run(run: str, root: str, is_new: bool = False) -> bytes:
    """Encode the identity of a run; a new one is unknown to the root."""
    return json.dumps({RUN: run, "root": root, **({_NEW: True} if is_new else {})}).encode()


def read_run(path: str) -> tuple[str, str, bool]:
    """Return the values of `encode_run`; empty ones if the file does not tell."""
    fields = _read_object(path)
    if fields.get(RUN):
        return str(fields[RUN]), str(fields.get("root")), bool(fields.get(_NEW))
    return "", "", False


def is_of_host(directory: str) -> bool:
    """Whether a directory is the one of a run on a host."""
    name = os.path.basename(directory)
    if not name.startswith("run-") or not locations.is_local(directory):
        return False
    run, *_ = read_run(locations.join(directory, RUN_FILE))
    return name == f"run-{run}"


def read_states(directory: str) -> dict[int, StepState]:
    """Return the states of steps in a local directory, by step."""
    found = {}
    for step, fields in _read_object(locations.join(directory, STATES_FILE)).items():
        with contextlib.suppress(TypeError, ValueError):
            if isinstance(fields, dict):
                found[int(step)] = StepState(**fields)
    return found


def write_state(directory: str, step: int, state: StepState) -> None:
    """Note the state of a step; forget steps that are gone."""
    here = set(steps.all_steps(directory))
    states = {}
    for number, known in {**read_states(directory), step: state}.items():
        if number in here or number == step:
            states[number] = asdict(known)
    path = locations.join(directory, STATES_FILE)
    # After a crash, the next start finds out anew.
    locations.write_bytes(path, json.dumps(states).encode(), durable=False)


def _read_object(path: str) -> Mapping[str, object]:
    with contextlib.suppress(OSError, ValueError):
        fields = json.loads(locations.read_bytes(path, _MAX_BYTES))
        if isinstance(fields, dict):
            return fields
    return {}
