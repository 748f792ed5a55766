"""Mooncake's TransferEngine as a carrier: what it says when it cannot, and how it ends. test_carrier.py moves bytes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import types
from collections.abc import Sequence

import pytest
import structlog

from tests.support.waits import until
from transferd.config.sections import PdSection
from transferd.errors import ConfigError, PeerLost, TransferError
from transferd.storage.mooncake.client import STALL_LIMITS, STALL_S
from transferd.storage.peer import transfer_engine
from transferd.storage.peer.carrier import PeerWrite
from transferd.storage.peer.transfer_engine import TransferEngineCarrier
from transferd.tiers.pinned import HostRegion


class Engine:
    """The calls of Mooncake's engine that the carrier makes, with these answers; they keep what they were given."""

    start = register = write = 0
    go: threading.Event | None = None

    def __init__(self) -> None:
        self.began: tuple[object, ...] = ()
        self.registered: dict[int, int] = {}
        self.writes: list[tuple[object, ...]] = []
        Engine.made = self

    made: Engine

    def initialize(self, *arguments: object) -> int:
        self.began = arguments
        return self.start

    def get_rpc_port(self) -> int:
        return 4711

    def register_memory(self, address: int, nbytes: int) -> int:
        if not self.register:
            self.registered[address] = nbytes
        return self.register

    def unregister_memory(self, address: int) -> int:
        del self.registered[address]
        return 0

    def batch_transfer_sync_write(self, peer: str, *moves: Sequence[int]) -> int:
        self.writes.append((peer, *moves))
        if self.go is not None:
            self.go.wait(20)
        return self.write


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """In the place of Mooncake's, whether that is installed or not."""

    class Made(Engine):
        """Of this test."""

    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = Made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    for name in (*STALL_LIMITS, "MC_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what `open` sets goes with the test
        monkeypatch.delenv(name)
    return Made


def carrier(listen: str = "10.1.2.3:7000", native_log: str = "warning") -> TransferEngineCarrier:
    return TransferEngineCarrier(PdSection(listen=listen, protocol="rdma", rdma_devices="mlx5_0"), native_log)


async def test_the_engine_gets_the_host_and_the_devices_and_names_the_port_that_it_chose(engine: type[Engine]) -> None:
    made = carrier("[fd00::1]:7000")
    await made.open()
    assert Engine.made.began == ("fd00::1", "P2PHANDSHAKE", "rdma", "mlx5_0")
    assert made.address == "fd00::1:4711"
    assert {os.environ[name] for name in STALL_LIMITS} == {str(STALL_S)}
    await made.close()


async def test_nothing_can_be_done_with_an_engine_that_is_not_open(engine: type[Engine]) -> None:
    made, memory = carrier(), HostRegion(4096)
    for closed in (False, True):
        if closed:
            await made.open()
            made.register(memory)
            await made.close()
            await made.close()
        with pytest.raises(TransferError, match="not open"):
            print(made.address)
        with pytest.raises(TransferError, match="not open"):
            made.register(memory)
        with pytest.raises(TransferError, match="not open"):
            await made.write("peer:1", [PeerWrite(memory.address, memory.address, 1)])
        made.unregister(memory)


async def test_an_engine_that_does_not_load_or_start_names_the_key(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start = -5
    with pytest.raises(ConfigError, match=r"^pd\.protocol: .*does not start \(code -5\)"):
        await carrier().open()
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match=r"^pd\.mode: direct needs Mooncake, which fails to load"):
        await carrier().open()


async def test_memory_that_was_refused_is_not_taken_back(engine: type[Engine]) -> None:
    made, memory, other = carrier(), HostRegion(4096), HostRegion(8192)
    await made.open()
    made.register(memory)
    engine.register = -7
    with pytest.raises(TransferError, match=rf"did not register {other.nbytes} bytes of staging \(code -7\)"):
        made.register(other)
    assert Engine.made.registered == {memory.address: memory.nbytes}
    made.unregister(other)
    made.unregister(memory)
    made.unregister(memory)
    assert Engine.made.registered == {}
    await made.close()


async def test_a_write_is_one_call_with_all_ranges_and_a_code_is_a_lost_peer(engine: type[Engine]) -> None:
    made = carrier()
    await made.open()
    await made.write("there:1", [PeerWrite(10, 20, 3), PeerWrite(40, 50, 6)])
    assert Engine.made.writes == [("there:1", [10, 40], [20, 50], [3, 6])]
    engine.write = -1
    with pytest.raises(PeerLost, match=r"could not write to there:1 \(code -1\)"):
        await made.write("there:1", [PeerWrite(10, 20, 3)])
    await made.close()


async def test_a_close_waits_for_a_write_but_not_for_ever(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_engine, "CLOSE_TIMEOUT_S", 0.01)
    engine.go = threading.Event()
    made = carrier()
    await made.open()
    writing = asyncio.ensure_future(made.write("there:1", [PeerWrite(10, 20, 3)]))
    await until(lambda: Engine.made.writes, "the write has begun")
    with structlog.testing.capture_logs() as logs:
        await made.close()
    assert [(line["log_level"], line["calls"]) for line in logs] == [("warning", 1)]
    engine.go.set()
    await writing
