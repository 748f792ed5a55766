"""The lock of a store's directory: ours as long as its path leads to the file that we locked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transferd.errors import ConfigError
from transferd.storage.lock import StoreLock


def test_one_holds_it_and_a_removed_or_replaced_file_is_noticed_and_taken_anew(tmp_path: Path) -> None:
    one, other = StoreLock(tmp_path), StoreLock(tmp_path)
    one.take()
    one.take()
    assert one.problem() == ""
    with pytest.raises(ConfigError, match=f"in use by another daemon .pid {os.getpid()}."):
        other.take()
    (tmp_path / "lock").unlink()
    assert "removed" in one.problem()
    other.take()
    assert "replaced" in one.problem()
    with pytest.raises(ConfigError, match="in use by another daemon"):
        one.take()
    other.release()
    one.take()
    assert (one.problem(), other.problem()) == ("", "its lock is not taken")
    one.release()
