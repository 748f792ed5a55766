"""Prefill to decode as pure logic: which task a call becomes, and what its result is worth."""

from __future__ import annotations

import pytest

from tests.support.dispatch import limits
from transferd.blocks.keys import block_keys, partial_tokens
from transferd.client.handover import Handover, whole
from transferd.config import load
from transferd.control.admission import check_task, content_hash
from transferd.errors import HandoverFailed, RequestError
from transferd.tasks import ErrorInfo, ReadStorageTask, ReceiveTask, SendTask, Status, TaskResult, WriteStorageTask

TOKENS = list(range(20))
LIMITS = limits(host_blocks=0, direct=True)


def planned(blocks: list[int] | None = None, **more: object) -> Handover:
    arguments = {"block_size": 8, "extra_keys": None, "timeout": 3.0} | more
    return Handover("request", "request/attempt", TOKENS, blocks or [4, 5, 6], None, **arguments)  # type: ignore[arg-type]


def test_both_sides_name_the_same_blocks_the_incomplete_one_by_its_number_of_tokens() -> None:
    keys = planned().keys
    assert keys == block_keys(TOKENS, 8)
    assert [partial_tokens(key) for key in keys] == [None, None, 4]


def test_storage_mode_writes_and_reads_direct_mode_sends_and_receives() -> None:
    one = planned()
    assert type(one.out("storage")) is WriteStorageTask
    assert type(one.into("storage", None)) is ReadStorageTask
    sent, received = one.out("direct"), one.into("direct", "host:1")
    assert isinstance(sent, SendTask)
    assert isinstance(received, ReceiveTask)
    assert sent.transfer_id == received.transfer_id == "request"
    assert {task.task_id for task in (sent, received)} == {"request/attempt"}
    assert sent.keys == received.keys == one.keys


def test_direct_mode_needs_a_peer_to_read_from() -> None:
    with pytest.raises(RequestError, match="peer"):
        planned().into("direct", None)


def test_extra_keys_change_the_keys_of_the_blocks_they_overlap_the_incomplete_one_too() -> None:
    image = [("image-1", 17, 1)]
    plain, with_image = planned().keys, planned(extra_keys=image).keys
    assert plain[:2] == with_image[:2]
    assert plain[2] != with_image[2]
    assert partial_tokens(with_image[2]) == 4


def test_no_tokens_are_nothing_to_hand_over() -> None:
    with pytest.raises(RequestError, match="token_ids is empty"):
        Handover("r", "a", [], [], None, block_size=8, extra_keys=None, timeout=1)


def test_only_all_blocks_are_good() -> None:
    good = TaskResult(task_id="t", status=Status.OK, block_ids=[1, 2])
    assert whole(good, 2) is good
    cause = ErrorInfo("peer_lost", "rank 1: gone")
    cases = {
        "blocks_missing": TaskResult(task_id="t", status=Status.PARTIAL, block_ids=[1]),
        "peer_lost": TaskResult(task_id="t", status=Status.FAILED, error=cause),
        "busy": TaskResult(task_id="t", status=Status.BUSY, retry_after=1.0),
    }
    for code, result in cases.items():
        with pytest.raises(HandoverFailed) as failure:
            whole(result, 2)
        assert (failure.value.reason, failure.value.http_status, failure.value.result) == (code, 502, result)
    with pytest.raises(HandoverFailed) as failure:
        whole(TaskResult(task_id="t", status=Status.MISS), 2)
    assert failure.value.reason == "blocks_missing"


def test_rejected_input_is_the_callers_fault() -> None:
    rejected = TaskResult(task_id="t", status=Status.REJECTED, error=ErrorInfo("bad_id", "no such block"))
    with pytest.raises(RequestError, match="no such block") as failure:
        whole(rejected, 2)
    assert failure.value.reason == "bad_id"


@pytest.mark.parametrize("value", ["0", "1", "yes", ""])
def test_fastdeploys_variable_selects_no_mode_here(value: str) -> None:
    """With 0, FastDeploy's own default, its cache messager hands over: no daemon may open a port for that."""
    env = {"FD_PD_TRANSFER_VIA_STORAGE": value}
    assert load(env=env) == load(env={})
    assert load(overrides=["pd.mode=direct"], env=env).pd.mode == "direct"


def test_direct_tasks_are_refused_by_a_daemon_in_storage_mode() -> None:
    storage_only = limits(host_blocks=0)
    with pytest.raises(RequestError) as refusal:
        check_task(planned().out("direct"), storage_only)
    assert refusal.value.reason == "no_direct_mode"


@pytest.mark.parametrize("peer", ["nowhere", ":1", "host:", "host:0", "host:65536", "host:x"])
def test_a_peer_is_host_and_port(peer: str) -> None:
    with pytest.raises(RequestError, match="host:port"):
        check_task(planned().into("direct", peer), LIMITS)


def test_direct_tasks_need_no_storage_tier_and_touch_no_stored_object() -> None:
    no_storage = limits(host_blocks=0, storage=False, direct=True)
    for task in (planned().out("direct"), planned().into("direct", "host:1")):
        check_task(task, no_storage)
        assert not task.footprint().reads.get("storage", ())
        assert not task.footprint().writes.get("storage", ())


def test_the_same_blocks_for_another_transfer_are_another_request() -> None:
    one = planned()
    other = Handover("other", "other/attempt", TOKENS, [4, 5, 6], None, block_size=8, extra_keys=None, timeout=3.0)
    assert content_hash(one.out("direct")) != content_hash(other.out("direct"))
    assert content_hash(one.out("direct")) == content_hash(planned().out("direct"))
