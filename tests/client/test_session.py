"""The conversation over a transport that only records, in virtual time: when each request ends, and what is sent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.simulation.clock import SimClock
from tests.support.simulation.loop import SimLoop, simulate
from transferd.client import session
from transferd.client.heartbeat import Presence
from transferd.client.pending import Pending, PendingTask
from transferd.client.session import HINT_AFTER_S, NO_SESSION, RETRY_SEND_S, Conversation
from transferd.errors import Closed, ConfigError, ConnectTimeout, DaemonLost, RequestError, TierError, TransferError
from transferd.tasks import ErrorInfo, Status, SwapOutTask, TaskResult
from transferd.wire import protocol as wire


class Recorder:
    """A ClientTransport whose daemon is the test: `said` is what the client sent; `say` answers."""

    def __init__(self) -> None:
        self.said: list[wire.Request] = []
        self.takes = True
        self.closed = 0
        self.refuses: ConfigError | None = None
        self.why = ""
        self._hear: Callable[[bytes], None] | None = None

    def start(self, on_message: Callable[[bytes], None]) -> None:
        if self.refuses is not None:
            raise self.refuses
        assert self._hear is None
        self._hear = on_message

    def send(self, payload: bytes) -> bool:
        if self.takes:
            self.said.append(wire.decode_request(payload))
        return self.takes

    def close(self) -> None:
        self.closed += 1
        self._hear = None

    async def obstacle(self) -> str:
        return self.why

    def say(self, seq: int, body: wire.ReplyBody) -> None:
        assert self._hear is not None
        self._hear(wire.encode_reply(seq, body))

    def welcome(self, **more: Any) -> None:
        """Answer the newest Hello."""
        self.say(self.hellos[-1], welcome(**more))

    @property
    def hellos(self) -> list[int]:
        return [request.seq for request in self.said if isinstance(request.body, wire.Hello)]

    @property
    def others(self) -> list[wire.Request]:
        return [request for request in self.said if not isinstance(request.body, wire.Hello)]


def welcome(**more: Any) -> wire.Welcome:
    known: dict[str, Any] = {
        "boot_id": "b1",
        "ready": True,
        "version": "1",
        "generation": "g",
        "max_message": 4096,
        "session": 5,
    }
    return wire.Welcome(**(known | more))


class World:
    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.daemon = Recorder()
        self.conversation = Conversation("sim://daemon", self.daemon, SimClock(loop))
        self.renewed: list[tuple[str, int, int]] = []  # boot_id, session, epoch
        self.conversation.renewed = self.note_renewed

    def note_renewed(self) -> None:
        now = self.conversation.session
        self.renewed.append((now.boot_id, now.session, now.epoch))

    def ask(self, body: wire.Body | None = None, timeout: float = 1000.0) -> asyncio.Future[Any]:
        pending = Pending(body or wire.Stats(), self.conversation.new_future(), self.conversation.now + timeout)
        self.conversation.ask(pending)
        return pending.future

    def push(self, task_id: str = "t", **more: Any) -> PendingTask:
        task = SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2], **more)
        pending = PendingTask(task, self.conversation, self.conversation.now + 1000.0, ack=True)
        self.conversation.ask(pending)
        return pending


def run(program: Callable[[World], Coroutine[Any, Any, None]], *, opened: bool = True) -> None:
    async def main(loop: SimLoop) -> None:
        world = World(loop)
        if opened:
            world.conversation.open()
        await program(world)
        world.conversation.close()

    simulate(main, 0)


# --- lives ----------------------------------------------------------------------------------------


def test_opening_says_hello_and_opening_again_changes_nothing() -> None:
    async def program(world: World) -> None:
        assert world.conversation.open()
        assert world.daemon.hellos == [1]
        assert not world.conversation.open()
        assert world.daemon.hellos == [1]
        assert world.conversation.is_open
        assert not world.conversation.ready

    run(program, opened=False)


def test_an_endpoint_that_is_refused_leaves_the_link_closed() -> None:
    async def program(world: World) -> None:
        world.daemon.refuses = ConfigError("endpoint", "is none")
        with pytest.raises(ConfigError):
            world.conversation.open()
        assert not world.conversation.is_open
        world.daemon.refuses = None
        assert world.conversation.open()

    run(program, opened=False)


def test_closing_ends_everything_once_and_nothing_is_said_afterwards() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        asked, pushed = world.ask(), world.push()
        world.conversation._greet()
        world.daemon.welcome(ready=False)
        waiting = asyncio.ensure_future(world.conversation.wait(50.0, ready=True))
        await asyncio.sleep(0.01)
        world.conversation.close()
        world.conversation.close()
        for future in (asked, waiting):
            with pytest.raises(Closed, match="was closed"):
                await future
        result = await pushed.future
        assert (result.status, result.error.code) == (Status.FAILED, "closed")
        assert world.daemon.closed == 1
        assert isinstance(world.daemon.said[-1].body, wire.Bye)
        said = len(world.daemon.said)
        await asyncio.sleep(100)
        assert len(world.daemon.said) == said
        assert not world.conversation.is_open
        with pytest.raises(Closed, match="is closed"):
            world.ask()
        with pytest.raises(Closed, match="is closed"):
            await world.conversation.wait(1.0, ready=False)

    run(program)


def test_no_bye_goes_to_a_daemon_that_never_answered() -> None:
    async def program(world: World) -> None:
        world.conversation.close()
        assert not world.daemon.others

    run(program)


def test_a_second_life_knows_nothing_of_the_first() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome(epoch=3)
        assert world.conversation.ready
        world.conversation.close()
        assert not world.conversation.ready
        world.conversation.open()
        assert world.conversation.session is NO_SESSION
        with pytest.raises(ConnectTimeout, match="no daemon answered within 1 s"):
            await world.conversation.wait(1.0, ready=True)
        early = world.ask()
        assert not any(isinstance(r.body, wire.Stats) for r in world.daemon.said)
        world.daemon.welcome(boot_id="b2", session=1)
        assert not early.done(), "another daemon than in the first life, and nothing was lost"
        world.daemon.say(world.daemon.said[-1].seq, wire.Value(1))
        assert await early == 1
        assert [boot for boot, _, _ in world.renewed] == ["b1", "b2"]

    run(program)


# --- waiting for a daemon -------------------------------------------------------------------------


def test_waiting_for_an_answer_and_for_readiness_are_two_things() -> None:
    async def program(world: World) -> None:
        ready = asyncio.ensure_future(world.conversation.wait(50.0, ready=True))
        answer = asyncio.ensure_future(world.conversation.wait(50.0, ready=False))
        await asyncio.sleep(0.01)
        world.daemon.welcome(ready=False, why="it starts")
        await asyncio.sleep(0.01)
        assert (ready.done(), answer.done()) == (False, True)
        await world.conversation.wait(0.0, ready=False)
        world.daemon.welcome()
        await ready
        await world.conversation.wait(0.0, ready=True)

    run(program)


def test_a_timeout_names_what_was_missing() -> None:
    async def program(world: World) -> None:
        with pytest.raises(ConnectTimeout, match=r"^sim://daemon: no daemon answered within 0\.5 s"):
            await world.conversation.wait(0.5, ready=False)
        world.daemon.welcome(ready=False, why="no engine has offered memory", missing=[0, 3])
        with pytest.raises(ConnectTimeout, match=r"within 0\.5 s: no engine has offered memory; without .* rank 0, 3$"):
            await world.conversation.wait(0.5, ready=True)
        world.daemon.welcome(ready=False)
        with pytest.raises(ConnectTimeout, match=r"it gave no reason$"):
            await world.conversation.wait(0.5, ready=True)

    run(program)


def test_a_wait_logs_its_obstacle_soon_and_the_timeout_names_it(caplog: pytest.LogCaptureFixture) -> None:
    async def program(world: World) -> None:
        world.daemon.why = "there is no such socket"
        began = world.conversation.now
        waiting = asyncio.ensure_future(world.conversation.wait(5.0, ready=False))
        await asyncio.sleep(HINT_AFTER_S - 0.1)
        assert not caplog.records
        await asyncio.sleep(0.2)
        assert caplog.messages == [
            "sim://daemon: no daemon answered within 1 s: there is no such socket (still waiting)",
        ]
        assert caplog.records[0].levelname == "WARNING"
        with pytest.raises(ConnectTimeout, match=r"no daemon answered within 5 s: there is no such socket$"):
            await waiting
        assert world.conversation.now - began == pytest.approx(5.0)
        assert len(caplog.records) == 1
        assert not world.conversation._waiters

    run(program)


def test_a_short_wait_names_its_obstacle_only_in_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async def program(world: World) -> None:
        with pytest.raises(ConnectTimeout):
            await world.conversation.wait(0.5, ready=False)
        assert not caplog.records

    run(program)


def test_a_wait_without_limit_ends_when_the_daemon_comes() -> None:
    async def program(world: World) -> None:
        waiting = asyncio.ensure_future(world.conversation.wait(math.inf, ready=True))
        await asyncio.sleep(3600)
        assert not waiting.done()
        world.daemon.welcome()
        await waiting

    run(program)


def test_a_lost_daemon_is_waited_for_again() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        await asyncio.sleep(10)
        assert not world.conversation.ready
        waiting = asyncio.ensure_future(world.conversation.wait(50.0, ready=True))
        await asyncio.sleep(20)
        assert not waiting.done()
        world.daemon.welcome()
        await waiting
        assert world.conversation.ready
        hellos = len(world.daemon.hellos)
        await asyncio.sleep(0.01)
        assert len(world.daemon.hellos) == hellos + 1, "the beat of a lost daemon would come seconds later"

    run(program)


# --- requests -------------------------------------------------------------------------------------


def test_requests_before_the_first_welcome_wait_for_its_session() -> None:
    async def program(world: World) -> None:
        asked = [world.ask(wire.Cancel(str(i))) for i in range(3)]
        assert not world.daemon.others
        world.daemon.welcome(session=7)
        sent = world.daemon.others
        assert [(r.body.task_id, r.session) for r in sent] == [("0", 7), ("1", 7), ("2", 7)]  # type: ignore[union-attr]
        for request in sent:
            world.daemon.say(request.seq, wire.Value(True))
        assert await asyncio.gather(*asked) == [True] * 3
        assert not world.conversation._pending.items()

    run(program)


@pytest.mark.parametrize(
    ("code", "permanent", "kind"),
    [("bad_value", True, RequestError), ("tier_error", False, TierError), ("internal", False, TransferError)],
)
def test_a_refusal_keeps_its_type_and_code(code: str, permanent: bool, kind: type[TransferError]) -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        asked = world.ask()
        world.daemon.say(world.daemon.said[-1].seq, wire.Refused(ErrorInfo(code, "no"), permanent))
        with pytest.raises(TransferError, match=r"^no$") as caught:
            await asked
        assert (type(caught.value), caught.value.reason) == (kind, code)

    run(program)


@pytest.mark.parametrize(("code", "settled"), [("bad_value", True), ("internal", False), ("out_of_memory", False)])
def test_a_refusal_that_does_not_say_how_far_the_task_came_is_not_settled(code: str, settled: bool) -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        pushed = world.push()
        world.daemon.say(world.daemon.said[-1].seq, wire.Refused(ErrorInfo(code, "no"), permanent=settled))
        result = await pushed.future
        assert result.error is not None
        assert (result.error.code, result.settled) == (code, settled)

    run(program)


def test_a_push_is_admitted_then_answered_and_an_answer_counts_once() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        pushed = world.push()
        assert pushed.admitted is not None
        seq = world.daemon.said[-1].seq
        assert world.daemon.said[-1].ack
        world.daemon.say(seq, wire.Accepted())
        assert (pushed.admitted.done(), pushed.future.done()) == (True, False)
        world.daemon.say(seq, wire.Result(TaskResult(task_id="t", status=Status.OK)))
        world.daemon.say(seq, wire.Result(TaskResult(task_id="t", status=Status.FAILED)))
        world.daemon.say(999, wire.Value(1))
        assert (await pushed.future).status is Status.OK

    run(program)


def test_refused_sends_are_retried_in_order_with_the_next_message_or_shortly_after() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        world.daemon.takes = False
        world.ask(wire.Cancel("a"))
        world.daemon.takes = True
        world.ask(wire.Cancel("b"))
        assert not world.daemon.others, "b may not overtake a"
        world.daemon.say(999, wire.Value(None))
        assert [r.body.task_id for r in world.daemon.others] == ["a", "b"]  # type: ignore[union-attr]
        world.daemon.takes = False
        world.ask(wire.Cancel("c"))
        await asyncio.sleep(10 * RETRY_SEND_S)
        world.daemon.takes = True
        await asyncio.sleep(1.5 * RETRY_SEND_S)  # long before the next heartbeat
        assert world.daemon.others[-1].body == wire.Cancel("c")

    run(program)


def test_an_abandoned_request_is_not_sent_later() -> None:
    async def program(world: World) -> None:
        asking = asyncio.ensure_future(world.conversation.request(wire.Stats(), 99.0))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.sleep(0.01)
        world.daemon.welcome()
        assert not world.daemon.others

    run(program)


def test_a_request_that_cannot_be_encoded_or_is_too_long_ends_in_the_client() -> None:
    async def program(world: World) -> None:
        early = world.ask(wire.Match(["k" * 5000]))
        assert not early.done(), "the daemon has not named its limit yet"
        world.daemon.welcome()
        for asked, code in ((early, "too_large"), (world.ask(wire.Cancel("\ud800")), "bad_value")):
            with pytest.raises(RequestError) as caught:
                await asked
            assert caught.value.reason == code
        rejected = world.push("\ud800")
        assert rejected.admitted is not None
        assert rejected.admitted.done()
        assert (await rejected.future).status is Status.REJECTED
        assert not world.daemon.others

    run(program)


def test_a_request_past_its_limit_ends_and_its_task_is_taken_back() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        world.push("slow").deadline = world.conversation.now + 2.0
        asked = world.ask(timeout=2.0)
        kept = world.ask(timeout=100.0)
        for _ in range(12):
            world.daemon.welcome()
            await asyncio.sleep(0.5)
        with pytest.raises(TransferError, match="is alive but did not answer") as caught:
            await asked
        assert caught.value.reason == "no_answer"
        assert world.daemon.others[-1].body == wire.Cancel("slow")
        assert not kept.done()

    run(program)


# --- sessions and loss ----------------------------------------------------------------------------


def test_another_session_of_the_same_boot_gets_all_requests_again_in_order() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome(session=5, epoch=2)
        asked = [world.ask(wire.Cancel(str(i))) for i in range(3)]
        world.daemon.say(world.daemon.others[1].seq, wire.Value(True))
        world.conversation._greet()
        world.daemon.welcome(session=6, epoch=3)
        again = world.daemon.others[3:]
        assert [(r.seq, r.session) for r in again] == [(r.seq, 6) for r in world.daemon.others[:3:2]]
        assert [future.done() for future in asked] == [False, True, False]
        assert world.renewed == [("b1", 5, 2), ("b1", 6, 3)]
        world.conversation._greet()
        world.daemon.welcome(session=6, epoch=3)
        assert len(world.daemon.others) == 5, "the same session"
        assert world.renewed == [("b1", 5, 2), ("b1", 6, 3), ("b1", 6, 3)], "called after each Welcome"
        world.conversation._greet()
        world.daemon.welcome(session=6, epoch=4)
        assert len(world.daemon.others) == 5, "another epoch is no reason to ask again"
        assert world.renewed[3:] == [("b1", 6, 4)]

    run(program)


def test_a_new_session_repeats_state_before_pending_requests() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome(session=5)
        world.ask(wire.Cancel("1"))
        world.ask(wire.Cancel("2"))

        def tell() -> None:
            world.ask(wire.Attach(0))

        world.conversation.renewed = tell
        world.conversation._greet()
        world.daemon.welcome(session=6)
        assert [r.body for r in world.daemon.others[2:]] == [wire.Attach(0), wire.Cancel("1"), wire.Cancel("2")]

    run(program)


def test_an_older_welcome_says_nothing() -> None:
    async def program(world: World) -> None:
        world.conversation._greet()
        first, second = world.daemon.hellos
        world.daemon.say(second, welcome(generation="new"))
        world.daemon.say(first, welcome(generation="old", session=4))
        assert world.conversation.session.generation == "new"
        assert len(world.renewed) == 1

    run(program)


def test_another_boot_ends_everything_as_lost_under_the_name_of_the_old_one() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome(boot_id="b1", epoch=2)
        asked, pushed = world.ask(), world.push()
        greeting = world.ask(wire.Hello())
        world.daemon.say(world.daemon.said[-1].seq, welcome(boot_id="b2", session=1))
        with pytest.raises(DaemonLost, match=r"restarted \(boot b2, was b1\)"):
            await asked
        result = await pushed.future
        assert (result.boot_id, result.error.code) == ("b1", "daemon_lost")
        assert (await greeting).boot_id == world.conversation.session.boot_id == "b2"
        assert world.renewed == [("b1", 5, 2), ("b2", 1, 0)]

    run(program)


def test_a_stale_session_is_greeted_once_and_the_request_stays() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        asked = world.ask()
        hellos = len(world.daemon.hellos)
        for _ in range(3):
            world.daemon.say(world.daemon.others[-1].seq, wire.Refused(ErrorInfo(wire.STALE_SESSION, "")))
        assert len(world.daemon.hellos) == hellos + 1
        assert not asked.done()

    run(program)


def test_silence_is_loss_on_the_second_look_and_what_is_asked_then_fails_at_once() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        lost_after = world.loop.time()
        asked = world.ask()
        with pytest.raises(DaemonLost, match=r"no answer for 3\.6 s"):
            await asked
        assert 3.5 < world.loop.time() - lost_after < 5.0
        assert world.daemon.others[-1].body == wire.Bye()
        began = world.loop.time()
        with pytest.raises(DaemonLost, match="no daemon answers"):
            await world.ask()
        assert world.loop.time() == began
        late = world.daemon.others[0]
        world.daemon.say(late.seq, wire.Value(None))
        assert not world.conversation.ready, "an answer of before brings nobody back"

    run(program)


def test_a_message_at_the_second_look_keeps_the_daemon() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        asked = world.ask()
        await asyncio.sleep(3.55)
        assert world.conversation._heart.presence is Presence.DOUBTED
        world.daemon.say(999, wire.Value(None))
        await asyncio.sleep(0.2)
        assert world.conversation.ready
        assert not asked.done()

    run(program)


def test_a_daemon_that_wants_the_cpu_is_only_slow_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = [True]
    monkeypatch.setattr(session, "listener_of", {"sim://daemon": 17}.get)
    monkeypatch.setattr(session, "wants_machine", lambda pid: pid == 17 and wants[0])

    async def program(world: World) -> None:
        world.daemon.welcome()
        asked, overdue = world.ask(), world.ask(timeout=6.0)
        await asyncio.sleep(14.0)
        assert world.conversation._heart.presence is Presence.DOUBTED
        assert not asked.done()
        assert "did not answer in time" in str(overdue.exception()), "each request still ends by its own deadline"
        world.daemon.say(999, wire.Value(None))
        assert world.conversation.ready
        with pytest.raises(DaemonLost, match=r"no answer for 15\.\d s"):
            await asked
        world.daemon.welcome()
        asked = world.ask()
        await asyncio.sleep(5.0)
        assert not asked.done()
        wants[0] = False
        await asyncio.sleep(0.2)
        assert isinstance(asked.exception(), DaemonLost), "it died, or was stopped, in doubt"

    run(program)


def test_bytes_of_another_version_are_silence() -> None:
    async def program(world: World) -> None:
        world.daemon.welcome()
        asked = world.ask()
        while not asked.done():
            assert world.daemon._hear is not None
            world.daemon._hear(b"\x09whatever")
            await asyncio.sleep(0.1)
        assert isinstance(asked.exception(), DaemonLost)

    run(program)
