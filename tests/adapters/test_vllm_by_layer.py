"""Loads that a step makes itself: what the scheduler's half decides, and what the worker's waits for. Without vLLM."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.adapters.test_vllm_scheduling import Request, World
from transferd.adapters.vllm.by_layer import LayerLoads
from transferd.tasks import ReadStorageTask, Status, TaskResult

WAIT_S = 20.0


def begun(world: World, request: Request) -> ReadStorageTask:
    """Load all blocks of a request in the next step."""
    world.it.matched(request, 0)
    world.link.answer(set(request.keys[:5]))
    tokens, later = world.it.matched(request, 0)
    assert (tokens, later) == (20, False)
    world.ids[request.request_id] = list(range(10, 16))
    world.it.allocated(request, world.blocks_of(request.request_id), 20)
    (task,) = world.step(new={request.request_id: 20}, scheduled=4).loads
    assert task.by_parts is True
    sent: ReadStorageTask = pickle.loads(pickle.dumps(task))  # as vLLM sends it to its worker
    return sent


def ended(world: World, task: ReadStorageTask, blocks: Sequence[int]) -> None:
    """The step has been computed, and its load has brought these blocks."""
    status = Status.OK if len(blocks) == len(task.keys) else Status.PARTIAL
    result = TaskResult(task_id=task.task_id, status=status, block_ids=list(blocks), bytes=7)
    world.it.loaded({task.task_id: result}, may_load=True)
    world.it.ready(1)


@pytest.fixture
def world() -> World:
    made = World(by_layer=True)
    made.it.loaded({}, may_load=True)
    return made


def test_a_step_loads_for_a_request_that_is_alone(world: World) -> None:
    task = begun(world, Request("a", 24))
    assert task.gpu_block_ids == [10, 11, 12, 13, 14]
    assert world.it.busy
    ended(world, task, task.gpu_block_ids)
    assert (world.it.counts["blocks_loaded"], world.it.counts["bytes_loaded"]) == (5, 7)
    news = world.step()
    assert (news.loaded, news.bad_blocks, news.loads) == (frozenset(), frozenset(), ()), "vLLM waits for nothing"


def test_no_step_loads_beside_other_requests_or_before_its_worker_knows_the_daemon(world: World) -> None:
    other, request = Request("b", 24), Request("a", 24)
    world.asks(other)
    assert world.load(request, set(request.keys)) == 5, "as without by_layer"
    world.it.finished("b")
    world.it.loaded({}, may_load=False)
    assert world.it.matched(request, 0) == (20, True)
    world.it.loaded({}, may_load=True)
    assert world.it.matched(request, 0) == (20, False)


def test_blocks_of_a_step_with_a_failed_load_are_saved_only_later(world: World) -> None:
    request = Request("a", 24)
    task = begun(world, request)
    assert world.pool.pinned == {15}, "the block that the step fills"
    ended(world, task, [10, 11, 13, 14])
    assert not world.pool.pinned
    assert not world.link.tasks
    assert world.it.counts["blocks_not_loaded"] == 1
    world.step(cached={"a": 8}, scheduled=16)  # vLLM computes from the lost block on
    world.link.answer(set(request.keys[:2]))
    world.step(cached={"a": 24}, scheduled=1)
    world.it.ready(3)
    saved = [block for task, _ in world.link.tasks for block in task.gpu_block_ids]
    assert sorted(saved) == [12, 13, 14, 15]


def test_blocks_of_a_request_that_ended_in_such_a_step_leave_vllms_cache(world: World) -> None:
    gone: list[set[int]] = []
    world.pool.evict_blocks = gone.append  # type: ignore[attr-defined]
    task = begun(world, Request("a", 24))
    world.it.finished("a", ([10, 11, 12, 13, 14, 15],))
    ended(world, task, [10])
    assert gone == [{10, 11, 12, 13, 14, 15}]


# --- the worker's half ------------------------------------------------------------------------------


class Pushed:
    """Takes the place of a link. Holds the callbacks of the last task."""

    def __init__(self) -> None:
        self.done: Callable[[TaskResult], None] = lambda _: None
        self.progressed: Callable[[int], None] = lambda _: None

    def submit(self, _: Any, done: Callable[[TaskResult], None], progressed: Callable[[int], None]) -> None:
        self.done, self.progressed = done, progressed


TASK = ReadStorageTask(task_id="t", keys=["k"], gpu_block_ids=[3], by_parts=True)
RESULT = TaskResult(task_id="t", status=Status.OK, block_ids=[3])


def waiting(loads: LayerLoads, layer: str) -> threading.Thread:
    thread = threading.Thread(target=loads.wait, args=(layer,), daemon=True)
    thread.start()
    return thread


def is_released(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_a_layer_waits_for_its_part_and_all_that_is_left_for_the_result() -> None:
    link = Pushed()
    loads = LayerLoads(link.submit, {"first": 1, "second": 2, "third": 3})
    loads.start([TASK])
    first, second, third = (waiting(loads, name) for name in ("first", "second", "third"))
    link.progressed(1)
    assert is_released(first)
    assert second.is_alive()
    link.progressed(2)
    assert is_released(second)
    assert third.is_alive()
    link.done(RESULT)
    assert is_released(third)
    assert loads.results() == {"t": RESULT}
    loads.start([])
    assert loads.results() == {}


def test_a_failed_load_releases_every_layer() -> None:
    link = Pushed()
    loads = LayerLoads(link.submit, {"first": 1, "second": 2})
    loads.start([TASK])
    threads = [waiting(loads, name) for name in ("first", "second")]
    link.done(TaskResult(task_id="t", status=Status.FAILED))
    assert all(map(is_released, threads))
    assert loads.results()["t"].status is Status.FAILED


def test_a_load_counts_as_failed_if_a_layer_did_not_wait() -> None:
    link = Pushed()
    loads = LayerLoads(link.submit, {"first": 1, "second": 2})
    loads.start([TASK])
    link.done(RESULT)
    loads.wait("first")
    assert (loads.results()["t"].status, loads.results()["t"].block_ids) == (Status.FAILED, [])


def test_a_layer_that_nobody_knows_waits_for_the_result() -> None:
    link = Pushed()
    loads = LayerLoads(link.submit, {"first": 1})
    loads.start([TASK])
    unknown = waiting(loads, "other")
    link.progressed(1)
    assert is_released(waiting(loads, "first"))
    assert unknown.is_alive()
    link.done(RESULT)
    assert is_released(unknown)
