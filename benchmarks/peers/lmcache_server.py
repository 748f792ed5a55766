"""LMCache's server in its own process, by the client of its own `bench server`: POSIX shared memory, no GPU.

A STORE ends when the blocks are in the server's memory. Its files are written later and are not part of the time.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from benchmarks.peers.program import Order, Peer, serve

LAYERS, HEADS, HEAD_DIM, TOKENS = 16, 4, 128, 64  # of a block: 2 MiB in float16, K and V
START_S = 90.0
L1_GIB = 2


class LmcacheServer(Peer):
    def prepare(self, order: Order) -> str:
        self._order = order
        port, self._http = _free_port(), _free_port()
        blocks = order.blocks + 1  # block 0 means "no data" to this server
        command = Path(sys.executable).with_name("lmcache")
        self._server = subprocess.Popen(
            [command, "server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1",
             "--http-port", str(self._http), "--chunk-size", str(TOKENS), "--l1-size-gb", str(L1_GIB),
             "--eviction-policy", "LRU"],
            stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._await_server()
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{port}", http_url=f"http://127.0.0.1:{self._http}", mode="cpu",
                transfer_mode="lmcache_driven", tp_size=1, use_mla=False, num_tokens=order.blocks * TOKENS,
                kvcache_shape_spec=f"(2,{blocks},{TOKENS},{HEADS},{HEAD_DIM}):float16:{LAYERS}",
                num_blocks=blocks, block_size=TOKENS,
            ),
            lambda _: None,
        )  # fmt: skip
        self._client.start()
        layers = self._client._workers[0].kv_caches.values()  # noqa: SLF001
        self.areas = [
            plane.reshape(blocks, -1).view(torch.uint8).numpy()[1:] for layer in layers for plane in _planes(layer)
        ]
        return f"LMCache {importlib.metadata.version('lmcache')}"

    def store(self, number: int) -> None:
        request = self._request(number, "store")
        if not self._client.store(request, 0, request.num_full_tokens).succeeded:
            raise OSError("the store failed")

    def before_load(self, number: int) -> None:
        found = self._client.lookup(self._request(number, "load"))  # this client looks for the answer every 50 ms
        if not found.is_full_hit:
            raise OSError(f"a lookup found {found.hit_chunks} of {found.total_chunks} blocks")

    def load(self, number: int) -> None:
        request = self._request(number, "load")
        if not self._client.retrieve(request, 0, request.num_full_tokens).succeeded:
            raise OSError("the load failed")

    def forget(self, number: int) -> None:
        url = f"http://127.0.0.1:{self._http}/cache/clear"
        for kind in ("store", "load"):
            self._client.end_session(self._request(number, kind))
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()

    def close(self) -> None:
        self.areas = []
        if hasattr(self, "_client"):
            self._client.close()
        if hasattr(self, "_server"):
            self._server.terminate()
            try:
                self._server.wait(20)
            except subprocess.TimeoutExpired:
                self._server.kill()

    def _request(self, number: int, kind: str) -> RequestContext:
        request = self._client.create_request(number, f"{kind}-{number}", kind)
        return dataclasses.replace(request, block_offset=1)

    def _await_server(self) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self._server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._http}/healthcheck", timeout=5).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise TimeoutError(f"the server did not start within {START_S:g} s (exit code {self._server.poll()})")


def _planes(layer: torch.Tensor) -> list[torch.Tensor]:
    """K and V of a layer, or both in one where the blocks come first."""
    return [layer[0], layer[1]] if layer.shape[0] == 2 else [layer]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve(LmcacheServer())
