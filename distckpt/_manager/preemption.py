"""Stop on a signal, on all ranks at the same step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import operation
from distckpt._manager.launcher import warning_of_launcher
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)


class PreemptionGuard:
    """Catch a signal such as SIGTERM, so that all ranks stop together.

    They can save and stop at the same step.

        with distckpt.PreemptionGuard() as guard:
            for step in range(first_step, num_steps):
                train(step)
                if guard.should_stop():
                    manager.save(step, state).result()
                    break

    Args:
        signals: numbers of the signals. Schedulers send SIGTERM some time before they kill.
            `torchrun` passes it on to the ranks and kills them after 30 seconds, unless
            `--shutdown-timeout` gives them the time that the scheduler gives (torch 2.12).
        process_group: the ranks that stop together; None for the default group, or this process
            alone.
    """

    def __init__(
        self, signals: Sequence[int] = (signal.SIGTERM,), process_group: Any = None
    ) -> None:
        if not isinstance(signals, Sequence) or not all(isinstance(n, int) for n in signals):
            raise TypeError(f"signals is a list such as [signal.SIGTERM], got {signals!r:.100}.")
        self.received = False
        self._signals = tuple(signals)
        self._process_group = process_group
        self._before: dict[int, Any] = {}

    def __enter__(self) -> PreemptionGuard:
        """Install handlers for the signals.

        Python allows that only in the main thread.

        Warns if torchrun would kill the ranks before a scheduler that sends SIGTERM does.
        """
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        except BaseException:
            self.__exit__()
            raise
        if signal.SIGTERM in self._signals and (text := warning_of_launcher()):
            logger.warning("%s", text)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            # None stands for a handler that Python has not set, and cannot restore.
            if handler is not None:
                signal.signal(number, handler)

    @operation
    def should_stop(self) -> bool:
        """Return True, on all ranks alike, once any has received a signal.

        Collective operation: all ranks must call it. It exchanges one number, so it can be called
        at every step.
        """
        own = int(self.received)
        stops = not Ranks(self._process_group).all_equal(own) or bool(own)
        # Raised after the exchange, which the other ranks would wait for.
        if not self._before:
            raise CheckpointingException(
                "No signal is caught: use the PreemptionGuard in a `with` statement."
            )
        return stops

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between any two instructions, and so must not log: the locks of loggers
        # may be held.
        self.received = True
        before = self._before.get(number)
        if callable(before) and isinstance(getattr(before, "__self__", None), PreemptionGuard):
            before(number, frame)
