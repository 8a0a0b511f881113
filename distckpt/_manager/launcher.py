"""The time that this process's launcher grants after a signal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

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
