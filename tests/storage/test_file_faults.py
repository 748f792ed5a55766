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


RUN_OF_TWO_DIRECTORIES = """
import errno, os, sys
from tests.support.native import Faults
from transferd.runtime.native import NativeCall
from transferd.storage import _files

root, failing = sys.argv[1], int(sys.argv[2])
os.makedirs(f"{root}/ab/cd")
lock = f"{root}/lock"
open(lock, "w").close()
ours = os.stat(lock)
data, faults = memoryview(bytearray(500)), Faults()
names = ["ab/x", "ab/cd/y"]
orders = [(f"{root}/{name}", data, i, 0, f"{root}/{name}~{i}", None) for i, name in enumerate(names)]
how = True, os.O_WRONLY, 0o600, 0, False, True, lock, ours.st_dev, ours.st_ino
call = _files.prepared_store(orders, [], 500, 2, None, None, *how)
with faults.armed("fsync", errno.EIO, skip=failing):
    NativeCall(call)()
print(_files.answers(call), faults.hits, [os.path.exists(f"{root}/{name}") for name in names])
"""


@pytest.mark.parametrize("failing", range(5))
def test_each_directory_of_a_run_reaches_the_medium_or_none_of_its_objects_has_a_name(
    tmp_path: Path, failing: int
) -> None:
    """Two objects, one of them in a directory below the other's: an fsync each, and one of each directory."""
    pytest.importorskip("transferd.storage._files", reason="the installation found no compiler")
    # The second object's own fsync ends the run behind the first one, whose directory is then synced alone.
    done = {0: [-1, -1], 1: [1, -1], 2: [-1, -1], 3: [-1, -1], 4: [1, 1]}[failing]
    there = [answer == 1 for answer in done]
    assert native.run(RUN_OF_TWO_DIRECTORIES, str(tmp_path), str(failing)) == f"{done} {int(failing < 4)} {there}\n"
