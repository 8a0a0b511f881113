"""Parts of work as values that any scheduler can send to other processes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_count
from distckpt._base.options import Progress
from distckpt._parts.run import PartReport, finish, run_part
from distckpt._parts.work import Part, Work

_MAKERS = {
    "consolidate": ("exports", "consolidation"),
    "merge": ("exports", "merger"),
}
"""The module, and the function in it, that says what a verb does; imported when it is used."""


@dataclass(frozen=True)
class Task:
    """A part of some work, which can be pickled and run in any process that sees the same storage.

    Attributes:
        verb: what is done, such as "consolidate".
        arguments: of the verb.
        index: which part, counted from 0.
        count: of so many parts.
    """

    verb: str
    arguments: Mapping[str, Any]
    index: int
    count: int

    def run(self, progress: Progress | None = None) -> PartReport:
        """Do what is missing of this part; complete the work if no other part is missing.

        A task may be run again, also while it is running elsewhere, or with another `count`.

        Args:
            progress: called with the bytes of the part that are done, and those that this call
                does.

        Raises:
            CheckpointingException: other work for the same output is not complete, or was begun
                with other arguments. Otherwise what the verb raises.
        """
        return run_part(make_work(self.verb, self.arguments), Part(self.index, self.count), progress)

    def finish(self) -> Any:
        """Complete the work, of which all parts are done, and return the report of the verb.

        The last part does that by itself, unless it is interrupted there.

        Raises:
            CheckpointingException: something is missing.
        """
        return finish(make_work(self.verb, self.arguments))


@paused_garbage_collection()
def make_work(verb: str, arguments: Mapping[str, Any]) -> Work:
    """Plan what a verb does with these arguments."""
    module, function = _MAKERS[verb]
    make = getattr(importlib.import_module(f"distckpt._parts.{module}"), function)
    work: Work = make(**arguments)
    return work


def make_tasks(verb: str, num_tasks: int, arguments: Mapping[str, Any]) -> list[Task]:
    """Divide what a verb does with these arguments into tasks."""
    check_count("num_tasks", num_tasks)
    return [Task(verb, arguments, index, num_tasks) for index in range(num_tasks)]


def remove_output(place: str, nonce: str, files: list[str]) -> None:
    """Remove what parts have written into its final place on an object store."""
