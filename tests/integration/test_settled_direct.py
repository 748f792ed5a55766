"""A direct handover that is given up while a daemon is suspended: no byte of its blocks moves once it is settled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.caches import snapshot
from tests.integration.held_tasks import GATES, MINE, TARGET, World, task_of, world
from tests.integration.test_settled import stopping, suspended
from transferd import HandoverFailed
from transferd.cli.pool.master import master_executable
from transferd.client import client as client_module
from transferd.client import heartbeat

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]

TOKENS = list(range(4 * 8))
DIRECT = {"pd": {"mode": "direct", "staging": "64KiB"}}


@contextlib.asynccontextmanager
async def two(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[World, World]]:
    """Prefill and decode, both with gates."""
    places = directory / "prefill", directory / "decode"
    for place in places:
        place.mkdir()
    async with (
        world(places[0], monkeypatch, more=DIRECT) as prefill,
        world(places[1], monkeypatch, more=DIRECT) as decode,
    ):
        yield prefill, decode


def begun(prefill: World, decode: World) -> tuple[asyncio.Task[object], asyncio.Task[object]]:
    peer = prefill.client.pd_address
    sending = asyncio.ensure_future(prefill.client.write_all("r", TOKENS, MINE))
    return sending, asyncio.ensure_future(decode.client.read_all("r", TOKENS, TARGET, peer=peer))


@pytest.mark.parametrize("how", ["SIGSTOP", "freezer"])
@pytest.mark.parametrize("side", ["write_all", "read_all"])
async def test_a_handover_that_is_cancelled_while_its_daemon_is_suspended(
    side: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends and says that nothing is known; `settled` waits until it is, and then no byte moves."""
    monkeypatch.setattr(client_module, "CANCEL_SETTLE_S", 0.2)
    async with two(tmp_path, monkeypatch) as (prefill, decode):
        kind = side.removesuffix("_all")
        here = prefill if kind == "write" else decode
        await here.hold(GATES[kind])
        sending, receiving = begun(prefill, decode)
        mine, others = (sending, receiving) if kind == "write" else (receiving, sending)
        await here.arrived()
        with suspended(how, here.daemon.pid) as resume:
            here.keeper.release()
            mine.cancel()
            # The other daemon runs, so its client shall not be hasty.
            with mock.patch.object(heartbeat, "SLOW_S", 6.0), pytest.raises(asyncio.CancelledError):
                await mine
            (task_id,) = here.client.unsettled
            assert not await here.client.settled(task_id, timeout=0.2)
            waiting = asyncio.ensure_future(here.client.settled(task_id))
            resume()
            assert await waiting
            here.scribble(task_of(kind))
            with contextlib.suppress(HandoverFailed):
                await others
                if kind == "write":
                    assert snapshot(decode.caches, TARGET) == prefill.original, "what was there before the cancel"
            await here.nothing_was_touched("read")


@pytest.mark.parametrize("side", ["write_all", "read_all"])
async def test_a_handover_that_is_cancelled_while_the_other_daemon_is_suspended(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own daemon lives, so the blocks are free as soon as that one has cancelled, whatever the peer does."""
    async with two(tmp_path, monkeypatch) as (prefill, decode):
        kind = side.removesuffix("_all")
        here, there = (prefill, decode) if kind == "write" else (decode, prefill)
        await here.hold(GATES[kind])
        sending, receiving = begun(prefill, decode)
        mine, others = (sending, receiving) if kind == "write" else (receiving, sending)
        await here.arrived()
        with suspended("SIGSTOP", there.daemon.pid) as resume:
            mine.cancel()
            (task_id,) = [row["task_id"] for row in await here.client.tasks("running")]
            await stopping(here, task_id)
            assert not mine.done()
            here.keeper.release()
            with pytest.raises(asyncio.CancelledError):
                await mine
            assert here.client.unsettled == []
            here.scribble(task_of(kind))
            resume()
            with contextlib.suppress(HandoverFailed):
                await others
                if kind == "write":
                    assert snapshot(decode.caches, TARGET) == prefill.original
            await here.nothing_was_touched("read")
