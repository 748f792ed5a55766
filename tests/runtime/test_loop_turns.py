"""Turns of the event loop: they end by the clock, who costs little goes first, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from time import thread_time

import pytest

from transferd.runtime import loop_turns as module
from transferd.runtime.loop_turns import (
    FRAMES,
    LOOK_S,
    PIECE_S,
    SHARE,
    TURN_S,
    InPieces,
    LoopTurns,
    OneATurn,
    Spent,
    finished,
    loop_turns,
)  # fmt: skip

DEAR_S = 0.02


class Time:
    """Passes only when someone works."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = 100.0
        patch.setattr(module, "now", lambda: self.at)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


class Busy:
    """Has so many pieces to do, of so many seconds each. log: who did a piece, in order."""

    def __init__(self, name: str, turns: LoopTurns, time: Time, log: list[str], pieces: int, cost: float) -> None:
        self.name, self.turns, self.time, self.log = name, turns, time, log
        self.pieces, self.cost = pieces, cost
        self.spent = Spent()
        self.closed = False
        self.asked: list[int] = []

    def work(self, most: int) -> None:
        self.asked.append(most)
        began = self.time.at
        for _ in range(most):
            self.log.append(self.name)
            self.pieces -= 1
            self.time.at += self.cost
            if not self.pieces or self.time.at >= self.turns.until:
                break
        self.turns.took(self, self.time.at - began)
        if self.pieces:
            self.turns.wait(self)


async def until_done(*workers: Busy) -> int:
    """Passes of the loop until all have ended."""
    passes = 0
    while any(one.pieces for one in workers):
        await asyncio.sleep(0)
        passes += 1
        assert passes < 10_000
    return passes


async def test_a_turn_ends_by_the_clock_whatever_a_piece_costs(time: Time) -> None:
    turns, log = LoopTurns(), list[str]()
    cheap, dear = (Busy(str(cost), turns, time, log, 64, cost) for cost in (TURN_S / 1000, TURN_S))
    assert turns.free
    cheap.work(FRAMES)
    assert (cheap.pieces, turns.free) == (0, True), "all in one turn, which has time left"
    dear.work(FRAMES)
    assert (dear.pieces, turns.free) == (63, False)
    assert await until_done(dear) >= 63, "one in each turn"


async def test_who_costs_little_goes_before_those_who_cost_much(time: Time) -> None:
    turns, log = LoopTurns(), list[str]()
    dear = [Busy(f"dear {number}", turns, time, log, 50, DEAR_S) for number in range(20)]
    for one in dear:
        turns.wait(one)
    for _ in range(40):
        await asyncio.sleep(0)
    assert log, "they have begun, and all of them wait again"
    before = len(log)
    ping = Busy("ping", turns, time, log, 1, 0.0001)
    turns.wait(ping)
    await until_done(ping)
    assert log.index("ping") - before <= 1, "it waited for one of them at most"
    await until_done(*dear)
    assert all(log.count(one.name) == 50 for one in dear), "and nobody is forgotten"


async def test_the_costly_go_on_beside_any_number_of_cheap_ones(time: Time) -> None:
    turns, log = LoopTurns(), list[str]()
    dear = Busy("dear", turns, time, log, 30, DEAR_S)
    cheap = [Busy(f"cheap {number}", turns, time, log, 10**6, TURN_S / SHARE) for number in range(8)]
    for one in (dear, *cheap):
        turns.wait(one)
    for _ in range(400):  # a ninth of the time is its share: of 400 turns enough for 9
        await asyncio.sleep(0)
    assert dear.pieces < 30 - 6
    assert min(log.count(one.name) for one in cheap) > 100


async def test_idle_time_is_not_saved_up(time: Time) -> None:
    """Who comes after a long while has no more right than others: it does not hold them up for long."""
    turns, log = LoopTurns(), list[str]()
    others = [Busy(f"other {number}", turns, time, log, 100, DEAR_S) for number in range(4)]
    for one in others:
        turns.wait(one)
    await until_done(*others)
    late = [Busy(name, turns, time, log, 50, DEAR_S) for name in ("late", *(one.name for one in others))]
    for one, before in zip(late[1:], others, strict=True):
        one.spent = before.spent
    log.clear()
    for one in late:
        turns.wait(one)
    await until_done(*late)
    assert max(log[:100].count(one.name) for one in late) <= 100 / 5 + 2, "each a fifth"


async def test_who_has_closed_is_not_called(time: Time) -> None:
    turns = LoopTurns()
    gone = Busy("gone", turns, time, [], 1, 0.0)
    turns.wait(gone)
    gone.closed = True
    for _ in range(3):
        await asyncio.sleep(0)
    assert gone.asked == []


async def test_all_of_one_loop_share_its_turns() -> None:
    assert loop_turns() is loop_turns()


async def test_long_work_runs_one_piece_a_turn_in_the_order_of_its_coming() -> None:
    pieces, log, now = OneATurn(), list[tuple[int, str]](), [0]

    async def work(name: str) -> None:
        for _ in range(3):
            await pieces.turn()
            log.append((now[0], name))

    def tick() -> None:
        now[0] += 1
        asyncio.get_running_loop().call_soon(tick)

    tick()
    impatient = asyncio.ensure_future(work("impatient"))
    await asyncio.gather(asyncio.wait_for(asyncio.shield(impatient), 30), work("a"), work("b"))
    assert next(name for _, name in log) == "impatient"
    assert [name for _, name in log].index("a") < [name for _, name in log].index("b")
    assert len({turn for turn, _ in log}) == len(log) == 9, "never two in one turn"


async def test_a_piece_whose_caller_has_gone_keeps_nobody_waiting() -> None:
    pieces = OneATurn()
    await pieces.turn()
    gone = asyncio.ensure_future(pieces.turn())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(pieces.turn(), 30)


def works(log: list[str], name: str, pieces: int, time: Time, cost: float) -> Generator[None, None, str]:
    for number in range(pieces):
        time.at += cost
        log.append(f"{name}{number}")
        yield
    return name


def test_work_in_pieces_can_be_done_at_once(time: Time) -> None:
    log: list[str] = []
    assert finished(works(log, "a", 3, time, 0.0)) == "a"
    assert log == ["a0", "a1", "a2"]


async def test_work_in_pieces_begins_at_once_and_goes_on_in_later_turns_in_order(time: Time) -> None:
    log, pieces = list[str](), InPieces()
    pieces.run(works(log, "a", 3, time, PIECE_S))
    pieces.run(works(log, "b", 2, time, PIECE_S / 4))
    assert log == ["a0"], "the second waits for the first"
    for _ in range(3):
        asyncio.get_running_loop().call_soon(log.append, "others")
        await asyncio.sleep(0)
    assert [one for one in log if one != "others"] == ["a0", "a1", "a2", "b0", "b1"]
    assert log.index("others") < log.index("a2")
    pieces.run(works(log, "c", 1, time, 0.0))
    assert log[-1] == "c0", "nothing waits, so it is done at once"


async def test_work_that_raises_stops_no_other(time: Time) -> None:
    def broken() -> Generator[None, None, None]:
        yield
        raise ZeroDivisionError

    log, pieces = list[str](), InPieces()
    with pytest.raises(ZeroDivisionError):
        pieces.run(broken())
    pieces.run(works(log, "a", 2, time, 0.0))
    assert log == ["a0", "a1"]


async def test_the_longest_step_is_measured_while_there_is_work_and_no_timer_runs_without() -> None:
    turns = LoopTurns()
    turns.begin()
    before, used = thread_time(), 0.0
    while used < 10 * LOOK_S:  # a step
        used = thread_time() - before
    while turns._look is not None:  # noqa: ASYNC110 - until it has looked, and found nothing to do
        await asyncio.sleep(LOOK_S)
    assert turns.longest_s >= 9 * LOOK_S
    longest = turns.longest_s
    turns.begin()
    while turns._look is not None:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    assert turns.longest_s == longest, "a turn without work"
