"""Near the limit of open files a client fails with a typed error. libzmq alone ends the process at some numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from transferd.client.launch import running

# Forks a child for each number of descriptors that are left. Each says how a connect ended, and must end by itself.
PROGRAM = """
import asyncio, os, resource, sys
import transferd.wire.transport, transferd.wire.obstacle, transferd.adapters.common.link
from transferd import Client, ReadStorageTask, SyncClient, TransferError
kind, endpoint = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

def fill(left):
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for fd in held[len(held) - left:]:
            os.close(fd)

async def connect():
    async with Client(endpoint, connect_timeout=30.0) as client:
        await client.ping()

def once(left):
    if kind == "Client":
        loop = asyncio.new_event_loop()  # an engine's own, which it has already
        fill(left)
        loop.run_until_complete(connect())
        return
    fill(left)
    with SyncClient(endpoint, connect_timeout=30.0) as client:
        client.ping()

for left in range(32):
    child = os.fork()
    if not child:
        try:
            once(left)
            said = "connected"
        except TransferError as error:
            said = f"{error.reason}: {error}"
        except BaseException as error:
            said = repr(error)
        os.write(1, f"{left} {said}\\n".encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(left, "ended by", status, flush=True)
"""


@pytest.mark.parametrize("kind", ["Client", "SyncClient"])
def test_at_every_number_of_descriptors_left_a_connect_ends_with_a_reason(kind: str, tmp_path: Path) -> None:
    tree = {"cache": {"ranks": 1, "layers": 1, "device_blocks": 4}, "storage": {"backend": "memory"}}
    with running(tree, tmp_path) as daemon:
        command = [sys.executable, "-c", PROGRAM, kind, daemon.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(map(int, said)) == list(range(32)), done.stderr
    assert said["31"] == "connected"
    failed = [line for line in said.values() if line != "connected"]
    assert failed
    for line in failed:
        assert "file descriptors, and fewer are free: this process may open 256 files" in line, said
