"""A process in which hostile files are read: little memory, little time, and what the interpreter
does is watched.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import resource
import select
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distckpt
from distckpt import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    cli,
    hf,
)
from tests.fuzz.targets import save_dcp, save_example

MEMORY_BYTES = 768 << 20
CPU_SECONDS = 30
WALL_SECONDS = 240
"""A process that waits for a pipe or a device takes no CPU time."""

_NEVER = (
    "pickle.", "exec", "compile", "import", "marshal.", "os.system", "os.exec", "os.fork",
    "os.posix_spawn", "os.kill", "os.putenv", "subprocess.", "socket.", "urllib.",
    "webbrowser.", "ctypes.dlopen",
)  # fmt: skip
_FOLDERS = ("tensors", "objects")
_OF_FILES = (
    "open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir",
    "os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.",
)  # fmt: skip


def _load(path: str) -> object:
    asked: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", torch.full((4, 6), -1.0))}
    if os.path.exists(os.path.join(path, "objects")):
        asked["o"] = ShardedObject("o", None, (1,), (0,))
    loaded = distckpt.load(asked, path)
    assert torch.equal(loaded["w"], torch.arange(24.0).view(4, 6)), "wrong values, and no error"
    return loaded


def _cli(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main([*arguments, "--debug"])
    unprintable = {c for c in printed.getvalue() if not c.isprintable() and c != "\n"}
    assert not unprintable, f"control characters on the terminal: {unprintable!r}"


VERBS: dict[str, Callable[[str], object]] = {
    "check": distckpt.megatron.check_is_distributed_checkpoint,
    "load": _load,
    "load_plain_tensors": distckpt.megatron.load_plain_tensors,
    "load_common_state_dict": distckpt.megatron.load_common_state_dict,
    "load_sharded_metadata": distckpt.megatron.serialization.load_sharded_metadata,
    "inspect": lambda path: _cli("inspect", path),
    "inspect a key": lambda path: _cli("inspect", path, "--key", "w"),
    "verify --fast": lambda path: distckpt.verify(path, "fast"),
    "verify": lambda path: distckpt.verify(path),
    "consolidate": lambda path: distckpt.consolidate(path, path + ".consolidated"),
    "consolidate_safetensors_files": lambda path: hf.consolidate_safetensors_files(
        path, path + ".merged"
    ),
    "convert": lambda path: distckpt.reshard(path, path + ".converted"),
}
"""What can be done with a directory that somebody else made."""

_ALSO_DOCUMENTED: dict[str, type[Exception]] = {"consolidate_safetensors_files": ValueError}


def limit_memory(num_bytes: int) -> None:
    """Let this process take so much more memory than it has now."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def serve(connection: Any) -> None:
    """Read one directory after the other, each in a fork of this process, which has imported
    everything already.

    Args:
        connection: brings paths; gets for each a list of outcomes: verb, error (its class), text,
            is_documented, and the events of the interpreter that should not have happened. A verb
            without an outcome did not end.
    """
    torch.set_num_threads(1)
    logging.getLogger("distckpt").setLevel(logging.CRITICAL)
    _warm_up()
    # A garbage collection in a fork would write to every object of this process, and thereby copy
    # its memory.
    gc.collect()
    gc.freeze()
    while True:
        try:
            path = connection.recv()
        except EOFError:
            return
        connection.send(_in_fork(path))


def _warm_up() -> None:
    """Do everything once, so that whatever is imported later is the doing of a file."""
    # The text encoding of zip files, by its own name.
    "".encode("cp437")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("c", save_example), ("d", save_dcp), ("e", lambda path: path.mkdir())):
            make(Path(folder, name))
            for function in VERBS.values():
                with contextlib.suppress(CheckpointingException, ValueError):
                    function(f"{folder}/{name}")


class Watch:
    """An audit hook: notes code that is run or imported, and files outside of a directory and of
    what is made of it.
    """

    def __init__(self, location: str) -> None:
        parent, name = os.path.split(location)
        self.location = location
        # Names of new directories say on which boot of the machine they were made; mounts are not
        # replaced.
        of_system = ("/proc/self/mountinfo", "/proc/sys/kernel/random/boot_id")
        self.allowed = (location, f"{parent}/.{name}.", *of_system)
        self.events: list[str] = []
        self.is_on = True

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or not event.startswith((*_NEVER, *_OF_FILES)):
            return
        if event.startswith(_NEVER):
            # Of the library of this process itself, for system calls.
            if event != "ctypes.dlopen" or args[0] is not None:
                self.events.append(f"{event} {args!r:.200}")
            return
        name = args[0]
        if isinstance(name, int) or name is None:
            return
        if event.startswith("os.") and not os.path.isabs(name) and args[-1] not in (None, -1):
            # In a directory that is open: opening it was looked at.
            return
        if event == "open" and name in _FOLDERS:
            # Of a save that is given up, in a directory that is open.
            return
        path = os.path.abspath(os.fsdecode(name))
        if path != os.path.dirname(self.location) and not path.startswith(self.allowed):
            self.events.append(f"{event} {args!r:.200}")
        elif (
            event == "open"
            and os.path.exists(path)
            and not stat.S_IFMT(os.stat(path).st_mode) & (stat.S_IFREG | stat.S_IFDIR)
        ):
            self.events.append(f"no file: {event} {args!r:.200}")


def _in_fork(path: str) -> list[dict[str, Any]]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _read(path, writing)
        finally:
            os._exit(0)
    os.close(writing)
    deadline, content = time.monotonic() + WALL_SECONDS, b""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        more = os.read(reading, 1 << 16)
        if not more:
            break
        content += more
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    os.waitpid(pid, 0)
    return [json.loads(line) for line in content.splitlines() if line.endswith(b"}")]


def _read(path: str, writing: int) -> None:
    limit_memory(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch = Watch(path)
    sys.addaudithook(watch)
    for verb, function in VERBS.items():
        watch.is_on, watch.events = True, []
        outcome: dict[str, Any] = {"verb": verb, "error": None, "text": "", "is_documented": True}
        try:
            function(path)
        except BaseException as error:
            watch.is_on = False
            documented = (
                CheckpointingException,
                _ALSO_DOCUMENTED.get(verb, CheckpointingException),
            )
            outcome |= {
                "error": type(error).__name__,
                "is_documented": isinstance(error, documented),
            }
            outcome["text"] = (
                str(error) if outcome["is_documented"] else traceback.format_exc()[-3000:]
            )
        watch.is_on = False
        outcome["events"] = watch.events
        os.write(writing, json.dumps(outcome).encode() + b"\n")
