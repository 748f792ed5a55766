"""Threads let go of the memory they worked on before anybody hears that they are done."""

from __future__ import annotations

import functools
import weakref

from transferd.runtime.threads import Direction, ThreadOffload, _run_once


class Memory:
    """Something that a weak reference can follow."""


def test_a_thread_holds_nothing_of_a_function_once_its_result_is_known() -> None:
    memory = Memory()
    followed = weakref.ref(memory)
    box = [functools.partial(lambda _: 7, memory)]  # a pool's thread holds these arguments a moment longer
    del memory
    assert _run_once(box) == 7
    assert followed() is None


async def test_results_and_errors_come_back_from_either_pool() -> None:
    offload = ThreadOffload(1)
    assert [await offload.run(direction, lambda: 7) for direction in Direction] == [7, 7]
    try:
        await offload.run(Direction.IN, lambda: 1 // 0)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the error was lost")
    offload.close()
