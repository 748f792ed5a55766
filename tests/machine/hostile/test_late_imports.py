"""A client that can import nothing any more, as after a change of user, notices all the same that its daemon hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.machine.hostile.test_holds import CACHE
from transferd.client.launch import running

CLIENT = """
import asyncio, sys
from transferd import Client, DaemonLost

async def main():
    async with Client(sys.argv[1], await_ready=False) as client:
        await client.exists(["k"])
        sys.meta_path.clear()
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            await client.exists(["k"])
        except DaemonLost as error:
            print(error.reason, flush=True)

asyncio.run(main())
"""


def test_a_suspended_daemon_is_lost_to_a_client_that_can_import_nothing(tmp_path: Path) -> None:
    with running({"cache": CACHE, "storage": {"backend": "memory"}}, tmp_path) as daemon:
        command = [sys.executable, "-c", CLIENT, daemon.endpoint]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                told, errors = client.communicate("\n", timeout=90)
            except subprocess.TimeoutExpired:
                client.kill()
                told, errors = client.communicate()
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
        assert (told, "Exception" in errors) == ("daemon_lost\n", False), errors
