"""The circuit breaker in virtual time: when calls fail at once, when it probes, and that it always closes again."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tests.support.simulation.loop import SimLoop, simulate
from transferd.errors import StorageUnavailable
from transferd.runtime.aio import uncancelled
from transferd.storage.breaker import BreakerState, CircuitBreaker

EVERY_S = 10.0
TAKES_S = 4.0


class Backend:
    """answers: what each probe gets, one after the other: an error, or None. asked: when each came."""

    def __init__(self, loop: SimLoop, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []
        self.hold: asyncio.Event | None = None
        self._loop = loop

    async def probe(self) -> None:
        self.asked.append(self._loop.time())
        if self.hold is not None:
            await self.hold.wait()
        if (error := self.answers.pop(0)) is not None:
            raise error


def refusal(breaker: CircuitBreaker) -> str:
    with pytest.raises(StorageUnavailable) as caught:
        breaker.check()
    return str(caught.value)


def test_calls_fail_at_once_until_a_probe_is_answered() -> None:
    async def story(loop: SimLoop) -> None:
        backend = Backend(loop, StorageUnavailable("timed out again"), StorageUnavailable("no route"), None)
        breaker = CircuitBreaker("the pool", backend.probe, EVERY_S)
        breaker.check()
        assert (breaker.state, breaker.reason, breaker.opened) == (BreakerState.CLOSED, "", 0)
        began = loop.time()
        breaker.failed("timed out")
        assert "the pool does not answer (timed out)" in refusal(breaker)
        await asyncio.sleep(1.5 * EVERY_S)
        assert "(timed out again)" in refusal(breaker)
        await asyncio.sleep(EVERY_S)
        assert "(no route)" in refusal(breaker), "the last reason"
        await asyncio.sleep(EVERY_S)
        breaker.check()
        assert (breaker.state, breaker.reason, breaker.opened) == (BreakerState.CLOSED, "", 1)
        assert [round((at - began) / EVERY_S, 3) for at in backend.asked] == [1, 2, 3]
        await asyncio.sleep(10 * EVERY_S)
        assert len(backend.asked) == 3, "while it is closed, nobody probes"

    simulate(story, 1)


def test_failures_while_it_is_open_start_no_second_probe_and_count_once() -> None:
    async def story(loop: SimLoop) -> None:
        backend = Backend(loop, None)
        backend.hold = asyncio.Event()
        breaker = CircuitBreaker("the pool", backend.probe, EVERY_S)
        breaker.failed("first")
        breaker.failed("second")
        await asyncio.sleep(3 * EVERY_S)
        assert breaker.state is BreakerState.HALF_OPEN
        assert "(second)" in refusal(breaker)
        breaker.failed("of a call that was under way")
        await asyncio.sleep(3 * EVERY_S)
        assert (len(backend.asked), breaker.opened) == (1, 1)
        backend.hold.set()
        await asyncio.sleep(0.1)
        breaker.check()

    simulate(story, 1)


def test_a_probe_that_raises_anything_else_is_no_answer_and_others_follow() -> None:
    """Or one bug of a library would keep the store away until the daemon is started again."""

    async def story(loop: SimLoop) -> None:
        backend = Backend(loop, ValueError("a bug"), None)
        breaker = CircuitBreaker("the pool", backend.probe, EVERY_S)
        breaker.failed("timed out")
        with structlog.testing.capture_logs() as logs:
            await asyncio.sleep(1.5 * EVERY_S)
        assert breaker.state is BreakerState.OPEN
        assert "ValueError: a bug" in refusal(breaker)
        assert [line["log_level"] for line in logs] == ["error"]
        await asyncio.sleep(EVERY_S)
        breaker.check()

    simulate(story, 1)


@pytest.mark.parametrize("when", ["closed", "open", "probing"])
def test_after_its_close_it_probes_no_more(when: str) -> None:
    async def story(loop: SimLoop) -> None:
        backend = Backend(loop, StorageUnavailable("gone"))
        backend.hold = asyncio.Event()
        breaker = CircuitBreaker("the pool", backend.probe, EVERY_S)
        if when != "closed":
            breaker.failed("timed out")
        if when == "probing":
            await asyncio.sleep(1.5 * EVERY_S)
        closing = loop.create_task(breaker.close())
        await asyncio.sleep(1.0)
        assert closing.done() == (when != "probing"), "it waits for a probe that runs"
        backend.hold.set()
        await closing
        await breaker.close()
        breaker.failed("late")
        assert breaker.reason != "late"
        await asyncio.sleep(5 * EVERY_S)
        assert len(backend.asked) == (when == "probing")

    simulate(story, 1)


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, 0), (StorageUnavailable("gone"), 0), (ValueError("a bug"), 5)],
    ids=["answered", "refused", "bug"],
)
def test_a_probe_follows_each_answer_after_the_interval(error: Exception | None, told: int) -> None:
    """The store has acted on its own error; anything else is a bug, which is told and ends nothing."""

    async def story(loop: SimLoop) -> None:
        asked: list[float] = []

        async def ask() -> None:
            asked.append(loop.time())
            await asyncio.sleep(TAKES_S)
            if error is not None:
                raise error

        breaker = CircuitBreaker("the pool", Backend(loop).probe, EVERY_S)
        began = loop.time()
        await asyncio.sleep(2 * EVERY_S)
        assert asked == [], "not before its start"
        breaker.watch(ask, EVERY_S)
        with structlog.testing.capture_logs() as logs:
            await asyncio.sleep(5 * (EVERY_S + TAKES_S) + 1.0)
        apart = [round(b - a, 3) for a, b in zip([began + 2 * EVERY_S, *asked], asked, strict=False)]
        assert apart == [EVERY_S, *[EVERY_S + TAKES_S] * 4]
        assert len(logs) == told
        await breaker.close()
        await breaker.close()
        await asyncio.sleep(10 * EVERY_S)
        assert len(asked) == 5

    simulate(story, 1)


def test_a_probe_that_runs_at_the_close_ends_by_itself_and_is_the_last() -> None:
    async def story(loop: SimLoop) -> None:
        ended: list[float] = []

        async def call() -> None:
            await asyncio.sleep(TAKES_S)
            ended.append(loop.time())

        async def ask() -> None:
            await uncancelled(call())

        breaker = CircuitBreaker("the pool", Backend(loop).probe, EVERY_S)
        breaker.watch(ask, EVERY_S)
        await asyncio.sleep(EVERY_S + 1.0)
        await breaker.close()
        await asyncio.sleep(10 * EVERY_S)
        assert len(ended) == 1

    simulate(story, 1)
