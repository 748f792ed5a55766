"""When a client's session ends because an answer was lost, and when not."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.named_peers import NamedPeers
from transferd.daemon.clients import Clients
from transferd.observability.recorder import Recorder
from transferd.tasks import ErrorInfo, Status, TaskResult
from transferd.wire import protocol as wire

PEER = b"peer"
STALE = wire.Refused(ErrorInfo(wire.STALE_SESSION, "from an earlier session; send Hello"))
ANSWERS: dict[str, wire.ReplyBody] = {
    "result": wire.Result(TaskResult(task_id="t", status=Status.OK)),
    "value": wire.Value(None),
    "refusal": wire.Refused(ErrorInfo("bad_value", "no")),
}


class FullTransport(NamedPeers):
    """Takes nothing, as when the peer does not read."""

    def start(self, *_: object) -> None: ...

    def send(self, peer: bytes, payload: bytes) -> bool:
        return False


@pytest.fixture
def clients() -> Clients:
    made = Clients(FullTransport(), "boot", Recorder(capacity=10))
    made.meet(PEER, 0.0)
    return made


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_lost_answer_begins_a_session_in_which_the_client_asks_again(clients: Clients, answer: str) -> None:
    before = clients[PEER].session
    clients.send(PEER, 7, ANSWERS[answer])
    assert clients[PEER].session > before
    assert clients.undeliverable == 1


def test_a_lost_refusal_of_a_stale_request_begins_none(clients: Clients) -> None:
    before = clients[PEER].session
    for seq in range(100):
        clients.refuse_stale(PEER, seq, STALE)
        clients.tell_of_session(clients[PEER])
    assert clients[PEER].session == before
    assert clients.undeliverable == 100


async def test_a_session_of_another_connection_is_over_when_that_client_is_forgotten(clients: Clients) -> None:
    """Until then a push of that session, still unread, would run."""
    session = clients[PEER].session
    clients[PEER].welcomed.append(session)
    other = clients.meet(b"other", 0.0)
    await clients.gone(session, but=clients[PEER])
    await clients.gone(session + 1, but=other)
    waiting = asyncio.ensure_future(clients.gone(session, but=other))
    clients.meet(b"third", 0.0)
    clients.leave(b"third")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    clients.leave(PEER)
    await waiting
