"""What all engines may admit together: a flood of one engine keeps none of the others out."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from tests.support.dispatch import limits, record_of
from transferd.config import ServerSection, Size
from transferd.control import instructions as do
from transferd.control.admission import argument_bytes
from transferd.control.dispatcher import Dispatcher
from transferd.control.engine_bounds import Total
from transferd.control.order import HazardTable, Lanes, TaskState
from transferd.tasks import Lane, Status, WriteStorageTask


class Held(Lanes):
    """An engine's load, as given."""

    def __init__(self, queued: int = 0, argument_bytes: int = 0, write_bytes: int = 0) -> None:
        super().__init__(limits().server, HazardTable())
        self.hold(queued, argument_bytes, write_bytes)

    def hold(self, queued: int, argument_bytes: int, write_bytes: int) -> None:
        self.queued, self.hazards.nbytes, self.loads[Lane.WRITE].nbytes = queued, argument_bytes, write_bytes


def write(task_id: str, block: int = 0) -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=[task_id], gpu_block_ids=[block])


def prepared(**more: Any) -> TaskState:
    return record_of(write("w"), **{"nbytes": 10, "arguments": 10} | more)


def code(total: Total, asks: Held, task: TaskState | None = None) -> str:
    refusal = total.refusal(asks, task or prepared())
    return "" if refusal is None else refusal.code


def server_of(tasks: int, queued_bytes: int, moving_bytes: int) -> ServerSection:
    return ServerSection(
        max_queued_tasks=tasks, max_queued_bytes=Size(queued_bytes), max_inflight_bytes=Size(moving_bytes)
    )


def total(*engines: Held) -> Total:
    return Total(server_of(8, 800, 8000), list(engines))


def test_one_engine_alone_has_only_its_own_bounds() -> None:
    assert code(total(flood := Held(queued=100, argument_bytes=10**6, write_bytes=10**6)), flood) == ""


@pytest.mark.parametrize(
    ("flood", "told"),
    [
        (Held(queued=8), "queue_full"),
        (Held(argument_bytes=791), "queue_full"),
        (Held(write_bytes=7991), "bytes_in_flight"),
    ],
    ids=["tasks", "arguments", "bytes"],
)
def test_past_a_bound_only_an_engine_below_its_share_admits_more(flood: Held, told: str) -> None:
    other = Held()
    both = total(flood, other)
    assert code(both, flood) == told
    assert code(both, other) == ""
    other.hold(3, 399, 3999)
    assert code(both, other) == "", "below its half"
    other.hold(4, 400, 4000)
    assert code(both, other) == told, "at its half"


def test_up_to_the_bounds_any_engine_admits() -> None:
    busy = Held(queued=7, argument_bytes=790, write_bytes=7990)
    assert code(total(busy, Held()), busy) == ""
    assert code(total(busy, Held(write_bytes=1)), busy) == "bytes_in_flight"
    assert code(total(busy, Held(argument_bytes=1)), busy) == "queue_full"
    assert code(total(busy, Held(queued=1)), busy) == "queue_full"


def test_a_task_larger_than_a_bound_is_admitted_alone() -> None:
    """Or it would be told "later" for ever."""
    other = Held(argument_bytes=800, write_bytes=8000)
    idle = Held()
    assert code(total(other, idle), idle, prepared(nbytes=10**6, arguments=10**6)) == ""


def test_bytes_count_by_lane() -> None:
    flood = Held(write_bytes=10**6)
    assert code(total(flood, Held()), flood, prepared(lane=Lane.READ)) == ""


def test_the_refusal_says_how_much_all_hold_and_how_much_the_asker() -> None:
    flood = Held(queued=6)
    refusal = total(flood, Held(queued=2)).refusal(flood, prepared())
    assert refusal is not None
    assert refusal.message == "the queue is full: 8 tasks of all engines, 6 of this one"


def test_a_dispatcher_asks_it_and_reports_its_own_load() -> None:
    shared = Total(server_of(8, 2**40, 2**40))
    flooded, other = (Dispatcher(limits(), total=shared) for _ in range(2))
    shared.engines += [flooded.lanes, other.lanes]
    for engine in (flooded, other):
        engine.hold(0.0, "pause")
    answers = []
    for number in range(10):
        answers += flooded.submit(0.0, b"c", number, write(f"t{number}", number))
    busy = [a.result for a in answers if isinstance(a, do.Reply) and a.result.status is Status.BUSY]
    assert [(result.error.code, result.task_id) for result in busy if result.error] == [
        ("queue_full", "t8"),
        ("queue_full", "t9"),
    ]
    assert all(result.retry_after for result in busy)
    assert (flooded.lanes.queued, len(list(flooded.records.values()))) == (8, 8)
    assert flooded.hazards.nbytes == sum(argument_bytes(write(f"t{n}", n)) for n in range(8))
    assert flooded.lanes.loads[Lane.WRITE].nbytes == 8 * 2 * 4096
    assert flooded.lanes.loads[Lane.READ].nbytes == 0
    for number in range(6):
        other.submit(0.0, b"d", number, write(f"o{number}", number))
    assert other.lanes.queued == 4, "an equal share, past the bound of all"


def test_a_task_of_an_engine_below_its_share_costs_the_same_beside_any_number_of_engines() -> None:
    class Unasked(Held):
        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> NoReturn:
            raise AssertionError(f"{name}: the others are asked only about one that has its share")

    light = Held(queued=1, argument_bytes=100, write_bytes=1000)
    assert code(total(light, *(Unasked() for _ in range(3))), light) == ""
