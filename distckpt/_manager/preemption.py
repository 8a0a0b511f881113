"""Stopping on a signal: save now, and stop, on all ranks at the same step."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from distckpt._ranks.collectives import Ranks


class PreemptionGuard:
    """Notes a signal instead of dying of it, and tells all ranks at the same time that it has come.

        with distckpt.PreemptionGuard() as guard:
            for step in range(first_step, num_steps):
                train(step)
                if guard.should_stop():
                    manager.save(step, state).result()
                    break

    Args:
        signals: what announces the end; schedulers send SIGTERM some time before they kill.
        process_group: the ranks that stop together; None for the default group, or this process alone.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), process_group: Any = None) -> None:
        self.received = False
        self._signals = tuple(signals)
        self._process_group = process_group
        self._before: dict[int, Any] = {}

    def __enter__(self) -> PreemptionGuard:
        """Take the signals over. Only the main thread may, as Python wants it."""
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the signals do what they did before."""
        for number, handler in self._before.items():
            # None stands for a handler that was not set by Python, which cannot be put back.
            if handler is not None:
                signal.signal(number, handler)

    def should_stop(self) -> bool:
        """Tell whether any rank has received a signal: the same answer on all.

        Collective: every rank calls; exchanges one number, so calling it at every step is fine.
        """
        own = int(self.received)
        return not Ranks(self._process_group).all_equal(own) or bool(own)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between any two instructions: no logging, whose locks may be held.
        del number, frame
        self.received = True
