"""runtime/compat.py behaves on Python 3.10 as the standard library does on later ones."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transferd.runtime import compat
from transferd.runtime.compat import (
    Runner,
    StrEnum,
    Task,
    TaskGroup,
    cancelled_from_outside,
    count_cancellations,
    timeout,
    timeout_at,
    uncancel,
    wait_for,
)


class Colour(StrEnum):
    """A sample."""

    RED = "red"


def test_members_of_a_str_enum_read_as_their_value() -> None:
    assert (str(Colour.RED), f"{Colour.RED:>4}", "%s" % Colour.RED, Colour("red")) == ("red", " red", "red", Colour.RED)  # noqa: UP031


async def test_the_time_that_ends_raises_the_builtin_timeout_error() -> None:
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        async with timeout(0.001):
            await never
    assert never.cancelled()
    with pytest.raises(TimeoutError):
        async with timeout_at(asyncio.get_running_loop().time() - 1):  # due already: it ends at the first wait
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError):
        await wait_for(asyncio.sleep(60), 0.001)


async def test_an_awaitable_that_ends_in_time_leaves_no_timer() -> None:
    async with timeout(60), timeout(None), timeout_at(None):
        await asyncio.sleep(0)
    assert await wait_for(asyncio.sleep(0, "slept"), 60) == "slept"
    assert await wait_for(asyncio.sleep(0, "slept"), None) == "slept"
    with pytest.raises(ValueError, match="ours"):
        async with timeout(60):
            raise ValueError("ours")


async def test_the_outer_of_two_timers_ends_both() -> None:
    inner = []

    async def waits() -> None:
        try:
            async with timeout(60):
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            inner.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        async with timeout(0.001):
            await waits()
    assert inner == ["cancelled"]


@pytest.mark.parametrize("first", ["the timer", "the caller"])
async def test_a_cancellation_in_the_turn_in_which_a_timer_ends_is_not_lost(first: str) -> None:
    loop, waits, said = asyncio.get_running_loop(), asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            async with timeout_at(due):
                waits.set()
                await asyncio.sleep(60)
        except TimeoutError:
            said.append("timed out")

    while True:
        due = loop.time() + 0.02
        task = loop.create_task(work())
        await waits.wait()
        if loop.time() < due:
            break
        task.cancel()  # a busy machine came too late: once more
        await asyncio.wait([task])
        waits.clear()
        said.clear()
    caller_due = due + (1e-6 if first == "the timer" else -1e-6)
    loop.call_at(caller_due, task.cancel)
    while loop.time() < due + 1e-3:  # both are due now, and run in one turn, before the task does
        pass
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == []


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("coroutine", [True, False])
async def test_a_cancellation_in_the_turn_in_which_the_result_comes_is_not_lost(coroutine: bool, turns: int) -> None:
    """However many turns of the loop a result takes on its way, a task that was cancelled before its end ends so."""
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def waits() -> str:
        return await result

    async def work() -> str:
        return await wait_for(waits() if coroutine else result, 60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.001)
    result.set_result("came")
    for _ in range(turns):
        await asyncio.sleep(0)
    before_the_end = task.cancel()
    if before_the_end:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task == "came"
    assert before_the_end or turns > 0


async def test_a_task_says_whether_it_was_cancelled_from_outside_and_goes_on_if_it_takes_that_back() -> None:
    seen: list[tuple[str, bool]] = []
    first = asyncio.Event()
    awaited = asyncio.get_running_loop().create_future()

    async def work() -> str:
        task = asyncio.current_task()
        assert task is not None
        try:
            await awaited
        except asyncio.CancelledError:
            seen.append(("what it awaited", cancelled_from_outside(task)))
            first.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(("the task", cancelled_from_outside(task)))
            uncancel(task)
        seen.append(("taken back", cancelled_from_outside(task)))
        await asyncio.sleep(0)
        return "went on"

    task = asyncio.get_running_loop().create_task(work())
    await asyncio.sleep(0)
    awaited.cancel()
    await first.wait()
    task.cancel()
    assert await task == "went on"
    assert seen == [("what it awaited", False), ("the task", True), ("taken back", False)]


def test_timers_end_what_runs_in_tasks_that_do_not_count() -> None:
    """An engine's own loop: `asyncio.run` has plain tasks."""

    async def main() -> str:
        task = asyncio.current_task()
        with pytest.raises(TimeoutError):
            async with timeout(0.001):
                await asyncio.sleep(60)
        assert task is not None
        assert not cancelled_from_outside(task)
        return "ended"

    assert asyncio.run(main()) == "ended"


def test_every_task_of_a_runner_counts() -> None:
    async def main() -> list[bool]:
        tasks = [asyncio.ensure_future(asyncio.sleep(0)), asyncio.get_running_loop().create_task(asyncio.sleep(0))]
        async with TaskGroup() as group:
            tasks.append(group.create_task(asyncio.sleep(0)))
        await asyncio.wait(tasks)
        return [isinstance(task, Task) for task in (*tasks, asyncio.current_task())]

    with Runner(loop_factory=lambda: count_cancellations(asyncio.new_event_loop())) as runner:
        assert runner.run(main()) == [True] * 4


def test_ctrl_c_cancels_what_a_runner_runs() -> None:
    program = """
import asyncio, os, signal
from transferd.runtime.compat import Runner
async def main():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        print("tidied", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
with Runner() as runner:
    runner.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "tidied\n")
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


# Fresh processes, because only a first use is in danger; a switch interval that lets the threads meet within it.
FIRST_USES = """
import sys, threading
from transferd.config.loading import from_tree
sys.setswitchinterval(1e-6)
ready = threading.Barrier(4)
def first():
    ready.wait()
    from_tree({"cache": {"ranks": 1}})
threads = [threading.Thread(target=first) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("whole")
"""


def test_threads_that_read_their_first_configuration_at_once_do_not_end_the_process() -> None:
    """37 of 40 such processes ended by SIGSEGV on 3.10 (msgspec 0.22), 3 of 20 with two threads on 3.11."""
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("whole\n", 0), done.stderr


def test_nothing_else_converts() -> None:
    """msgspec.convert itself, and a decode whose type msgspec has not met, may be a first use in any thread."""
    package = Path(compat.__file__).parents[1]
    texts = {path: path.read_text() for path in package.rglob("*.py") if path != Path(compat.__file__)}
    assert [str(path) for path, text in texts.items() if "msgspec.convert(" in text] == []
    pattern = re.compile(r"\.decode\([^)]*type=(?!dict\[str, Any\])")
    assert [str(path) for path, text in texts.items() if pattern.search(text)] == []
