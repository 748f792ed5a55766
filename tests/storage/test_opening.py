"""A descriptor lives as long as its `with` block, and what is no file does not hang an open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transferd.storage.opening import READ_FLAGS, opened


def test_a_descriptor_is_closed_at_the_end_of_the_block_also_after_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "file", os.O_WRONLY | os.O_CREAT, 0o640) as fd:
        assert os.fstat(fd).st_mode & 0o777 == 0o640 & ~_umask()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(KeyError), opened(tmp_path / "file", READ_FLAGS) as fd:
        raise KeyError
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_fifo_does_not_hang_and_a_link_is_not_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with opened(tmp_path / "fifo", READ_FLAGS):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with pytest.raises(OSError, match="symbolic links"), opened(tmp_path / "link", READ_FLAGS):
        pass


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
