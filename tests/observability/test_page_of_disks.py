"""The page's view of the disks of a store, with a real daemon, two file systems and a real browser."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_concerns import attached, named
from tests.machine.faults.resources import in_own_mounts
from tests.support.browser import Browser, executable
from transferd import WriteStorageTask
from transferd.cli.pool.master import free_port
from transferd.client.launch import running

pytestmark = [
    pytest.mark.skipif(executable() is None, reason="chromium is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems"),
]

# Of each disk: its name, the width of its bars, its text and how that is drawn.
ROWS = """[...document.querySelectorAll('#tiers tr')].filter((row) => row.cells[0].textContent.startsWith('disk '))
  .map((row) => [row.cells[0].textContent, [...row.cells[1].querySelectorAll('rect')].map((r) => r.width.baseVal.value),
    row.cells[2].textContent, row.cells[2].className])"""


def test_each_disk_has_a_line_with_its_room_or_its_trouble(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    port = free_port()
    tree = {
        "cache": {"ranks": 1, "device_blocks": 64, "host_blocks": 0},
        "storage": {"backend": "file", "file": {"path": [str(path) for path in paths], "capacity": "16MiB"}},
        "metrics": {"listen": f"127.0.0.1:{port}"},
    }
    mounts = in_own_mounts(" && ".join(f"mount -t tmpfs -o size=32m tmpfs {path}" for path in paths))
    with running(tree, tmp_path, prefix=mounts) as daemon, attached(daemon) as client:
        keys = [f"k{i}" for i in range(8)]
        client.submit(WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=list(range(8))))
        assert named(client) == {}, "each disk has room for its own capacity"
        with Browser(tmp_path / "profile") as browser:
            browser.open(f"http://127.0.0.1:{port}/")
            browser.until(f"({ROWS}).length === 2")
            for path, (name, (whole, ours, _), text, kind) in zip(paths, browser.ask(ROWS), strict=True):
                assert name == f"disk {path}"
                assert "of 16.0 MiB" in text, text
                assert "stay free" in text, text
                assert kind == ""
                assert 0 < ours < whole == 100
            command = ["nsenter", "--target", str(daemon.pid), "--mount", "mount", "-o", "remount,ro", str(paths[1])]
            subprocess.run(command, check=True, timeout=10)
            client.submit(
                WriteStorageTask(task_id="x", keys=[f"n{i}" for i in range(32)], gpu_block_ids=list(range(32)))
            )
            browser.until(f"({ROWS})[1][3] === 'bad'")
            _, (name, _, text, _) = browser.ask(ROWS)
            assert name == f"disk {paths[1]}"
            assert "Read-only file system" in text, text
