"""Arguments that several verbs share, as arguments of functions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distckpt._base.lazy import torch
from distckpt._storage import locations
from distckpt.cli._output import Output


def given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """Return the named arguments that were given. The called function has defaults for the rest."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def run_parts(
    arguments: Namespace,
    output: Output,
    verb: str,
    values: Mapping[str, Any],
    place: str,
    show: Callable[[Any, Output], int],
) -> int:
    """Carry out the option for work in parts, see `cli._parts`."""
    # Imported only for this option.
    from distckpt.cli import _parts as parts

    return parts.run(arguments, output, verb, values, place, show)


def run_parts_of_check(
    arguments: Namespace,
    output: Output,
    verb: str,
    values: Mapping[str, Any],
    show: Callable[[Any, Output], int],
) -> int:
    """Run a verb in parts that writes nothing but its journal."""
    place = locations.join(arguments.journal, verb)
    with_journal = {**values, "journal": arguments.journal}
    return run_parts(arguments, output, verb, with_journal, place, show)


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
