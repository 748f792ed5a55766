"""Whose pause it is: one holder for each client in each process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from transferd.client.offers import Holds
from transferd.errors import DaemonLost, RequestError, TransferError
from transferd.wire import protocol as wire


def said_by(holds: Holds, asked: list[wire.ControlRequest]) -> str:
    """The holder that it names."""
    with pytest.raises(StopIteration):
        holds.pause().send(None)
    pause = asked.pop()
    assert isinstance(pause, wire.Pause)
    return pause.holder


@pytest.fixture
def asked() -> list[wire.ControlRequest]:
    return []


@pytest.fixture
def ids() -> Iterator[str]:
    return (f"{number:08d}" for number in range(20))


def made(asked: list[wire.ControlRequest], ids: Iterator[str], name: str = "") -> Holds:
    async def ask(body: wire.ControlRequest, _timeout: float) -> Any:
        asked.append(body)

    return Holds(name, ids.__next__, ask)


def test_a_holder_is_named_once(asked: list[wire.ControlRequest], ids: Iterator[str]) -> None:
    holds = made(asked, ids, "engine")
    assert [said_by(holds, asked) for _ in range(2)] == ["engine (00000000)"] * 2
    assert said_by(made(asked, ids), asked) == f"pid {os.getpid()} (00000002)", "a proof takes an id as well"


@pytest.mark.parametrize(
    ("refusal", "kept"),
    [
        (RequestError("it belongs to another event loop", code="wrong_loop"), True),
        (TransferError("256 requests are waiting", code="too_many_requests"), True),
        (DaemonLost("no daemon answers"), False),
    ],
)
async def test_a_resume_that_is_refused_leaves_what_is_held(refusal: TransferError, kept: bool) -> None:
    """A new session of the daemon did not get the pause again, and its tasks ran on."""
    refusing = False

    async def ask(_: wire.ControlRequest, _timeout: float) -> Any:
        if refusing:
            raise refusal

    holds = Holds("engine", "id".title, ask)
    await holds.pause()
    [pause], refusing = holds.again(), True
    with pytest.raises(TransferError):
        await holds.resume(1.0)
    assert holds.again() == ([pause] if kept else [])
    refusing = False
    await holds.resume(1.0)
    assert holds.again() == []


def test_each_child_that_uses_a_client_made_before_the_fork_has_its_own_pause(
    asked: list[wire.ControlRequest], ids: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one child's resume would end what the other still needs."""
    for name in ("", "engine"):
        holds, process = made(asked, ids, name), 77
        holders = {said_by(holds, asked)}
        for process in (78, 79):
            monkeypatch.setattr(os, "getpid", lambda process=process: process)
            holders |= {said_by(holds, asked), said_by(holds, asked)}
        assert len(holders) == 3
        assert (f"pid {process}" in said_by(holds, asked)) == (not name)
        monkeypatch.undo()
