"""Starts engines as forks of one process that has imported vLLM, because an import takes half a minute of a core.

    python -m tests.machine.with_vllm.nursery SOCKET    a descriptor; ends when its other end is closed

A request is {argv, env} with three descriptors: the engine's standard input, its log, and a pipe for its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tests.machine.with_vllm import images, play

IMPORTS = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.kv_offload.tiering.spec",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization.online.base",
    "tests.machine.with_vllm.probe",
    "tests.machine.with_vllm.witness",
)
MESSAGE = 1 << 16


class Forked:
    """An engine's process, as far as the tests need subprocess.Popen's."""

    def __init__(self, pid: int, stdin: IO[bytes], code: int) -> None:
        self.pid, self.stdin = pid, stdin
        self._code = code  # a pipe
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._code], [], [], 0)[0]:
            self.returncode = int(os.read(self._code, 16) or b"-1")
            os.close(self._code)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        give_up = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("engine", timeout)
            select.select([self._code], [], [], 1.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:  # it is a child of the nursery until its code was read here
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@functools.cache
def _nursery() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """One for this process, which ends with it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.machine.with_vllm.nursery", str(there.fileno())],
        pass_fds=[there.fileno()],
        env=os.environ | play.ENVIRONMENT | {"PYTHONPATH": play.path()},
    )
    there.close()
    atexit.register(_end, process, here)
    return process, here


def _end(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    process.wait(60)


def start(argv: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Forked:
    """Start tests.machine.with_vllm.play with these arguments."""
    _, nursery = _nursery()
    stdin, feed = os.pipe()
    code, told = os.pipe()
    request = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
    socket.send_fds(nursery, [request], [stdin, log.fileno(), told])
    os.close(stdin)
    os.close(told)
    return Forked(int(nursery.recv(MESSAGE)), os.fdopen(feed, "wb"), code)


def serve(requests: socket.socket) -> bool:
    """Fork for each request. True in an engine's process, whose descriptors, arguments and variables are set."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    codes: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, MESSAGE)
        for pid in list(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                told = codes.pop(pid)
                os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(told)
        if requests.fileno() not in ready:
            continue
        message, given, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not message:
            return False
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(json.loads(message), given)
            for descriptor in (requests.detach(), woken, wake, *given, *codes.values()):
                os.close(descriptor)
            return True
        codes[pid] = given[2]
        os.close(given[0])
        os.close(given[1])
        requests.send(str(pid).encode())


def _become(request: dict[str, Any], given: Sequence[int]) -> None:
    os.dup2(given[0], 0)
    os.dup2(given[1], 1)
    os.dup2(given[1], 2)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["play", *request["argv"]]


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM and torch themselves
        images.use()
        for name in IMPORTS:
            importlib.import_module(name)
    if serve(socket.socket(fileno=int(sys.argv[1]))):
        play.main()


if __name__ == "__main__":
    main()
