"""Names that still work and are about to go, see docs/stability.md."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def warn_deprecated(subject: str, *, instead: str, since: str, removed_in: str) -> None:
    """Warn the caller of a public function that something is deprecated.

    A `FutureWarning`, since the people who run a program see these, not only its authors.

    Args:
        subject: the deprecated thing, such as "the argument `path` of `load`".
        instead: its replacement.
        since: the release that deprecated it.
        removed_in: the release that removes it, at least two minor releases later.
    """
    warnings.warn(
        f"{subject} is deprecated since distckpt {since} and will be removed in {removed_in}: use "
        f"{instead}.",
        FutureWarning,
        stacklevel=3,
    )


def deprecated(
    *, instead: str, since: str, removed_in: str
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator for a public function that is deprecated, see `warn_deprecated`."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            name = f"{function.__name__}()"
            warn_deprecated(name, instead=instead, since=since, removed_in=removed_in)
            return function(*args, **kwargs)

        return call

    return decorate
