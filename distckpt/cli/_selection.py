"""Arguments that several verbs share, as arguments of functions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from distckpt._base.lazy import torch
from distckpt._checkpoint.opening import opened
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.cli._arguments import is_in_parts
from distckpt.cli._output import Output


def opened_at(path: str) -> AbstractContextManager[StoredCheckpoint]:
    """Open a checkpoint, see `opened`."""
    return opened(Ranks.alone(), locations.normalize(path))


def given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """Return the named arguments that were given. The called function has defaults for the rest."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def call(
    arguments: Namespace,
    output: Output,
    function: Callable[..., Any],
    values: Mapping[str, Any],
    show: Callable[[Any, Output], int],
    *,
    verb: str,
    doing: str,
    place: str = "",
) -> int:
    """Call a function, whole or in part, and show its report.

    Args:
        arguments: of the command line.
        output: prints.
        function: which also takes `progress`.
        values: its arguments.
        show: prints its report, and returns the exit code.
        verb: the name of its work in parts.
        doing: the label of the progress.
        place: the path of its output; a check has a journal in the place of it.
    """
    if is_in_parts(arguments):
        # Imported only for this option.
        from distckpt.cli import _parts as parts

        if "journal" in arguments:
            values = {**values, "journal": arguments.journal}
            place = locations.join(arguments.journal, verb)
        return parts.run(arguments, output, verb, values, place, show)
    with output.progress(doing) as progress:
        report = function(**values, progress=progress)
    return show(report, output)


def dtype_option(pairs: Sequence[tuple[str, torch.dtype]] | None) -> Any:
    """Convert the values of `--dtype` to the `dtype` argument of functions."""
    if pairs is None:
        return None
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    # The first matching pattern counts: the one for all tensors comes last.
    return {pattern or "*": dtype for pattern, dtype in sorted(pairs, key=lambda pair: not pair[0])}


def warn_of_overflows(overflows: Mapping[str, int], output: Output) -> None:
    """Warn about values that exceeded the range of their new dtype."""
    for name, count in overflows.items():
        output.message(
            f"warning: {count} values of {name!r} did not fit the dtype they were converted to"
        )
