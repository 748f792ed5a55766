"""What a client knows of the memory it shares with the daemon, after a restart and after a clear of the cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.client.test_session import Recorder, World
from tests.support.simulation.clock import SimClock
from tests.support.simulation.loop import SimLoop, simulate
from transferd.client.client import Client
from transferd.client.offers import Attachments, _KeptOffer
from transferd.client.weights import Repeating
from transferd.tasks import SwapOutTask
from transferd.wire import protocol as wire

HANDLE = {"kind": "shm", "data": {}}
SWAP = SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2])


class Shared:
    """A conversation to a daemon that is said by hand, and what is shared through it. heard: calls of on_new_boot."""

    def __init__(self, loop: SimLoop) -> None:
        self.world = World(loop)
        self.memory = Attachments(self.world.conversation)
        self.world.conversation.renewed = self.renew
        self.heard: list[tuple[str, int]] = []
        self.world.conversation.on_new_boot = self.hear

    def renew(self) -> None:
        for body in self.memory.again():
            self.world.ask(body)
        self.memory.renewed()

    def hear(self) -> None:
        now = self.world.conversation.session
        self.heard.append((now.boot_id, now.epoch))

    def welcome(self, **more: Any) -> None:
        self.world.conversation._greet()
        self.world.daemon.welcome(**more)

    def attach(self, rank: int, boot_id: str, epoch: int) -> None:
        self.memory.attach(rank, HANDLE | {"boot_id": boot_id, "epoch": epoch})

    @property
    def told(self) -> list[wire.Body]:
        return [request.body for request in self.world.daemon.others]


def run(program: Callable[[Shared], Awaitable[None]]) -> None:
    async def main(loop: SimLoop) -> None:
        shared = Shared(loop)
        shared.world.conversation.open()
        await program(shared)
        shared.world.conversation.close()

    simulate(main, 0)


def test_only_another_daemon_than_the_first_notifies_the_engine() -> None:
    async def program(shared: Shared) -> None:
        shared.welcome(boot_id="b1", epoch=1)
        shared.attach(0, "b1", 1)
        shared.attach(2, "b1", 1)
        assert (shared.heard, shared.memory.outdated) == ([], [])
        shared.welcome(boot_id="b2", session=1, epoch=1)
        assert shared.heard == [("b2", 1)]
        assert (shared.memory.outdated, shared.memory.attached) == ([0, 2], [0, 2])
        assert shared.memory.orphaned == [0, 2]
        assert not [body for body in shared.told if isinstance(body, wire.Attach)], "the memory of a dead daemon"
        shared.attach(0, "b2", 1)
        assert shared.memory.outdated == [2]
        shared.memory.detach(2)
        assert (shared.memory.outdated, shared.memory.attached) == ([], [0])

    run(program)


def test_another_epoch_notifies_the_engine_and_mapped_ranks_are_repeated() -> None:
    async def program(shared: Shared) -> None:
        shared.welcome(session=5, epoch=1)
        shared.attach(0, "b1", 1)
        shared.welcome(session=5, epoch=2)
        assert (shared.heard, shared.memory.outdated) == ([("b1", 2)], [0])
        assert shared.memory.orphaned == [], "the daemon knows"
        assert shared.told == [wire.Attach(0, 1)]

    run(program)


def test_mappings_count_in_the_next_session_of_the_same_daemon() -> None:
    async def program(shared: Shared) -> None:
        shared.welcome(session=5, epoch=1)
        shared.attach(1, "b1", 1)
        shared.welcome(session=6, epoch=1)
        assert shared.told == [wire.Attach(1, 1)]
        assert (shared.heard, shared.memory.outdated) == ([], [])

    run(program)


def test_a_handle_may_be_newer_than_the_last_welcome() -> None:
    async def program(shared: Shared) -> None:
        shared.welcome(epoch=1)
        shared.attach(0, "b1", 2)
        assert shared.memory.outdated == []
        shared.welcome(epoch=2)
        assert shared.memory.outdated == []
        shared.attach(0, "b0", 9)
        assert shared.memory.outdated == [0], "of a daemon that had gone before its answer was looked at"

    run(program)


def test_a_daemon_that_does_not_say_which_memory_it_is_means_the_present() -> None:
    async def program(shared: Shared) -> None:
        shared.welcome()
        shared.memory.attach(0, HANDLE)
        assert shared.memory.outdated == []
        shared.welcome(boot_id="b2")
        assert shared.memory.outdated == [0]

    run(program)


def test_our_own_clear_does_not_notify_but_outdates_the_memory() -> None:
    async def program(shared: Shared) -> None:
        shared.welcome(epoch=1)
        shared.attach(0, "b1", 1)
        shared.memory.changing = 1
        shared.welcome(epoch=2)
        shared.memory.changing = 0
        shared.memory.epoch_began(2)
        shared.welcome(epoch=2)
        assert (shared.heard, shared.memory.outdated) == ([], [0])

    run(program)


def test_without_a_listener_the_log_warns(caplog: pytest.LogCaptureFixture) -> None:
    async def program(shared: Shared) -> None:
        shared.world.conversation.on_new_boot = None
        shared.welcome()
        shared.attach(1, "b1", 0)
        shared.welcome(boot_id="b2")

    with caplog.at_level(logging.WARNING):
        run(program)
    [record] = [record for record in caplog.records if record.name == "transferd.client.offers"]
    assert "attach rank 1 again" in record.getMessage()


def test_a_listener_may_be_a_coroutine_function_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    async def program(shared: Shared) -> None:
        async def later() -> None:
            heard.append(shared.world.conversation.session.boot_id)
            raise RuntimeError("in the engine")

        def at_once() -> None:
            raise RuntimeError("at once")

        shared.world.conversation.on_new_boot = later
        shared.welcome()
        shared.welcome(boot_id="b2")
        await asyncio.sleep(0.01)
        shared.world.conversation.on_new_boot = at_once
        shared.welcome(boot_id="b3")
        assert shared.world.conversation.session.boot_id == "b3"

    run(program)
    assert heard == ["b2"]
    told = [record.getMessage() for record in caplog.records if record.name == "transferd.client.offers"]
    told = [line for line in told if "the daemon was restarted" not in line]
    assert told == ["on_new_boot failed: RuntimeError('in the engine')", "on_new_boot failed"]


def test_a_sessions_repeated_requests_replace_those_of_the_session_before() -> None:
    """Else each answer that is lost adds repetitions, whose answers are lost in turn."""

    async def main(loop: SimLoop) -> None:
        daemon = Recorder()
        client = Client("sim://daemon", transport=daemon, clock=SimClock(loop), await_ready=False)
        client._conversation.open()
        daemon.welcome(session=5, epoch=1)
        for rank in (0, 1):
            client._attached.attach(rank, HANDLE)
        client._offers._made[1] = _KeptOffer(1, "shm", {}, client.boot_id, 1)
        client._offers._repeating[1] = Repeating((client.boot_id, 5, 1))
        client._holds._held.add(wire.Pause("me"))
        pushed = client._pushed(SWAP, ack=False)
        for session in (6, 7, 8):
            daemon.said.clear()
            client._conversation._greet()
            daemon.welcome(session=session, epoch=1)
            kinds = [type(request.body).__name__ for request in daemon.others]
            assert kinds == ["Attach", "Attach", "Offer", "Pause", "SwapOutTask"], session
        daemon.said.clear()
        client._conversation._greet()
        daemon.welcome(session=8, epoch=2)
        kinds = [type(request.body).__name__ for request in daemon.others]
        assert kinds == ["Attach", "Attach", "Pause"], "an epoch ends the offers of others"
        assert len(client._conversation._pending.items()) == len(kinds) + 1
        assert not pushed.future.done()
        await client.close()

    simulate(main, 0)


def test_what_is_pushed_before_the_first_welcome_follows_the_mappings_of_an_earlier_life() -> None:
    """Else the daemon rejects a task on memory that this client has mapped (`not_attached`)."""

    async def main(loop: SimLoop) -> None:
        daemon = Recorder()
        client = Client("sim://daemon", transport=daemon, clock=SimClock(loop), await_ready=False)
        client._conversation.open()
        daemon.welcome(session=5, epoch=1)
        client._attached.attach(0, HANDLE)
        await client.close()
        client._conversation.open()
        daemon.said.clear()
        pushed = client._pushed(SWAP, ack=False)
        client._conversation._greet()
        daemon.welcome(session=6, epoch=1)
        assert [type(request.body).__name__ for request in daemon.others] == ["Attach", "SwapOutTask"]
        assert not pushed.future.done()
        await client.close()

    simulate(main, 0)
