"""Stop on a signal, on all ranks at the same step."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.torch_version import TorchVersion

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import operation
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


# --- Launcher -------------------------------------------------------------------------------------


_DEFAULT_SECONDS = 30
"""Seconds between SIGTERM and SIGKILL of torchrun."""

_SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "KUBERNETES_SERVICE_HOST": "Kubernetes"}
_SETTINGS = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT")
_OPTIONS = ("--shutdown-timeout", "--shutdown_timeout")
_HAS_OPTION = "2.12"
"""The first version of torch whose torchrun has this option."""


def warning_of_launcher() -> str:
    """Describe the problem with this process's launcher, once for all ranks.

    The text is empty if there is none, or none can be seen.
    """
    if os.environ.get("RANK") != "0":
        return ""
    has_option = TorchVersion(torch.__version__) >= _HAS_OPTION
    return judge(os.environ, _command_of_parent(), has_option)


def judge(environment: Mapping[str, str], launcher: Sequence[str], has_option: bool) -> str:
    """Describe the risk that a launcher kills before the scheduler does.

    Args:
        environment: of this process.
        launcher: the command line of its parent; empty if unknown.
        has_option: whether this torch's torchrun can be told how long to wait.
    """
    names = [name for variable, name in _SCHEDULERS.items() if variable in environment]
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if not names or not is_torchrun or (has_option and _is_set(environment, launcher)):
        return ""
    text = (
        f"torchrun kills the ranks {_DEFAULT_SECONDS} seconds after SIGTERM, whatever {names[0]} "
        "allows: a longer save is lost. "
    )
    if has_option:
        return (
            f"{text}Start it with --shutdown-timeout SECONDS, a little less than {names[0]} gives."
        )
    return (
        f"{text}torchrun of torch 2.12 and newer has --shutdown-timeout; with this torch, let the "
        "scheduler start the ranks (srun), or save in the background often."
    )


def _is_set(environment: Mapping[str, str], launcher: Sequence[str]) -> bool:
    """Whether torchrun's waiting time is set, or may be set unseen."""
    if any(name in environment for name in _SETTINGS):
        return True
    return not launcher or any(word.partition("=")[0] in _OPTIONS for word in launcher)


def _command_of_parent() -> list[str]:
    """Return the command line of this process's parent.

    It is empty if it cannot be read, or is not torchrun's.
    """
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []
    names = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
    is_torchrun = any(word.rpartition("/")[2] in names for word in words)
    if is_torchrun:
        return words
    return []
