"""The production carrier: Mooncake's TransferEngine, over TCP or RDMA.

Observed with 0.3.13 over TCP: calls release the interpreter lock. A write to a peer that was killed, or outside
its registered memory, fails within a millisecond. A write to a stopped peer fails after the transport's stall
limit; client.py of the Mooncake backend explains that limit, and we also set it here, before loading the library. The
port cannot be configured: the engine chooses one, and listens on all interfaces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import structlog

from transferd.config.sections import PdSection
from transferd.errors import ConfigError, PeerLost, TransferError
from transferd.storage.mooncake.client import LEVELS, STALL_LIMITS, STALL_S, silence
from transferd.storage.mooncake.native_calls import CallKind, NativeCalls
from transferd.storage.peer.carrier import PeerWrite
from transferd.tiers.base import HostMemory

log = structlog.get_logger(__name__)

CALL_WAIT_S = 10.0  # how long a write waits for a thread; each write ends within the stall limit
CLOSE_TIMEOUT_S = 5.0


class TransferEngineCarrier:
    """One engine for all ranks of this daemon. Owns it and its threads from `open` to `close`.

    native_log: the library's own lines on stderr, see `storage.mooncake.native_log`.
    """

    def __init__(self, section: PdSection, native_log: str) -> None:
        self._section = section
        self._native_log = native_log
        self._host = section.listen.rpartition(":")[0].strip("[]")
        self._engine: Any = None
        self._calls = NativeCalls(CALL_WAIT_S)
        self._registered: set[int] = set()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._opened().get_rpc_port()}"

    async def open(self) -> None:
        for name in STALL_LIMITS:
            os.environ.setdefault(name, str(STALL_S))
        os.environ.setdefault("MC_LOG_LEVEL", LEVELS[self._native_log])
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            what = f"direct needs Mooncake, which fails to load: {error}"
            raise ConfigError("pd.mode", what, "direct") from error
        engine = TransferEngine()
        code = engine.initialize(self._host, "P2PHANDSHAKE", self._section.protocol, self._section.rdma_devices)
        if code != 0:
            raise ConfigError("pd.protocol", f"Mooncake's TransferEngine does not start (code {code})", self._section)
        if self._native_log == "off":
            silence()
        self._engine = engine

    def register(self, memory: HostMemory) -> None:
        code = self._opened().register_memory(memory.address, memory.nbytes)
        if code != 0:
            raise TransferError(f"the TransferEngine did not register {memory.nbytes} bytes of staging (code {code})")
        self._registered.add(memory.address)

    def unregister(self, memory: HostMemory) -> None:
        if memory.address in self._registered and self._engine is not None:
            self._registered.discard(memory.address)
            self._engine.unregister_memory(memory.address)

    async def write(self, peer: str, writes: Sequence[PeerWrite]) -> None:
        engine = self._opened()
        sources, targets, lengths = ([move[i] for move in writes] for i in range(3))
        code = await self._calls.call(
            CallKind.STORE, lambda: engine.batch_transfer_sync_write(peer, sources, targets, lengths)
        )
        if code != 0:
            raise PeerLost(f"the TransferEngine could not write to {peer} (code {code})")

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            if not await self._calls.idle(CLOSE_TIMEOUT_S):
                log.warning("closing the TransferEngine while calls still run", calls=len(self._calls))
            self._calls.close(0.0)

    def _opened(self) -> Any:
        if self._engine is None:
            raise TransferError("the TransferEngine is not open")
        return self._engine
