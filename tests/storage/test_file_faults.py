"""The file system under the file store, going wrong: every system call of a put and a get, in the real process."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from tests.storage.harness import Open, file_config, put_stranger, skip_without_direct_io
from tests.storage.test_file import GIB, file_of, fill, name, present
from tests.support import native
from transferd.runtime.compat import timeout
from transferd.storage.base import Found
from transferd.storage.file import FileStorage

CALLS = {"open", "pwrite", "fallocate", "rename", "mkdir", "fsync", "unlink", "pread"}


@pytest.mark.parametrize("way", ["native", "Python"])
@pytest.mark.parametrize("section", [{}, {"fsync": True}, {"direct_io": True}], ids=str)
def test_after_any_failed_call_no_half_object_is_read_and_outcomes_are_right(
    tmp_path: Path, section: dict[str, bool], way: str
) -> None:
    """file_faults.py fails each call in its turn, with each error, and checks. Here: that it came to all of them."""
    program = "from tests.storage.file_faults import main; main()"
    if "direct_io" in section:
        skip_without_direct_io(tmp_path)
    report = json.loads(
        native.run(program, str(tmp_path), json.dumps(section), way).splitlines()[-1]
    )  # before it: the log
    assert report["broken"] == []
    assert {call for call, hits in report["hits"].items() if hits} == CALLS - ({"fsync"} - section.keys())
    assert report["stored"] > 0
    # After a failure the extension's twin does it again: what fails once fails no object (fsync is the twin's alone).
    assert ("failed" in report) == (way == "Python" or "fsync" in section)


@pytest.mark.parametrize("stranger", ["fifo", "directory", "link", "socket", "device"])
async def test_a_stranger_in_an_objects_place_neither_hangs_a_read_nor_is_followed(
    open_storage: Open, tmp_path: Path, stranger: str
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path / "s", GIB)))
    await fill(store, 1)
    path = file_of(tmp_path / "s", 1)
    kept = tmp_path / "kept"
    path.rename(kept)
    if stranger == "socket":
        with socket.socket(socket.AF_UNIX) as bound, pytest.MonkeyPatch.context() as patch:
            patch.chdir(path.parent)
            bound.bind(path.name)
    elif stranger == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: a read of any length is good
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        put_stranger(path, stranger, kept)
    before = kept.read_bytes()
    async with timeout(30):
        [(outcome, _)] = await store.get((name(1), 1000))
    assert outcome.found in (Found.MISSING, Found.FAILED)
    assert kept.read_bytes() == before
    await fill(store, 1)  # and the next write heals it
    assert await present(store, 2) == [1]
