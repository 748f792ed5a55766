"""One contract suite over every carrier: the fake that tests use, and Mooncake's TransferEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.simulation.carrier import Fabric
from transferd.cli.pool.master import master_executable
from transferd.config.sections import PdSection
from transferd.errors import PeerLost
from transferd.storage.peer.carrier import Carrier, PeerWrite
from transferd.storage.peer.transfer_engine import TransferEngineCarrier
from transferd.tiers.pinned import HostRegion

SIZE = 1024**2
Pair = tuple[Carrier, Carrier]


def memory_pair() -> Pair:
    fabric = Fabric()
    return fabric.carrier("here"), fabric.carrier("there")


def engine_pair() -> Pair:
    return TransferEngineCarrier(PdSection(), "off"), TransferEngineCarrier(PdSection(), "off")


needs_mooncake = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")


@pytest.fixture(params=[memory_pair, pytest.param(engine_pair, marks=needs_mooncake)], ids=["memory", "mooncake"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    make: Callable[[], Pair] = request.param
    here, there = make()
    await here.open()
    await there.open()
    yield here, there
    await here.close()
    await there.close()


@pytest.fixture
def source() -> HostRegion:
    region = HostRegion(SIZE)
    region.view[:] = bytes(range(256)) * (SIZE // 256)
    return region


async def test_every_range_arrives_and_nothing_around_it(pair: Pair, source: HostRegion) -> None:
    here, there = pair
    target = HostRegion(SIZE)
    here.register(source)
    there.register(target)
    moves = [
        PeerWrite(source.address + 10, target.address + 5000, 1),
        PeerWrite(source.address + 300, target.address + 7, 4099),
    ]
    await here.write(there.address, moves)
    expected = bytearray(SIZE)
    for move in moves:
        begin, end = move.target - target.address, move.source - source.address
        expected[begin : begin + move.nbytes] = source.view[end : end + move.nbytes]
    assert target.view == expected


async def test_memory_that_is_not_registered_is_refused(pair: Pair, source: HostRegion) -> None:
    here, there = pair
    inside, outside = HostRegion(SIZE), HostRegion(SIZE)
    here.register(source)
    there.register(inside)
    with pytest.raises(PeerLost):
        await here.write(there.address, [PeerWrite(source.address, outside.address, 4096)])
    with pytest.raises(PeerLost):
        await here.write(there.address, [PeerWrite(source.address, inside.address + SIZE - 10, 11)])
    assert not any(outside.view)


async def test_unregistered_memory_is_out_of_reach_again(pair: Pair, source: HostRegion) -> None:
    here, there = pair
    target = HostRegion(SIZE)
    here.register(source)
    there.register(target)
    await here.write(there.address, [PeerWrite(source.address + 1, target.address, 4096)])
    there.unregister(target)
    target.view[:4096] = bytes(4096)
    with pytest.raises(PeerLost):
        await here.write(there.address, [PeerWrite(source.address + 1, target.address, 4096)])
    assert not any(target.view)


async def test_a_write_to_an_address_without_a_peer_is_an_error(pair: Pair, source: HostRegion) -> None:
    here, _ = pair
    here.register(source)
    with pytest.raises(PeerLost):
        await here.write("127.0.0.1:1", [PeerWrite(source.address, source.address, 64)])


async def test_many_writes_at_once_all_arrive(pair: Pair, source: HostRegion) -> None:
    here, there = pair
    target = HostRegion(SIZE)
    here.register(source)
    there.register(target)
    piece = SIZE // 32
    writes = [[PeerWrite(source.address + i * piece, target.address + i * piece, piece)] for i in range(32)]
    await asyncio.gather(*(here.write(there.address, moves) for moves in writes))
    assert target.view == source.view
