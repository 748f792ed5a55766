"""Tasks that name memory which no engine has mapped, or host blocks that hold nothing, are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.control.test_dispatcher import LIMITS, Desk, read, swap_in, swap_out, write
from tests.support.dispatch import limits_but
from transferd.control.admission import Limits
from transferd.control.dispatcher import Dispatcher
from transferd.tasks import ReceiveTask, SendTask, Status, Task, WriteStorageTask

OTHER = b"another engine"


def started_desk(limits: Limits = LIMITS) -> Desk:
    """A daemon that has just started: it has its memory, and no engine has come."""
    desk = Desk(limits)
    desk.dispatcher = Dispatcher(limits, admitting=False)
    desk.hear(desk.dispatcher.cache_ready(desk.now))
    return desk


def code(desk: Desk, seq: int) -> str:
    """The error code of an answer, or "" if there is none."""
    error = desk.answers[seq].error
    return "" if error is None else error.code


def every_kind() -> list[Task]:
    peer: dict[str, Any] = {"keys": ["k"], "gpu_block_ids": [1], "transfer_id": "t"}
    return [
        write("w", 1),
        read("r", 1),
        swap_out("o", [1], [1]),
        swap_in("i", [1], [1]),
        SendTask(task_id="s", **peer),
        ReceiveTask(task_id="c", peer="host:1", **peer),
    ]


@pytest.mark.parametrize("task", every_kind(), ids=lambda task: task.kind)
def test_no_task_names_device_memory_that_nobody_has_mapped(task: Task) -> None:
    desk = started_desk(replace(LIMITS, direct=True))
    seq = desk.submit(task)
    result = desk.answers[seq]
    assert (result.status, code(desk, seq)) == (Status.REJECTED, "not_attached")
    assert result.error is not None
    assert "rank 0" in result.error.message
    assert desk.started == []
    assert desk.dispatcher.rejects == {"not_attached": 1}


def test_a_task_is_refused_while_no_client_has_mapped_a_rank() -> None:
    desk = started_desk()
    desk.hear(desk.dispatcher.mappings_changed(desk.now, (1,), {}))
    result = desk.answers[desk.submit(write("w", 1))]
    assert result.error is not None
    assert (result.error.code, "rank 1" in result.error.message) == ("not_attached", True)
    desk.hear(desk.dispatcher.mappings_changed(desk.now, (), {}))
    desk.submit(write("w", 1))
    assert desk.started == ["w"]


def test_a_client_that_has_earlier_memory_mapped_is_refused_and_others_are_not(desk: Desk) -> None:
    desk.hear(desk.dispatcher.mappings_changed(desk.now, (), {OTHER: (1,)}))
    seq = desk.submit(write("w", 1), client=OTHER)
    assert code(desk, seq) == "not_attached"
    desk.submit(write("w", 1))
    assert desk.started == ["w"]


def test_a_refusal_names_the_first_rank_of_which_the_client_has_mapped_earlier_memory(desk: Desk) -> None:
    desk.hear(desk.dispatcher.mappings_changed(desk.now, (), {OTHER: (1, 3)}))
    result = desk.answers[desk.submit(write("w", 1), client=OTHER)]
    assert result.error is not None
    assert result.error.message.startswith("rank 1: this client still has")


def test_a_task_that_names_no_device_memory_is_admitted_without_an_engine() -> None:
    desk = started_desk()
    desk.submit(write("w"))
    assert desk.started == ["w"]
    only_flush = replace(LIMITS, host_blocks=0, only_flush=True)
    desk = started_desk(only_flush)
    desk.submit(WriteStorageTask(task_id="f", keys=["k"], gpu_block_ids=[1]))
    assert desk.started == ["f"]


def test_a_swap_in_of_a_block_that_was_never_filled_is_rejected(desk: Desk) -> None:
    desk.fill_host(1)
    seq = desk.submit(swap_in("i", [1, 2], [1, 2]))
    result = desk.answers[seq]
    assert (result.status, code(desk, seq)) == (Status.REJECTED, "empty_block")
    assert result.error is not None
    assert "host block 2" in result.error.message
    desk.submit(swap_in("j", [1], [1]))
    assert desk.started == ["j"]


def test_host_blocks_are_empty_again_when_their_pool_was_given_up(desk: Desk) -> None:
    desk.fill_host(1)
    desk.hear(desk.dispatcher.host_emptied(desk.now))
    assert code(desk, desk.submit(swap_in("i", [1], [1]))) == "empty_block"


def test_a_swap_in_may_be_pushed_behind_the_swap_out_that_fills_its_block(desk: Desk) -> None:
    desk.submit(swap_out("o", [1], [3]))
    seq = desk.submit(swap_in("i", [2], [3]))
    assert desk.started == ["o"]
    desk.finish("o")
    assert desk.started == ["o", "i"]
    desk.finish("i")
    assert desk.answers[seq].status is Status.OK


@pytest.mark.parametrize("how", ["failed", "cancelled", "cancelled while queued"])
def test_a_swap_in_fails_when_the_swap_out_before_it_does(desk: Desk, how: str) -> None:
    if how == "cancelled while queued":
        desk.submit(write("before", 1))
        desk.submit(read("reader", 1))  # waits for the write, and the swap-out for it
    desk.submit(swap_out("o", [1], [3]))
    seq = desk.submit(swap_in("i", [2], [3]))
    if how != "failed":
        desk.hear(desk.dispatcher.cancel(desk.now, "o"))
    if how == "cancelled while queued":
        desk.finish("before")
        desk.finish("reader")
    else:
        desk.finish("o", moved=0)
    result = desk.answers[seq]
    assert (result.status, code(desk, seq), result.block_ids) == (Status.FAILED, "empty_block", [])
    assert "i" not in desk.started
    assert desk.dispatcher.empty


def test_a_swap_out_that_fails_half_way_spoils_what_its_blocks_held(desk: Desk) -> None:
    desk.fill_host(3)
    desk.submit(swap_out("o", [1, 2], [3, 4]))
    desk.finish("o", moved=1)
    assert code(desk, desk.submit(swap_in("i", [1], [3]))) == "empty_block"
    desk.fill_host(5)
    desk.submit(swap_out("p", [1], [5]))
    desk.submit(swap_in("j", [2], [5]))
    desk.hear(desk.dispatcher.cancel(desk.now, "p"))
    desk.finish("p")  # all of it was moved before it heard of the cancel
    assert "j" in desk.started


def test_a_swap_out_that_was_taken_back_before_its_start_spoils_nothing(desk: Desk) -> None:
    desk.fill_host(3)
    desk.submit(read("reader", 1))
    desk.submit(swap_out("o", [1], [3]))
    desk.hear(desk.dispatcher.cancel(desk.now, "o"))
    desk.submit(swap_in("i", [2], [3]))
    desk.finish("reader")
    assert desk.started == ["reader", "i"]


def test_a_long_chain_of_swap_ins_fails_without_deep_recursion() -> None:
    limits = limits_but(
        LIMITS, block_bytes=1, max_queued_tasks=4000, max_inflight_bytes=2**40, max_results=4000, max_queued_bytes=2**30
    )
    desk = Desk(limits)
    desk.submit(swap_out("o", [1], [3]))
    pushes = 3000
    for number in range(pushes):  # each waits for the one before it: they fill one device block
        desk.seq += 1
        desk.dispatcher.submit(desk.now, b"engine", desk.seq, swap_in(f"i{number}", [2], [3]))
    desk.finish("o", moved=0)
    assert len([answer for answer in desk.answers.values() if answer.status is Status.FAILED]) == pushes + 1
    assert desk.dispatcher.empty


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_gone_client_gets_no_answer_for_what_waited_for_its_own_task() -> None:
    """The swap-out ends before it has filled the block, and the swap-in behind it would fail for that."""
    desk = Desk(limits_but(LIMITS, lane_depth=1))
    desk.submit(swap_out("runs", [3], [3]), client=b"stays")
    desk.submit(swap_out("o", [1], [1]), client=b"gone")
    desk.submit(swap_in("i", [2], [1]), client=b"gone")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"gone"))
    assert (desk.started, desk.stopped, desk.answers) == (["runs"], [], {})
    desk.finish("runs")
    assert desk.dispatcher.empty


def test_a_gone_client_is_forgotten_when_the_end_of_one_of_its_tasks_ends_another() -> None:
    """The swap-out was the first one's, and both wait for it; the swap-in behind it fails when it is taken back."""
    desk = Desk(limits_but(LIMITS, lane_depth=1))
    desk.submit(swap_out("runs", [3], [3]), client=b"stays")
    desk.submit(swap_out("o", [1], [5]), client=b"first")
    desk.submit(swap_in("i", [2], [5]), client=b"second")
    desk.submit(swap_out("o", [1], [5]), client=b"second")
    desk.hear(desk.dispatcher.client_gone(desk.now, b"first"))
    desk.hear(desk.dispatcher.client_gone(desk.now, b"second"))
    assert (desk.dispatcher.waits(b"second"), list(desk.dispatcher.records)) == (0, ["runs"])
