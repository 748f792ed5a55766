"""A router's index: Dynamo's own indexer, from PyPI, which subscribes to an engine's KV events.

    python -m tests.machine.with_vllm.router EVENTS    in a network namespace

A line of token ids comes in, a line of its answer goes out.

It listens on all addresses of its machine, and no option changes that. So it runs in a network namespace of its own;
events come over an ipc:// socket, and questions through a process beside it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PORT = 8090  # its own; the namespace has no other process that listens
START_S = 120.0  # on a busy machine


class Router:
    """What Dynamo's indexer knows of one engine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def matched(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many leading tokens the engine has on its GPU, and on its GPU and then in storage."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(tokens)) + "\n")
        self._process.stdin.flush()
        answered = json.loads(self._process.stdout.readline())
        known = answered["instances"].get("1", {"gpu": 0, "disk": 0})
        return known["gpu"], known["disk"]


@contextmanager
def routing(events: str, block_size: int) -> Iterator[Router]:
    """Dynamo's indexer of the events at this ipc:// endpoint. Skips the test where it, or a namespace, is missing."""
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("ai-dynamo-runtime is not installed")
    if not all(map(shutil.which, ("unshare", "ip"))):
        pytest.skip("network namespaces need unshare and ip")
    command = ["unshare", "--net", sys.executable, "-m", "tests.machine.with_vllm.router", events, str(block_size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Router(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it ends, and ends the indexer
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def _asked(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _wait_until_it_listens(indexer: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while True:
        try:
            if _asked("/workers")[0]["listeners"]["0"]["status"] == "active":
                return
        except OSError:
            pass
        assert indexer.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < give_up, log.read_text(errors="replace")
        time.sleep(0.05)


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
    events, block_size = sys.argv[1:]
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(PORT), "--threads", "1"]
    command += ["--block-size", block_size, "--model-name", "m", "--workers", f"1={events}"]
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as indexer:
            try:
                _wait_until_it_listens(indexer, log)
                for line in sys.stdin:
                    print(json.dumps(_asked("/query", {"token_ids": json.loads(line), "model_name": "m"})), flush=True)
            finally:
                indexer.terminate()


if __name__ == "__main__":
    main()
