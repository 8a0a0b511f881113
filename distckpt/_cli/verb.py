"""A verb of the command line, and the types of its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import NamedTuple

from distckpt._cli.output import Output

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        summary: one line for the help.
        add_arguments: declares its arguments, beside `--json` and `--debug`.
        run: returns the exit code; an exception is printed as one line.
        error_code: the exit code for exceptions; 2 for checks, whose 1 means that the check failed.
    """

    name: str
    summary: str
    add_arguments: Callable[[ArgumentParser], object]
    run: Callable[[Namespace, Output], int]
    aliases: tuple[str, ...] = ()
    error_code: int = 1


def parse_size(text: str) -> int:
    """Convert `5GB`, `256MiB` or `1000` to bytes."""
    number = text.removesuffix("B").rstrip("KMGTi")
    unit = text.removesuffix("B")[len(number) :]
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is not a size; write 5GB, 256MiB or a number of bytes") from None


def positive(text: str) -> int:
    """Convert a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def positive_number(text: str) -> float:
    """Convert a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return number
