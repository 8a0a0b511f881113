"""Interruptions of an operation: signals, and calls in the middle of it.

Python runs the handlers of signals between any two instructions of the main thread. An exception
raised there, such as KeyboardInterrupt, could take this rank out of an exchange in which other
ranks wait. So while several ranks work together, handlers run only where all ranks learn of their
exceptions: at the ends of phases, and while threads move bytes within a phase. A call that a
handler makes would find the operation in the middle of its work, so it is refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import ParamSpec, TypeAlias, TypeVar, cast

from distckpt._base.errors import CheckpointingException

INSISTING_SECONDS = 1.0
"""Seconds after which a repeated signal is handled at once. Sooner ones do not count: launchers
pass on signals that the terminal has already sent.
"""

_SIGNALS = tuple(signal.valid_signals())

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_Handler: TypeAlias = Callable[[int, FrameType | None], object]

# All of this belongs to the main thread.
_handlers: dict[int, _Handler] = {}
"""Signal -> its handler, to be called later."""
_arrived: dict[int, tuple[float, _Handler]] = {}
"""Signal -> the time of its arrival, and the handler to call."""
_is_forced = False
"""Whether a handler that would not wait has raised an exception: the ranks are out of step."""

_thread = threading.local()
"""`names`: the running operations of a thread; `locks`: the locks that they hold."""


def operation(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Make a function an operation, which never runs inside another one.

    This holds within a thread. Operations of this package may nevertheless consist of other
    operations. After `defer_signals` in an operation, the handlers of signals wait for
    `run_handlers`, or for its end.
    """

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        name = function.__qualname__
        names = _names()
        # An exception of a signal handler may end any step below but a deletion, so the end of this
        # call restores the state before it.
        num_running = len(names)
        if num_running:
            _refuse_callbacks(name, names[0], sys._getframe(1))
        locks: list[threading.Lock] = _thread.__dict__.setdefault("locks", [])
        num_held = len(locks)
        try:
            names.append(name)
            return function(*args, **kwargs)
        finally:
            del names[num_running:]
            if not num_running:
                while len(locks) > num_held:
                    locks.pop().release()
                if _handlers and _is_main_thread():
                    _end_deferral()

    _CALLS.add(cast(FunctionType, call).__code__)
    return call


def _names() -> list[str]:
    """Return the names of this thread's running operations, outermost first."""
    names: list[str] = _thread.__dict__.setdefault("names", [])
    return names


def run_operation(name: str, function: Callable[[], _Result]) -> _Result:
    """Call a function in the name of another thread's operation."""
    names = _names()
    num_running = len(names)
    try:
        names.append(name)
        return function()
    finally:
        del names[num_running:]


_CALLS: set[CodeType] = {run_operation.__code__}
"""Code objects of operations, and of `run_operation`."""


def _refuse_callbacks(name: str, running: str, caller: FrameType | None) -> None:
    """Refuse a call in the middle of another one.

    A call is allowed if only this package lies between them.
    """
    while caller is not None and caller.f_code not in _CALLS:
        if not f"{caller.f_globals.get('__name__')}.".startswith(("distckpt.", "contextlib.")):
            raise CheckpointingException(
                f"{name} was called in the middle of {running}, in the same thread: by a signal "
                "handler, or by a callback. Let it set a flag, and call when the other call has "
                "returned; see distckpt.PreemptionGuard for signals."
            )
        caller = caller.f_back


def running_operation() -> str | None:
    """Return the name of this thread's running operation, or None."""
    names = _names()
    if not names:
        return None
    return names[0]


def hold(lock: threading.Lock) -> None:
    """Hold a lock until the end of the thread's running operation."""
    locks = getattr(_thread, "locks", None)
    if locks is not None and _names() and lock not in locks:
        lock.acquire()
        locks.append(lock)


def defer_signals() -> None:
    """Let signal handlers wait until the thread's running operation ends."""
    if not _is_main_thread() or running_operation() is None:
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _defer:
            _handlers[number] = handler
            signal.signal(number, _defer)


def run_handlers() -> None:
    """Run the handlers that have waited, in the main thread.

    Their exceptions are raised here.
    """
    if _arrived and _is_main_thread():
        number, (_, handler) = _arrived.popitem()
        try:
            handler(number, sys._getframe())
        finally:
            run_handlers()


def is_forced() -> bool:
    """Return whether a repeated signal has ended this thread's work."""
    return _is_forced and _is_main_thread()


def _defer(number: int, frame: FrameType | None) -> None:
    global _is_forced
    now = time.monotonic()
    if number not in _arrived:
        _arrived[number] = now, _handlers[number]
        return
    arrived_at, handler = _arrived[number]
    if now - arrived_at < INSISTING_SECONDS:
        return
    del _arrived[number]
    try:
        handler(number, frame)
    except BaseException:
        _is_forced = True
        raise


def _end_deferral() -> None:
    """Restore the handlers, and run those that still wait.

    The operation has ended in order on all ranks.
    """
    global _is_forced
    _is_forced = False
    # In such an order that any of the handlers may raise an exception as soon as it is back.
    for number, handler in list(_handlers.items()):
        if signal.getsignal(number) is _defer:
            signal.signal(number, handler)
        del _handlers[number]
    run_handlers()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# --- Garbage --------------------------------------------------------------------------------------


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector from running.

    Planning makes many small tuples that all live on, and an import many objects. The collector
    would walk over them, and over all of torch's, again and again, which takes as long as the
    planning or the import itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
