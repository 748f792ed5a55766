"""An engine whose loop, or whose GIL, stands still: the daemon sees that its process lives, and takes nothing from it.

Real processes. The daemon's patience with silent clients is short here; the engine stands still for several times that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.caches import attach, fill, snapshot
from tests.support.waits import stats_until
from transferd import Client, Status, SwapInTask, SwapOutTask
from transferd.client.launch import running

PATIENCE_S = 2.5  # the least
TREE = {
    "server": {"client_timeout": PATIENCE_S},
    "cache": {"ranks": 2, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    | {"device_blocks": 8, "host_blocks": 8},
    "host": {"staging": "64KiB"},
    "storage": {"backend": "memory"},
}
BLOCKS = [0, 1, 2, 3]

# Registers an engine of its own, says so, and stands still in C with the GIL held, until it is continued.
ENGINE = """
import asyncio, os, signal, sys
from transferd import Client, Engine
async def main(endpoint):
    layout = dict(layers=1, kv_heads=1, head_dim=16, block_size=16, device_blocks=4)
    async with Client(endpoint, engine="still", await_ready=False) as client:
        await client.register(Engine(ranks=1, model="m", layout=layout, host_blocks=4))
        epoch = client._conversation.session.epoch
        print("registered", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        await client.ping()
        print(client._conversation.session.epoch - epoch, flush=True)
asyncio.run(main(sys.argv[1]))
"""

# Waits until one of the daemon's clients has been silent for so many seconds.
SILENCE = """
import sys
from transferd import SyncClient
with SyncClient(sys.argv[1]) as client:
    while max(row["silent_s"] for row in client.clients()) < float(sys.argv[2]):
        pass
"""


async def test_an_engine_that_stands_still_keeps_its_registration_until_its_process_ends(tmp_path: Path) -> None:
    with running(TREE, tmp_path) as daemon:
        command = [sys.executable, "-c", ENGINE, daemon.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:  # noqa: ASYNC220
            assert engine.stdout is not None
            try:
                assert await asyncio.to_thread(engine.stdout.readline) == "registered\n"
                os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222
                async with Client(daemon.endpoint, await_ready=False) as watching:
                    silent_s = 0.0
                    while silent_s < 2 * PATIENCE_S:
                        [row] = await watching.clients(engine="still")
                        silent_s = row["silent_s"]
                    assert "still" in (await watching.stats())["engines"]
                    engine.send_signal(signal.SIGCONT)
                    assert await asyncio.to_thread(engine.stdout.readline) == "0\n", "it is the same epoch"
                    await stats_until(watching, lambda stats: "still" not in stats["engines"])
            finally:
                engine.kill()


async def test_swapped_blocks_outlive_a_blocked_loop(tmp_path: Path) -> None:
    with running(TREE, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client:
            caches = await attach(client)
            fill(caches, BLOCKS, seed=7)
            before = snapshot(caches, BLOCKS)
            out = SwapOutTask(task_id="out", gpu_block_ids=BLOCKS, cpu_block_ids=BLOCKS)
            assert (await client.submit(out)).status is Status.OK
            boot_id = client.boot_id
            # In this loop's own thread: nothing of this client runs until the daemon has missed it for so long.
            await_silence = [sys.executable, "-c", SILENCE, daemon.endpoint, str(2 * PATIENCE_S)]
            subprocess.run(await_silence, check=True, timeout=60)  # noqa: ASYNC221 - that is the point
            fill(caches, BLOCKS, seed=8)
            back = SwapInTask(task_id="in", gpu_block_ids=BLOCKS, cpu_block_ids=BLOCKS)
            result = await client.submit(back)
            assert (result.status, client.boot_id) == (Status.OK, boot_id), result
            assert snapshot(caches, BLOCKS) == before
        assert "client gone" not in daemon.log
