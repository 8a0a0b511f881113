"""Disks and limits that saves run into."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import fsspec
import pytest

from tests.support.addresses import found_program, reserved_address, serving


def do_or_skip(*command: str) -> None:
    """Run a command; skip the test where there is no such program, or it is not allowed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]}")
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size, where the test may."""
    do_or_skip("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


_MKFS = {
    # It keeps more blocks for itself than it reports.
    "ext4": ("mkfs.ext4", "-q", "-m", "0"),
    "xfs": ("mkfs.xfs", "-q"),
    "btrfs": ("mkfs.btrfs", "-q"),
}


@contextmanager
def loop_disk(kind: str, folder: Path, image: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of a kind and size, where the test may."""
    with image.open("wb") as file:
        file.truncate(num_bytes)
    do_or_skip(*_MKFS[kind], str(image))
    do_or_skip("mount", "-o", "loop", str(image), str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def bindfs(source: Path, folder: Path) -> Iterator[None]:
    """Show a directory in another place through FUSE, where the test may.

    As on NFS, an open file that is removed leaves a hidden name, so that its directory is not
    empty, and directories cannot be exchanged.
    """
    do_or_skip("bindfs", str(source), str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def served(kind: str, folder: Path) -> Iterator[str]:
    """Serve a directory over SFTP or WebDAV; yields its URL for fsspec."""
    module = {"sftp": "paramiko", "webdav": "webdav4.fsspec"}[kind]
    pytest.importorskip(module)
    program = found_program("rclone", "Debian's package of this name")
    login = ("--user", "tester", "--pass", "secret")
    with (
        reserved_address() as address,
        serving(address, program, "serve", kind, str(folder), "--addr", address, *login),
    ):
        host, _, port = address.partition(":")
        settings = {
            "sftp": {"host": host, "port": int(port), "username": "tester", "password": "secret"},
            "webdav": {"base_url": f"http://{address}", "auth": ("tester", "secret")},
        }[kind]
        with mock.patch.dict(fsspec.config.conf, {kind: settings}):
            yield {"sftp": "sftp://", "webdav": "webdav:/"}[kind]


@contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    """Mount an overlay file system on `folder/lower`, where the test may; hand out where it is
    mounted.
    """
    paths = {name: folder / name for name in ("lower", "upper", "work", "merged")}
    for path in paths.values():
        path.mkdir(exist_ok=True)
    layers = f"lowerdir={paths['lower']},upperdir={paths['upper']},workdir={paths['work']}"
    do_or_skip("mount", "-t", "overlay", "-o", layers, "overlay", str(paths["merged"]))
    try:
        yield paths["merged"]
    finally:
        subprocess.run(["umount", str(paths["merged"])], check=True)


@contextmanager
def mounted_read_only(folder: Path) -> Iterator[None]:
    """Make a directory a read-only mount of itself, where the test may."""
    do_or_skip("mount", "--bind", str(folder), str(folder))
    try:
        do_or_skip("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Keep a directory from being renamed or changed, where the test may."""
    do_or_skip("chattr", "+i", str(folder))
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


@contextmanager
def limited(kind: int, soft_limit: int) -> Iterator[None]:
    """Lower a limit that the system puts on this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft_limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
