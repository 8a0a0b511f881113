"""Arguments that several verbs share, as arguments of functions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distckpt._base.lazy import torch
from distckpt._cli.output import Output
from distckpt._storage import locations


def given(arguments: Namespace, *names: str) -> dict[str, Any]:
    """Return the named arguments that were given; the called function has defaults for the
    others.
    """
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def run_parts(
    arguments: Namespace,
    output: Output,
    verb: str,
    given: Mapping[str, Any],
    place: str,
    show: Callable[[Any, Output], int],
) -> int:
    """Do what was asked for of work in parts, see `_cli.parts`."""
    # Imported when it is asked for.
    from distckpt._cli import parts

    return parts.run(arguments, output, verb, given, place, show)


def run_parts_of_check(
    arguments: Namespace,
    output: Output,
    verb: str,
    given: Mapping[str, Any],
    show: Callable[[Any, Output], int],
) -> int:
    """Do what was asked for of a verb that writes nothing but its journal."""
    place = locations.join(arguments.journal, verb)
    chosen = {**given, "journal": arguments.journal}
    return run_parts(arguments, output, verb, chosen, place, show)


def dtype_option(given: Sequence[tuple[str, torch.dtype]] | None) -> Any:
    """Convert the values of `--dtype` to the `dtype` argument of functions."""
    if given is None:
        return None
    if len(given) == 1 and not given[0][0]:
        return given[0][1]
    # The first matching pattern counts: the one for all others comes last.
    return {pattern or "*": dtype for pattern, dtype in sorted(given, key=lambda pair: not pair[0])}


def warn_of_overflows(overflows: Mapping[str, int], output: Output) -> None:
    """Warn about values that did not fit the dtype they were converted to."""
    for name, count in overflows.items():
        output.message(
            f"warning: {count} values of {name!r} did not fit the dtype they were converted to"
        )
