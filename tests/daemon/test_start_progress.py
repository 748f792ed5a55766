"""A start that takes minutes tells systemd that it moves, and only while it does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.daemon import process
from transferd.tiers import populate


class Told:
    """A notifier that keeps what it is told, and lets somebody wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.told = asyncio.Event()

    def notify(self, *states: str) -> bool:
        self.lines.append(states)
        self.told.set()
        return True


async def test_more_time_is_asked_for_whenever_memory_was_populated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXTEND_S", 2)
    monkeypatch.setattr(process, "LOOK_S", 0.001)
    monkeypatch.setattr(process, "PROGRESS", populate.Progress())
    told = Told()

    async def opens() -> None:
        for _ in range(3):
            await told.told.wait()
            told.told.clear()
            process.PROGRESS.add(1_500_000_000)
        await told.told.wait()

    signals: Any = SimpleNamespace(stop=asyncio.get_running_loop().create_future())
    daemon: Any = SimpleNamespace(open=opens)
    assert await asyncio.wait_for(process._started(daemon, told, signals), 30)  # type: ignore[arg-type]
    assert [lines[0] for lines in told.lines] == ["EXTEND_TIMEOUT_USEC=2000000"] * 4
    assert [lines[1] for lines in told.lines] == [
        f"STATUS=starting: {gigabytes} GB of memory populated" for gigabytes in (0.0, 1.5, 3.0, 4.5)
    ]


async def test_a_start_that_stands_still_asks_for_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.001)
    monkeypatch.setattr(process, "PROGRESS", populate.Progress())
    told, go, looks = Told(), asyncio.Event(), 0

    async def wait(*arguments: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            go.set()
        return await asyncio.wait(*arguments, **options)

    async def opens() -> None:
        await go.wait()

    monkeypatch.setattr(process, "asyncio", SimpleNamespace(**vars(asyncio) | {"wait": wait}))
    signals: Any = SimpleNamespace(stop=asyncio.get_running_loop().create_future())
    daemon: Any = SimpleNamespace(open=opens)
    assert await asyncio.wait_for(process._started(daemon, told, signals), 30)  # type: ignore[arg-type]
    assert len(told.lines) == 1
    assert looks >= 5
