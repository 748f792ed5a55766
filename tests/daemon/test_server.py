"""The server, message by message: what each request is answered with, in bytes, and who gets no answer.

tests/sim/test_conversation.py has it together with a client, over connections that break.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.memory_core import MemoryCore, serve
from tests.support.named_peers import NamedPeers
from tests.support.waits import until
from transferd.daemon import server as module
from transferd.daemon.lookup import KEY_BYTES
from transferd.daemon.server import Server
from transferd.runtime.clock import Clock
from transferd.tasks import Status, SwapOutTask
from transferd.wire import protocol as wire
from transferd.wire.credentials import Credentials

PEER, WATCHER = b"1", b"watcher"
MOST = 4096


class Line(NamedPeers):
    """A transport of messages in memory. deaf: peers that do not read."""

    def __init__(self) -> None:
        self.answers: dict[bytes, deque[wire.ReplyEnvelope]] = {}
        self.deaf: set[bytes] = set()
        self.receive: Callable[[bytes, bytes], None]
        self.closed = False

    def start(self, on_message: Callable[[bytes, bytes | memoryview], None], *_: object) -> None:
        self.receive = on_message

    def send(self, peer: bytes, payload: bytes) -> bool:
        if peer in self.deaf:
            return False
        self.answers.setdefault(peer, deque()).append(wire.decode_reply(payload))
        return True

    def observes(self, peer: bytes) -> bool:
        return peer.startswith(b"watcher")

    def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.line, self.core = Line(), MemoryCore()
        self.server: Server = serve(
            self.line, self.core, clock=Clock(monotonic=lambda: self.now), max_message=MOST, **options
        )
        self.seq = 0

    def say(self, body: wire.Body, peer: bytes = PEER, **more: Any) -> int:
        self.seq += 1
        self.line.receive(peer, wire.encode_request(self.seq, body, **more))
        return self.seq

    def ask(self, body: wire.Body, peer: bytes = PEER, **more: Any) -> Any:
        """The answer, which came at once."""
        seq = self.say(body, peer, **more)
        answer = self.line.answers[peer].popleft()
        assert answer.seq == seq
        assert not self.line.answers[peer], "one answer"
        return answer.body

    async def later(self, peer: bytes = PEER) -> Any:
        await until(lambda: bool(self.line.answers.get(peer)))
        return self.line.answers[peer].popleft().body

    def silent(self, peer: bytes = PEER) -> bool:
        return not self.line.answers.get(peer)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.server.start()
    yield made
    await made.server.close()
    assert made.line.closed


def task(task_id: str = "t") -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2])


async def test_a_task_is_answered_with_its_result_and_said_to_be_admitted_if_asked(world: World) -> None:
    world.ask(wire.Hello())
    result = world.ask(task())
    assert (result.result.status, result.result.block_ids) == (Status.OK, [1])
    world.core.hold = True
    assert world.ask(task("u"), ack=True) == wire.Accepted()
    world.core.finish("u")
    assert (await world.later()).result.task_id == "u"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", "malformed"),
        (b"\x00", "version"),
        (b"\x01\xc1", "malformed"),
        (bytes(MOST + 1), "version"),
        (wire.encode_request(7, wire.Exists(["k" * MOST])), "too_large"),
    ],
)
async def test_bytes_that_are_no_request_are_refused_counted_and_never_reach_the_engine(
    world: World, message: bytes, code: str
) -> None:
    with capture_logs() as logs:
        world.line.receive(PEER, message)
    refused = world.line.answers[PEER].popleft().body
    assert isinstance(refused, wire.Refused)
    assert refused.permanent
    assert refused.error.code == code or (code == "version" and "version" in refused.error.code)
    assert world.server.statistics().rejects == {refused.error.code: 1}
    assert len(logs) == 1
    assert not world.core.ran


async def test_an_observer_may_look_at_its_rate_and_do_nothing_else() -> None:
    world = World(observer_rate=1.0)
    await world.server.start()
    assert isinstance(world.ask(wire.Hello(), WATCHER), wire.Welcome)
    with capture_logs():
        refused = world.ask(wire.ClearCache(), WATCHER)
        assert refused.error.code == "forbidden"
        pushed = world.ask(task(), WATCHER)
        assert (pushed.result.status, pushed.result.task_id) == (Status.REJECTED, "t")
        assert isinstance(world.ask(wire.Stats(), WATCHER), wire.Value)
        assert world.ask(wire.Stats(), WATCHER).error.code == "too_often"
        assert world.ask(wire.Stats(), WATCHER + b" 2").error.code == "too_often", "a rate for all of them"
    world.now = 1.0
    assert isinstance(world.ask(wire.Stats(), WATCHER), wire.Value)
    assert not world.core.ran
    await world.server.close()


async def test_an_unexpected_error_is_answered_as_a_bug_and_the_server_goes_on(world: World) -> None:
    world.ask(wire.Hello())
    with capture_logs() as logs:
        world.say(wire.Drain())  # MemoryCore's has a bug, on purpose
        refused = await world.later()
    assert (refused.error.code, refused.permanent) == ("internal", False)
    assert "ZeroDivisionError" in refused.error.message
    assert [line["log_level"] for line in logs] == ["error"]
    assert isinstance(world.ask(wire.Hello()), wire.Welcome)


async def test_a_request_without_memory_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> bool:
        raise MemoryError

    world.ask(wire.Hello())
    monkeypatch.setattr(world.core, "submit", none)
    with capture_logs():
        refused = world.ask(task())
    assert (refused.error.code, refused.permanent) == ("out_of_memory", False)


async def test_an_answer_that_cannot_be_encoded_is_refused_as_a_bug(world: World) -> None:
    world.ask(wire.Hello())
    world.core.report = {"object": object()}
    with capture_logs():
        refused = world.ask(wire.Stats())
    assert refused.error.code == "internal"


async def test_after_a_lost_answer_old_requests_wait_for_the_next_hello_and_then_count_once(world: World) -> None:
    first = world.ask(wire.Hello()).session
    world.line.deaf.add(PEER)
    world.say(wire.Stats(), session=first)
    world.line.deaf.clear()
    world.core.busy = True
    world.say(task(), session=first)  # of the session before: the client will send it again, and is not told of "busy"
    told = world.line.answers[PEER].popleft()
    assert (told.seq, told.body.error.code) == (0, wire.STALE_SESSION)  # type: ignore[union-attr]
    assert world.silent()
    second = world.ask(wire.Hello(), session=first).session
    assert second > first
    world.core.busy = False
    assert world.ask(task(), session=second).result.status is Status.OK
    stranger = world.ask(task("x"), session=second + 1)
    assert isinstance(stranger, wire.Refused)
    assert stranger.error.code == wire.STALE_SESSION
    assert "x" not in world.core.ran


async def test_requests_that_wait_are_bounded_for_each_client_and_for_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_PER_CLIENT", 2)
    monkeypatch.setattr(module, "MAX_WAITING_REQUESTS", 3)
    monkeypatch.setattr(module, "FEW_WAITING", 0)
    others = [b"2", b"3"]
    for peer in (PEER, *others):
        world.ask(wire.Hello(), peer)
    for peer, code in (
        (PEER, ""),
        (PEER, ""),
        (PEER, "too_many_requests"),
        (others[0], ""),
        (others[1], "too_many_requests"),
    ):
        world.say(wire.Pause(), peer)
        assert (world.line.answers[peer].popleft().body.error.code if not world.silent(peer) else "") == code  # type: ignore[union-attr]
    assert world.server.statistics().waiting == 3
    world.say(wire.Bye(), PEER)
    await until(lambda: world.server.statistics().waiting == 1)
    assert world.core.gone == [PEER]


async def test_the_bytes_of_waiting_requests_are_bounded_but_one_alone_may_be_larger(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100)
    monkeypatch.setattr(module, "FEW_BYTES", 200)
    monkeypatch.setattr(world.line, "credentials", lambda peer: Credentials(1, int(peer), 0))
    gate = asyncio.Event()

    async def exists(keys: list[str]) -> list[bool]:
        await gate.wait()
        return [True] * len(keys)

    monkeypatch.setattr(world.server.engines.own.blocks, "exists", exists)  # type: ignore[union-attr]
    world.ask(wire.Hello())
    world.say(wire.Exists(["k" * 500]))
    assert world.server.statistics().waiting_bytes == 500 + KEY_BYTES
    assert world.ask(wire.Exists(["k"])).error.code == "too_many_requests"
    other = b"77"  # another user, who may have a few all the same
    world.ask(wire.Hello(), other)
    world.say(wire.Exists(["k"]), other)
    world.say(wire.Exists(["k"]), other)
    assert world.ask(wire.Exists(["k" * 100]), other).error.code == "too_many_requests"
    gate.set()
    assert (await world.later()).value == [True]
    assert (await world.later(other)).value == [True]
    await until(lambda: world.server.statistics().waiting_bytes == 0)
    assert world.server._bytes_of == {}


async def test_a_stop_answers_what_waits() -> None:
    world = World()
    await world.server.start()
    world.ask(wire.Hello())
    world.say(wire.Pause())
    await world.server.close()
    await until(lambda: not world.silent())
    assert world.line.answers[PEER].popleft().body.error.code == "shutdown"  # type: ignore[union-attr]


async def test_tasks_that_a_client_turned_away_itself_are_counted_by_codes_that_exist(world: World) -> None:
    with capture_logs() as logs:
        world.ask(wire.Hello(turned_away={"queue_full": 3, "no such code": 2}))
        for _ in range(5):
            world.ask(wire.Hello(turned_away={"queue_full": 1}))
    assert world.server.statistics().turned_away == {"queue_full": 8, "error": 2}
    assert len([line for line in logs if line["event"] == "client turned tasks away"]) == 3, "and then no more lines"


async def test_blocks_that_an_engine_did_not_store_are_counted_by_reason(world: World) -> None:
    for _ in range(2):
        world.ask(wire.Hello(not_stored={"no_room": 3, "no such reason": 2}))
    assert world.server.statistics().not_stored == {"no_room": 6}


async def test_a_silent_client_is_lost_and_its_tasks_end(world: World) -> None:
    world.core.hold = True
    world.ask(wire.Hello())
    world.say(task())
    world.now = 1000.0
    world.server._liveness._look()
    assert world.core.gone == [], "this process was stalled, and may not have read what the client said"
    for _ in range(3):
        world.now += 2.5
        world.server._liveness._look()
    assert world.core.gone == [PEER]
    assert world.core.cancelled == ["t"]
    assert world.server.statistics().clients == 0
