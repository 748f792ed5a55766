"""What each control request does: that each has its method, and that none has an effect before it may wait."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator

import pytest

from tests.daemon.test_server import World
from tests.support.bodies import least, tag_of
from transferd.daemon import server as module
from transferd.daemon.clients import KnownClient
from transferd.daemon.requests import Begin, Requests, held_bytes
from transferd.tasks import TokenIds
from transferd.wire import protocol as wire

ELSEWHERE = {wire.Hello, wire.Bye}  # the server's own


def _handled() -> Iterator[type[wire.ControlRequest]]:
    yield from (kind for kind in wire.CONTROLS if kind not in ELSEWHERE)


@pytest.mark.parametrize("kind", list(_handled()), ids=tag_of)
def test_the_method_of_a_request_takes_it_and_nothing_else(kind: type[wire.ControlRequest]) -> None:
    method = getattr(Requests, tag_of(kind))
    assert list(typing.get_type_hints(method).values())[:2] == [KnownClient, kind]


def test_there_is_no_method_without_a_request() -> None:
    public = {name for name, _ in inspect.getmembers(Requests, inspect.isfunction) if not name.startswith("_")}
    assert public - {"handlers"} == {tag_of(kind) for kind in _handled()}


async def test_a_request_that_may_not_wait_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a pause, which takes effect before its answer."""
    waiting = [kind for kind in _handled() if typing.get_type_hints(getattr(Requests, tag_of(kind)))["return"] == Begin]
    assert {wire.Pause, wire.Drain, wire.Prefetch, wire.Purge} <= set(waiting)
    world = World()
    await world.server.start()
    world.ask(wire.Hello())
    begun: list[str] = []
    for effect in ("pause", "drain"):
        monkeypatch.setattr(world.core, effect, lambda *_, name=effect: begun.append(name))
    monkeypatch.setattr(module, "MAX_WAITING_PER_CLIENT", 0)
    for kind in waiting:
        if kind in (wire.Offer, wire.Register):  # the rest of the daemon is needed even to begin these
            continue
        assert world.ask(least(kind)).error.code == "too_many_requests", kind
    assert not begun
    await world.server.close()


def test_a_waiting_request_costs_its_keys_or_its_token_ids() -> None:
    assert held_bytes(wire.Pause()) == 0
    assert held_bytes(wire.Unpin()) == 0
    assert held_bytes(wire.Match(token_ids=TokenIds([1, 2, 3]))) == 12
    assert held_bytes(wire.Purge(["k" * 100])) == held_bytes(wire.Exists(["k" * 100])) > 100
