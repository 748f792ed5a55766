"""Client and server over breaking connections, in virtual time: sessions, loss, re-asking, and no false alarm."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.memory_core import MemoryCore, serve
from tests.support.named_peers import NamedPeers
from tests.support.simulation.clock import SimClock
from tests.support.simulation.faults import Latency, NetworkFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.network import SimNetwork
from transferd.client.client import Client
from transferd.daemon.lookup import KEY_BYTES
from transferd.daemon.server import MAX_WAITING_PER_CLIENT, Server
from transferd.errors import Closed, ConnectTimeout, DaemonLost, InvariantError, RequestError, TierError, TransferError
from transferd.runtime.compat import wait_for
from transferd.tasks import Status, SwapOutTask, TaskResult
from transferd.wire import protocol as wire

SENT = 1e-6  # seconds after which everything that was ready has run, and nothing has arrived


class World:
    """One network, one daemon at a time, and a client."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.clock = SimClock(loop)
        self.network = SimNetwork(faults=NetworkFaults(Latency(0.0001, 0.001)), rng=loop.stream("network"))
        self.client = self.new_client("engine")
        self.server: Server
        self.core: MemoryCore

    def new_client(self, name: str, **options: Any) -> Client:
        return Client("sim://daemon", clock=self.clock, transport=self.network.client(name), name=name, **options)

    async def serve(self, boot_id: str = "boot-1", **options: Any) -> None:
        self.core = MemoryCore(boot_id, **options)
        self.server = serve(self.network.server(), self.core, clock=self.clock, max_message=4096)
        await self.server.start()

    async def die(self) -> None:
        """As kill -9: no word to anybody, and what it had read is gone with it."""
        await self.server.close()


def run(program: Callable[[World], Coroutine[Any, Any, None]], seeds: range = range(5), **options: Any) -> None:
    async def main(loop: SimLoop) -> None:
        world = World(loop)
        await world.serve(**options)
        await world.client.connect()
        await program(world)
        await world.client.close()
        await world.server.close()

    for seed in seeds:
        simulate(main, seed)


def task(task_id: str = "t", **more: Any) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2], **more)


def code(result: TaskResult) -> str:
    assert result.error is not None
    return result.error.code


# --- answers --------------------------------------------------------------------------------------


def test_a_push_returns_when_the_task_is_admitted_and_its_future_ends_with_the_result() -> None:
    async def program(world: World) -> None:
        future = await world.client.push(task())
        assert world.core.held == ["t"]
        assert not future.done()
        world.core.finish("t")
        assert (await future).status is Status.OK

    run(program, hold=True)


def test_a_push_that_is_answered_at_once_is_done_when_it_returns() -> None:
    async def program(world: World) -> None:
        world.core.busy = True
        future = await world.client.push(task())
        assert future.done()
        assert (future.result().status, future.result().retry_after) == (Status.BUSY, 0.5)

    run(program)


def test_a_cancel_behind_a_push_that_the_daemon_refuses_as_busy_ends_the_insisting() -> None:
    async def program(world: World) -> None:
        world.core.busy = True
        insisting = asyncio.ensure_future(world.client.insist(task()))
        await asyncio.sleep(SENT)
        assert await world.client.cancel("t")
        world.core.busy = False
        assert (await insisting).status is Status.CANCELLED
        assert not world.core.ran

    run(program)


def test_a_push_of_a_known_task_joins_it_or_gets_its_result_again() -> None:
    async def program(world: World) -> None:
        first = await world.client.push(task())
        second = await world.client.push(task())
        world.core.finish("t")
        third = await world.client.submit(task())
        assert await first == await second == third
        assert world.core.ran == {"t": 1}

    run(program, hold=True)


def test_control_requests_bring_values_and_typed_errors() -> None:
    async def program(world: World) -> None:
        client, core = world.client, world.core
        assert await client.match(["a", "b", "missing", "c"]) == 2
        await client.set_generation("RL-4")
        assert (core.generation, client.generation) == ("RL-4", "RL-4")
        with pytest.raises(RequestError, match="printable") as refused:
            await client.set_generation("\n")
        assert refused.value.reason == "bad_value"
        with pytest.raises(TierError, match="rank 1") as unshared:
            await client.attach(1)
        assert unshared.value.reason == "tier_error"
        assert (await client.stats())["boot_id"] == client.boot_id == "boot-1"
        boot_id, seconds = await client.ping()
        assert boot_id == "boot-1"
        assert 0.0002 <= seconds <= 0.002
        assert await client.cancel("unknown") is False

    run(program)


def test_a_bug_behind_a_request_is_answered_as_internal_and_the_server_lives() -> None:
    async def program(world: World) -> None:
        with pytest.raises(TransferError, match="ZeroDivisionError") as caught:
            await world.client.drain()
        assert caught.value.reason == InvariantError.code
        world.core.report = {"what": object()}
        with pytest.raises(TransferError, match="cannot encode the answer") as caught:
            await world.client.stats()
        assert caught.value.reason == InvariantError.code
        assert (await world.client.submit(task())).status is Status.OK

    run(program)


def test_a_cancelled_call_takes_its_task_back_and_leaves_the_client_whole() -> None:
    async def program(world: World) -> None:
        waiting = asyncio.ensure_future(world.client.submit(task()))
        pushing = asyncio.ensure_future(world.client.push(task("p")))
        asking = asyncio.ensure_future(world.client.pause())
        await asyncio.sleep(SENT)
        for future in (waiting, pushing, asking):
            future.cancel()
        await asyncio.sleep(0.1)
        assert sorted(world.core.cancelled) == ["p", "t"]
        assert all(future.cancelled() for future in (waiting, pushing, asking))
        world.core.resume("operator")
        await asyncio.sleep(0.1)
        assert await world.client.match(["a"]) == 1

    run(program, hold=True)


def test_a_task_that_the_wire_cannot_carry_is_rejected_by_the_client() -> None:
    async def program(world: World) -> None:
        messages = world.server.statistics().messages
        big = await world.client.submit(task("b" * 5000))
        assert (big.status, code(big)) == (Status.REJECTED, "too_large")
        surrogate = await world.client.submit(task("\ud800"))
        assert (surrogate.status, code(surrogate)) == (Status.REJECTED, "bad_value")
        alien = await world.client.push(task(swap_node_ids=(object(),)))
        assert code(alien.result()) == "bad_value"
        with pytest.raises(RequestError, match="5058 bytes, for 4096 at most"):
            await world.client.match(["k" * 5000])
        assert world.server.statistics().messages == messages
        wrong = await world.client.submit(task(swap_node_ids=(1.5,)))
        assert (wrong.status, code(wrong)) == (Status.REJECTED, "bad_value")
        assert wrong.error is not None
        assert "swap_node_ids" in wrong.error.message
        assert world.server.statistics().rejects == {"bad_value": 1}

    run(program)


# --- connecting -----------------------------------------------------------------------------------


def test_connecting_fails_in_time_and_says_whether_anybody_answered() -> None:
    async def main(loop: SimLoop) -> None:
        world = World(loop)
        with pytest.raises(ConnectTimeout, match=r"no daemon answered within 10 s"):
            await world.client.connect()
        await world.serve()
        world.core.ready = False
        late = world.new_client("late", connect_timeout=3.0)
        began = loop.time()
        with pytest.raises(ConnectTimeout, match="did not become ready within 3 s"):
            await late.connect()
        assert loop.time() - began == pytest.approx(3.0)
        assert not late.connected
        await world.server.close()

    simulate(main, 1)


def test_a_client_that_came_first_is_served_as_soon_as_the_daemon_is_ready() -> None:
    async def main(loop: SimLoop) -> None:
        world = World(loop)
        connecting = asyncio.ensure_future(world.client.connect())
        await asyncio.sleep(2)
        await world.serve()
        world.core.ready = False
        await asyncio.sleep(2)
        world.core.ready = True
        became_ready = loop.time()
        await connecting
        assert loop.time() - became_ready < 0.2
        await world.client.close()
        await world.server.close()

    simulate(main, 1)


def test_after_close_everything_pending_has_ended_and_nothing_can_be_asked() -> None:
    async def program(world: World) -> None:
        future = await world.client.push(task())
        asking = asyncio.ensure_future(world.client.pause())
        await asyncio.sleep(0.1)
        await world.client.close()
        assert (future.result().status, code(future.result())) == (Status.FAILED, "closed")
        with pytest.raises(Closed):
            await asking
        with pytest.raises(Closed):
            await world.client.submit(task())
        await world.client.close()
        await asyncio.sleep(0.1)
        assert world.core.cancelled == ["t"], "the daemon takes back what nobody waits for"

    run(program, hold=True)


# --- loss -----------------------------------------------------------------------------------------


def test_pending_requests_of_a_dead_daemon_end_within_5_seconds() -> None:
    async def program(world: World) -> None:
        future = await world.client.push(task(timeout=3600.0))
        asking = asyncio.ensure_future(world.client.pause())
        await asyncio.sleep(world.loop.stream("death").uniform(0, 3))
        died = world.loop.time()
        await world.die()
        late = asyncio.ensure_future(world.client.submit(task("late")))
        result = await future
        assert world.loop.time() - died < 5
        assert (result.status, code(result), result.boot_id) == (Status.FAILED, "daemon_lost", "boot-1")
        assert code(await late) == "daemon_lost"
        assert world.loop.time() - died < 5
        # A daemon that shuts down says so to those who wait for it; a dead one does not, and either may come.
        with pytest.raises(TransferError) as caught:
            await asking
        assert caught.value.reason in ("daemon_lost", "shutdown")
        assert not world.client.connected
        began = world.loop.time()
        assert code(await world.client.submit(task("hopeless"))) == "daemon_lost"
        with pytest.raises(DaemonLost):
            await world.client.match(["a"])
        assert world.loop.time() == began, "a daemon known to be away is not waited for"

    run(program, hold=True, seeds=range(30))


def test_the_death_of_a_daemon_soon_after_its_predecessors_is_noticed_within_5_seconds() -> None:
    async def program(world: World) -> None:
        chance = world.loop.stream("death")
        pending = await world.client.push(task("first"))
        await world.die()
        await pending
        await asyncio.sleep(chance.uniform(0, 4))
        await world.serve("boot-2", hold=True)
        await world.client.wait_ready(10)
        pending = await world.client.push(task("second", timeout=3600.0))
        await asyncio.sleep(chance.uniform(0, 1))
        died = world.loop.time()
        await world.die()
        assert code(await pending) == "daemon_lost"
        assert world.loop.time() - died < 5

    run(program, hold=True, seeds=range(30))


def test_a_daemon_counts_as_silent_only_on_the_second_look() -> None:
    async def program(world: World) -> None:
        future = await world.client.push(task())
        await asyncio.sleep(0.5)  # no Hello is under way
        world.network.faults = NetworkFaults(Latency(1.77, 1.78))  # an answer 3.54 s to 3.56 s after its Hello
        await asyncio.sleep(10)
        assert not future.done()
        assert world.client.connected
        world.core.finish("t")
        assert (await future).status is Status.OK

    run(program, hold=True)


def test_a_successor_ends_what_was_pending_at_once_and_never_does_it() -> None:
    async def program(world: World) -> None:
        before = await world.client.push(task("before"))
        await asyncio.sleep(0.1)
        await world.die()
        between = [asyncio.ensure_future(world.client.submit(task(f"between-{i}"))) for i in range(20)]
        await asyncio.sleep(0.2)
        await world.serve("boot-2")
        assert code(await before) == "daemon_lost"
        results = await asyncio.gather(*between)
        assert {code(result) for result in results} == {"daemon_lost"}
        assert world.client.boot_id == "boot-2"
        assert not world.core.ran, "a task that was reported lost must not be done by another daemon"
        assert world.server.statistics().rejects == {"stale_session": 20}
        assert (await world.client.submit(task("after"))).status is Status.OK

    run(program, hold=True)


def test_a_client_finds_a_daemon_that_comes_back_after_a_long_time() -> None:
    async def program(world: World) -> None:
        await world.die()
        await asyncio.sleep(3600)
        await world.serve("boot-2")
        began = world.loop.time()
        await world.client.wait_ready(10)
        assert world.loop.time() - began < 1
        assert (await world.client.submit(task())).boot_id == "boot-2"

    run(program, seeds=range(1))


def test_a_daemon_that_was_only_cut_off_takes_the_abandoned_tasks_back() -> None:
    async def program(world: World) -> None:
        future = await world.client.push(task())
        world.network.cut("engine")
        assert code(await future) == "daemon_lost"
        await asyncio.sleep(10)
        assert world.core.cancelled == ["t"]
        world.network.mend("engine")
        await world.client.wait_ready(10)
        assert (await world.client.submit(task("u"))).status is Status.OK

    async def with_answers(world: World) -> None:
        world.core.hold = True
        waiting = asyncio.ensure_future(program(world))
        while not waiting.done():
            await asyncio.sleep(1)
            if world.core.held == ["u"]:
                world.core.finish("u")
        await waiting

    run(with_answers)


# --- sessions -------------------------------------------------------------------------------------


def test_requests_lost_with_a_connection_are_repeated_and_run_once() -> None:
    async def program(world: World) -> None:
        network = world.network
        network.faults = NetworkFaults(Latency(0.01, 0.1), lose=0.5)
        submits = [asyncio.ensure_future(world.client.submit(task(f"t{i}"))) for i in range(50)]
        matches = [asyncio.ensure_future(world.client.match(["a"])) for _ in range(10)]
        for _ in range(3):
            await asyncio.sleep(0.07)
            network.cut("engine")
            await asyncio.sleep(0.3)
            network.mend("engine")
            await asyncio.sleep(0.2)
        results = await asyncio.gather(*submits)
        assert {result.status for result in results} == {Status.OK}
        assert set(world.core.ran.values()) == {1}
        assert await asyncio.gather(*matches) == [1] * 10
        assert network.lost > 0

    run(program, seeds=range(20))


def test_a_request_before_the_first_welcome_waits_for_its_session() -> None:
    async def program(world: World) -> None:
        client = world.new_client("early")
        connecting = asyncio.ensure_future(client.connect())
        await asyncio.sleep(SENT)
        early = asyncio.ensure_future(client.submit(task()))
        await asyncio.sleep(SENT)
        world.network.faults = NetworkFaults(Latency(0.0001, 0.001), lose=1.0)
        world.network.cut("early")
        assert world.network.lost == 1, "the greeting; the task has no session yet"
        await asyncio.sleep(1)
        world.network.mend("early")
        await connecting
        result = await wait_for(early, 1)
        assert result.status is Status.OK
        assert world.core.ran == {"t": 1}
        await client.close()

    run(program)


def test_an_echo_from_an_earlier_connection_is_refused() -> None:
    async def program(world: World) -> None:
        world.network.faults = NetworkFaults(Latency(0.001, 0.002), duplicate=1.0)
        world.core.busy = True
        refused = await world.client.submit(task("busy"))
        assert refused.status is Status.BUSY
        world.core.busy = False
        world.network.cut("engine")
        await asyncio.sleep(0.5)
        world.network.mend("engine")
        await asyncio.sleep(2)
        assert world.network.duplicated > 0
        assert not world.core.ran, "its pusher was told that it does not run, and uses the blocks for something else"

    run(program)


def test_an_answer_that_could_not_be_handed_over_is_asked_for_again() -> None:
    async def program(world: World) -> None:
        future = await world.client.push(task())
        world.network.cut("engine")
        world.core.finish("t")
        assert world.server.statistics().undeliverable == 1
        await asyncio.sleep(1)
        world.network.mend("engine")
        assert (await future).status is Status.OK
        assert world.core.ran == {"t": 1}

    run(program, hold=True)


def test_a_bye_is_handled_after_an_undeliverable_answer_began_a_session() -> None:
    """A heartbeat is answered after its client has gone: that begins a session which the Bye cannot know."""

    async def program(world: World) -> None:
        raw = Raw(world)
        welcome = (await raw.say(1, wire.Hello())).body
        assert isinstance(welcome, wire.Welcome)
        raw.transport.send(wire.encode_request(2, task(), session=welcome.session))
        raw.transport.send(wire.encode_request(3, wire.Hello(), session=welcome.session))
        raw.transport.send(wire.encode_request(4, wire.Bye(), session=welcome.session))
        transport = world.server._transport
        assert isinstance(transport, NamedPeers)
        send = transport.send
        transport.send = lambda peer, payload: False  # type: ignore[method-assign] # noqa: ARG005
        await asyncio.sleep(0.1)
        transport.send = send  # type: ignore[method-assign]
        assert world.server.statistics().undeliverable > 0
        assert world.server.statistics().clients == 1, "the other one"
        assert world.server.statistics().rejects == {}
        echo = (await raw.say(5, wire.Bye(), session=welcome.session)).body
        assert isinstance(echo, wire.Refused), "of an earlier connection, or as good as"
        raw.transport.close()

    run(program, hold=True)


class Raw:
    """A peer that speaks for itself."""

    def __init__(self, world: World, name: str = "raw") -> None:
        self.replies: list[wire.ReplyEnvelope] = []
        self.transport = world.network.client(name)
        self.transport.start(lambda payload: self.replies.append(wire.decode_reply(payload)))

    @property
    def peer(self) -> bytes:
        """The daemon's name for it."""
        assert self.transport.connection is not None
        return self.transport.connection.peer

    async def say(self, seq: int, body: wire.Body, **options: Any) -> wire.ReplyEnvelope:
        self.transport.send(wire.encode_request(seq, body, **options))
        await asyncio.sleep(0.1)
        return self.replies[-1]


def test_a_client_behind_a_pipe_that_is_often_full_gets_every_result_in_time() -> None:
    """Each lost answer begins a session. If only requests of the newest one were run, the first few would take all."""

    async def program(world: World) -> None:
        to_client, turns = world.network.to_client, itertools.cycle([True, False])
        before = [await world.client.push(task(f"before-{i}")) for i in range(8)]  # in front at each repetition
        world.network.to_client = lambda *message: next(turns) and to_client(*message)  # type: ignore[method-assign]
        pushed = [asyncio.ensure_future(world.client.submit(task(f"t{i}"))) for i in range(8)]
        await asyncio.sleep(0.1)
        for i in range(8):
            world.core.finish(f"t{i}")
        results = await wait_for(asyncio.gather(*pushed), 10)
        assert {result.status for result in results} == {Status.OK}
        for i in range(8):
            world.core.finish(f"before-{i}")
        results = await wait_for(asyncio.gather(*before), 10)
        assert {result.status for result in results} == {Status.OK}
        assert set(world.core.ran.values()) == {1}

    run(program, hold=True)


async def behind(world: World) -> tuple[Raw, wire.Welcome]:
    """A client and the session that it knows: a newer one has begun, because an answer to it was lost."""
    raw = Raw(world)
    before = (await raw.say(1, wire.Hello())).body
    assert isinstance(before, wire.Welcome)
    world.network.faults = NetworkFaults(Latency(0.0001, 0.001), refuse=1.0)
    world.network.to_server(raw.peer, wire.encode_request(2, wire.Hello()))
    world.network.faults = NetworkFaults(Latency(0.0001, 0.001))
    del raw.replies[:]
    return raw, before


def test_a_request_of_an_earlier_session_is_run_and_the_client_gets_the_new_session() -> None:
    async def program(world: World) -> None:
        raw, before = await behind(world)
        await raw.say(3, task(), session=before.session)
        nudge, result = raw.replies
        assert isinstance(nudge.body, wire.Refused)
        assert (nudge.seq, nudge.body.error.code) == (0, "stale_session")
        assert isinstance(result.body, wire.Result)
        assert result.body.result.status is Status.OK
        now = (await raw.say(4, wire.Hello())).body
        assert isinstance(now, wire.Welcome)
        assert now.session > before.session
        reply = await raw.say(5, task("future"), session=now.session + 1)
        assert isinstance(reply.body, wire.Refused)
        assert world.core.ran == {"t": 1}
        assert world.server.statistics().rejects == {"stale_session": 1}
        raw.transport.close()

    run(program)


def test_a_refusal_in_an_earlier_session_is_not_sent_because_the_request_is_repeated() -> None:
    """Heard by a client whose repetition was on its way, it would be a promise that the task never runs."""

    async def program(world: World) -> None:
        raw, before = await behind(world)
        world.core.busy = True
        raw.transport.send(wire.encode_request(3, task(), session=before.session))
        raw.transport.send(wire.encode_request(4, wire.SetGeneration("\n"), session=before.session))
        world.core.cache.refuse = TierError("refused later, not at once")
        raw.transport.send(wire.encode_request(6, wire.ClearCache(), session=before.session))
        raw.transport.send(wire.encode_request(7, wire.Drain(), session=before.session))  # has a bug
        await asyncio.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.core, "submit", None)  # a bug
            raw.transport.send(wire.encode_request(8, task("u"), session=before.session))
            await asyncio.sleep(0.1)
        assert world.core.cache.asked == [("clear", b"", None)]
        assert [(reply.seq, type(reply.body)) for reply in raw.replies] == [(0, wire.Refused)]
        now = (await raw.say(5, wire.Hello())).body
        assert isinstance(now, wire.Welcome)
        refused = (await raw.say(4, wire.SetGeneration("\n"), session=now.session)).body
        assert isinstance(refused, wire.Refused)
        busy = (await raw.say(3, task(), session=now.session)).body
        assert isinstance(busy, wire.Result)
        assert (busy.result.status, dict(world.core.ran)) == (Status.BUSY, {})
        raw.transport.close()

    run(program)


def test_a_session_is_begun_by_the_first_message_and_others_are_refused() -> None:
    async def program(world: World) -> None:
        raw = Raw(world)
        reply = await raw.say(1, task(), session=12345)
        assert isinstance(reply.body, wire.Refused)
        assert (reply.seq, reply.body.error.code) == (1, "stale_session")
        assert not world.core.ran
        welcome = (await raw.say(2, wire.Hello())).body
        assert isinstance(welcome, wire.Welcome)
        assert isinstance((await raw.say(3, task(), session=welcome.session)).body, wire.Result)
        assert isinstance((await raw.say(4, task("u"))).body, wire.Result), "session 0 stands for any"
        await raw.say(5, wire.Bye())
        again = (await raw.say(6, wire.Hello())).body
        assert isinstance(again, wire.Welcome)
        assert again.session != welcome.session
        raw.transport.close()

    run(program)


def test_a_task_that_cannot_be_read_is_rejected_by_name_and_other_bytes_are_refused() -> None:
    async def program(world: World) -> None:
        raw = Raw(world)
        good = wire.encode_request(7, task("name me"))
        for bad in (good.replace(b"swap_out", b"teleport"), good.replace(b"\x91\x01", b"\x91\xc3"), good + b"x" * 4096):
            raw.transport.send(bad)
        for bad in (b"", b"\x02", b"\x01\xc1", good[:-1]):
            raw.transport.send(bad)
        await asyncio.sleep(0.1)
        results = [reply.body.result for reply in raw.replies if isinstance(reply.body, wire.Result)]
        assert [(r.task_id, r.status, code(r)) for r in results] == [
            ("name me", Status.REJECTED, "unknown_type"),
            ("name me", Status.REJECTED, "bad_value"),
            # past the limit, and with bytes behind the end: the name can no longer be trusted
        ]
        refused = [reply.body.error.code for reply in raw.replies if isinstance(reply.body, wire.Refused)]
        assert refused == ["too_large", "malformed", "unsupported_version", "malformed", "malformed"]
        rejects = world.server.statistics().rejects
        assert rejects == {"unknown_type": 1, "bad_value": 1, "too_large": 1, "unsupported_version": 1, "malformed": 3}
        raw.transport.close()

    run(program)


# --- who is there ---------------------------------------------------------------------------------


def test_a_client_that_falls_silent_has_gone_and_its_tasks_and_requests_with_it() -> None:
    async def program(world: World) -> None:
        raw = Raw(world)
        await raw.say(1, task(), ack=True)
        await raw.say(2, wire.Pause())
        assert world.server.statistics().waiting == 1
        await asyncio.sleep(4.5)
        assert world.core.held == ["t"]
        await asyncio.sleep(4.5)
        assert world.core.gone == [b"raw/2"]
        assert world.core.cancelled == ["t"]
        assert world.server.statistics().waiting == 0
        assert world.server.statistics().clients == 1, "the one that says Hello is still there"
        raw.transport.close()

    run(program, hold=True)


def test_a_server_without_clients_sets_no_timer() -> None:
    async def program(world: World) -> None:
        await world.client.close()
        await asyncio.sleep(10)
        assert world.server.statistics().clients == 0
        assert not world.server._liveness._timer

    run(program)


def test_a_request_whose_client_leaves_in_the_same_moment_leaves_nothing_behind() -> None:
    async def program(world: World) -> None:
        peer = b"brief"
        world.server._received(peer, wire.encode_request(1, wire.Match(["a"])))
        world.server._received(peer, wire.encode_request(2, wire.Bye()))
        await asyncio.sleep(1)
        assert world.server.statistics().waiting == 0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(program)
        gc.collect()


def test_one_client_cannot_take_all_places_for_waiting_requests() -> None:
    async def program(world: World) -> None:
        waiting = [asyncio.ensure_future(world.client.pause()) for _ in range(MAX_WAITING_PER_CLIENT)]
        await asyncio.sleep(0.1)
        with pytest.raises(TransferError) as caught:
            await world.client.pause()
        assert caught.value.reason == "too_many_requests"
        other = world.new_client("other")
        await other.connect()
        assert await other.match(["a"]) == 1
        await other.resume()
        await asyncio.gather(*waiting)
        await other.close()

    run(program, seeds=range(1))


def test_requests_that_wait_are_bounded_in_bytes_and_one_alone_is_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    one = len("aa") + KEY_BYTES
    monkeypatch.setattr("transferd.daemon.server.MAX_WAITING_BYTES", 2 * one)
    monkeypatch.setattr("transferd.daemon.server.FEW_BYTES", 0)

    async def program(world: World) -> None:
        server, peer = world.server, b"brief"

        def ask(seq: int, *keys: str) -> None:
            server._received(peer, wire.encode_request(seq, wire.Match(list(keys))))

        for seq, waiting in ((1, 1), (2, 2), (3, 2)):  # no turn of the loop between them
            ask(seq, "aa")
            assert server.statistics().waiting == waiting
        assert server.statistics().waiting_bytes == 2 * one
        await asyncio.sleep(1)
        assert server.statistics().waiting_bytes == 0
        ask(4, "aa", "aa", "aa")
        assert server.statistics().waiting_bytes == 3 * one
        await asyncio.sleep(1)
        assert server.statistics().waiting_bytes == 0

    run(program, seeds=range(1))


def test_a_daemon_that_lives_and_never_answers_a_task_is_not_waited_for_without_end() -> None:
    async def program(world: World) -> None:
        began = world.loop.time()
        result = await world.client.submit(task(timeout=10.0))
        assert code(result) == "no_answer"
        assert 40 <= world.loop.time() - began <= 46
        await asyncio.sleep(0.1)
        assert world.core.cancelled == ["t"], "and the daemon is told to leave the blocks alone"

    run(program, hold=True, seeds=range(1))


def test_messages_that_the_transport_refuses_wait_in_order_and_are_sent_later() -> None:
    async def program(world: World) -> None:
        transport = world.client._conversation._transport
        send = transport.send
        room = 3

        def narrow(payload: bytes) -> bool:
            nonlocal room
            room -= 1
            return room >= 0 and send(payload)

        transport.send = narrow  # type: ignore[method-assign]
        asked = []

        async def submit(task_id: str) -> TaskResult:
            asked.append(task_id)
            return await world.client.submit(task(task_id))

        submits = [asyncio.ensure_future(submit(f"t{i}")) for i in range(10)]
        await asyncio.sleep(SENT)
        assert room < 0
        room = 1000
        assert {result.status for result in await asyncio.gather(*submits)} == {Status.OK}
        assert list(world.core.ran) == asked

    run(program)
