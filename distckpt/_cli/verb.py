"""What a verb of the command line is."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import NamedTuple

from distckpt._cli.output import Output

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        name: what the user types.
        summary: one line that says what it does.
        add_arguments: declares its arguments; `--json` and `--debug` are there already.
        run: does it and returns the exit code; what it raises becomes one line and the exit code for errors.
        aliases: other names.
        error_code: the exit code for errors; 2 for verbs that answer a question, where 1 is an answer.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], object]
    run: Callable[[Namespace, Output], int]
    aliases: tuple[str, ...] = ()
    error_code: int = 1


def parse_size(text: str) -> int:
    """Convert `5GB`, `256MiB` or `1000` to bytes, for use as the type of an argument."""
    number = text.removesuffix("B").rstrip("KMGTi")
    unit = text.removesuffix("B")[len(number) :]
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is not a size; write 5GB, 256MiB or a number of bytes") from None


def positive(text: str) -> int:
    """Convert a number of things, one at least, for use as the type of an argument."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def positive_number(text: str) -> float:
    """Convert a positive number, for use as the type of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return number
