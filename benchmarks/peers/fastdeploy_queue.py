"""FastDeploy's own EngineCacheQueue: a task is put, one rank in another process takes it and signals that it is done.

Both sides look as the original does with one rank: its transfer process asks without a pause whether there is a task,
and its engine for an answer every millisecond. The original has threads, barriers and bytes besides;
benchmarks/fastdeploy_real.py measures all of that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.peers.program import Caller, Order, serve
from tests.machine.with_fastdeploy import check

PATIENCE_S = 30.0


TREE = check.unpacked(check.archives()[-1])  # the newest version's source


def queue(**settings: Any) -> Any:
    sys.path.insert(0, str(TREE))
    from fastdeploy.inter_communicator import EngineCacheQueue

    return EngineCacheQueue(num_client=1, **settings)


class Queue(Caller):
    def __init__(self) -> None:
        self._done = 0

    def prepare(self, order: Order) -> str:
        os.environ["FD_LOG_DIR"] = str(order.directory)  # it logs every step, to files
        self._server = queue(address=("127.0.0.1", 0), is_server=True)
        port = self._server.get_server_port()
        self._engine = queue(address=("127.0.0.1", port), client_id=0)
        command = [sys.executable, "-m", "benchmarks.peers.fastdeploy_queue", str(port)]
        self._rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._rank.stdout is not None
        if self._rank.stdout.readline().strip() != b"ready":
            raise OSError("the rank did not start")
        self._rank.send_signal(signal.SIGSTOP)  # it never sleeps, and would take a core from the others in between
        return f"FastDeploy {TREE.name.rpartition('-')[0]}"

    def calls(self, count: int) -> list[float]:
        self._rank.send_signal(signal.SIGCONT)
        taken = []
        for _ in range(count):
            self._done += 1
            before = time.perf_counter()
            self._engine.put_transfer_task(("swap", self._done))
            while (answer := self._engine.get_transfer_done_signal()) is None:
                if time.perf_counter() - before > PATIENCE_S:
                    raise TimeoutError(f"no answer to task {self._done} within {PATIENCE_S:g} s")
                time.sleep(0.001)
            taken.append(time.perf_counter() - before)
            if answer[-1] != self._done:
                raise OSError(f"task {self._done} was answered with {answer}")
        self._rank.send_signal(signal.SIGSTOP)
        return taken

    def close(self) -> None:
        if hasattr(self, "_rank"):
            self._rank.kill()
            self._rank.wait()
        if hasattr(self, "_server"):
            self._server.manager.shutdown()


def rank(port: int) -> None:
    """Take each task and signal that it is done."""
    ours = queue(address=("127.0.0.1", port), client_id=0)
    print("ready", flush=True)
    while True:
        if not ours.empty():
            task, _ = ours.get_transfer_task()
            ours.put_transfer_done_signal(task)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(int(sys.argv[1]))
    else:
        serve(Queue())
