"""Objects that leave storage reach the feeds of all engines, and storage is asked for them only if somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from transferd.daemon.kv_events.departures import Departures
from transferd.storage.base import Storage


class Reporting:
    """A storage that takes one listener, or refuses."""

    def __init__(self, *, reports: bool = True) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self._reports = reports
        self.pool = None

    @property
    def index(self) -> Reporting:
        return self

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        self.listeners.append(left)
        return self._reports


def departures(storage: Any) -> Departures:
    return Departures(cast("Storage | None", storage))


def test_storage_reports_are_requested_once_by_the_first_listener() -> None:
    storage = Reporting()
    made = departures(storage)
    assert storage.listeners == []
    one: list[str] = []
    other: list[str] = []
    assert made.listen("one", one.append)
    assert made.listen("other", other.append)
    (left,) = storage.listeners
    left("object")
    assert (one, other) == (["object"], ["object"])


def test_a_removed_listener_gets_no_more_calls() -> None:
    storage = Reporting()
    made = departures(storage)
    heard: list[str] = []
    made.listen("one", heard.append)
    storage.listeners[0]("first")
    made.forget("one")
    made.forget("one")
    storage.listeners[0]("second")
    assert heard == ["first"]


@pytest.mark.parametrize("storage", [None, Reporting(reports=False)])
def test_listen_returns_false_without_reports(storage: object) -> None:
    assert not departures(storage).listen("one", lambda _: None)
