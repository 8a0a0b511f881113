"""Files that stay open for reading."""

from __future__ import annotations

import os
import resource

import pytest

from distckpt._storage.open_files import OpenFiles


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="the system does not list open files"
)
def test_files_that_are_not_in_use_make_room_for_others(tmp_path):
    paths = [tmp_path / str(i) for i in range(40)]
    for path in paths:
        path.write_text(path.name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with OpenFiles(max_open=1000) as files, files.open(str(paths[0])) as first:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard)
        )
        try:
            for path in paths[1:]:
                with files.open(str(path)) as fd:
                    assert os.pread(fd, 10, 0).decode() == path.name
            assert os.pread(first, 10, 0) == b"0"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_two_readers_share_a_descriptor(tmp_path):
    """The system reads ahead for each descriptor."""
    path = tmp_path / "file"
    path.write_text("content")
    with OpenFiles() as files:
        with files.open(str(path)) as first, files.open(str(path)) as second:
            assert first != second
        with files.open(str(path)) as again:
            assert again in (first, second), "it was kept open"
        late = files.open(str(path))
        late.__enter__()
    late.__exit__(None, None, None)
    for fd in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
