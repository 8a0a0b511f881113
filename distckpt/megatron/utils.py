"""Extract parts of sharded state dicts, and rename the keys in them.

Megatron's helpers for debugging are here, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from distckpt._base.public import set_public_home
from distckpt._state.common_state import storable_metadata
from distckpt.megatron._impl.extract import _sharded_object_id as _sharded_object_id
from distckpt.megatron._impl.extract import _sharded_tensor_shard_id as _sharded_tensor_shard_id
from distckpt.megatron._impl.extract import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    force_all_tensors_to_non_fp8,
    replace_prefix_for_sharding,
)

__all__ = [
    "add_prefix_for_sharding",
    "apply_prefix_mapping",
    "debug_msg",
    "debug_time",
    "extract_nonpersistent",
    "extract_sharded_base",
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "force_all_tensors_to_non_fp8",
    "logger_stack",
    "replace_prefix_for_sharding",
    "zip_strict",
]

set_public_home(globals())

_clean_metadata_for_serialization = storable_metadata
fallback_logger = logging.getLogger(__name__)
# Context variables, so that threads (an asynchronous save, say) do not see one another's nesting.
_names: ContextVar[tuple[str, ...]] = ContextVar("distckpt_debug_names", default=())
_loggers: ContextVar[tuple[logging.Logger, ...]] = ContextVar("distckpt_debug_loggers", default=())


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Zip iterables of the same length.

    A ValueError gives all lengths when they differ, before any tuple comes.
    """
    columns = list(map(list, args))
    lengths = list(map(len, columns))
    if len(set(lengths)) > 1:
        raise ValueError(f"tried to zip iterables of unequal lengths {lengths}")
    return zip(*columns, strict=True)


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Enter a named scope for debug logging, for this thread.

    None takes the name or logger of the scope around it.

    Yields:
        The names of the scopes around, joined by dots, and the logger.
    """
    names = _names.get()
    loggers = _loggers.get()
    names_token = _names.set((*names, name) if name else names)
    loggers_token = _loggers.set((*loggers, current_logger) if current_logger else loggers)
    try:
        yield ".".join(_names.get()), (_loggers.get() or (fallback_logger,))[-1]
    finally:
        _loggers.reset(loggers_token)
        _names.reset(names_token)


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log the duration of the body, in a scope as of `logger_stack`.

    It is logged also when the body raises.

    Args:
        threshold: shortest time to log, in seconds.
        level: logging level; None takes WARNING when there is a threshold, else DEBUG.
    """
    if level is None:
        level = logging.WARNING
        if threshold == float("-inf"):
            level = logging.DEBUG
    with logger_stack(name, logger) as (full_name, scope_logger):
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if seconds >= threshold:
                scope_logger.log(level, "%s took %.4f s", full_name, seconds)


def debug_msg(msg: str) -> None:
    """Log a message at level DEBUG, with its scopes.

    The names of the scopes around come before it, see `logger_stack`.
    """
    with logger_stack() as (full_name, scope_logger):
        scope_logger.debug("%s %s", full_name, msg)
