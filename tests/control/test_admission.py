"""Admission: every way in which a task can be impossible, and what an admitted one counts for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.control.test_dispatcher import Desk
from tests.support.bodies import least, tag_of
from tests.support.dispatch import limits, touching
from transferd.control.admission import (
    Limits,
    ResultCache,
    argument_bytes,
    check_task,
    content_hash,
    footprint_of,
    withdraws_the_rest,
)
from transferd.control.dispatcher import Dispatcher
from transferd.errors import RequestError
from transferd.tasks import (
    TASK_TYPES,
    ReadStorageTask,
    ReceiveTask,
    SendTask,
    Status,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)

LIMITS = limits(ranks=2, device_blocks=8, host_blocks=6, block_bytes=100, direct=True)
TOKENS = replace(LIMITS, token_block=4)
FLUSH = replace(TOKENS, only_flush=True)
DAY = 24 * 3600.0


def write(keys: str = "ab", ids: list[int] | None = None, **more: Any) -> WriteStorageTask:
    blocks = list(range(len(keys))) if ids is None else ids
    return WriteStorageTask(**{"task_id": "w", "keys": list(keys), "gpu_block_ids": blocks} | more)


def read(keys: str = "ab", ids: list[int] | None = None, **more: Any) -> ReadStorageTask:
    blocks = list(range(len(keys))) if ids is None else ids
    return ReadStorageTask(**{"task_id": "r", "keys": list(keys), "gpu_block_ids": blocks} | more)


def send(**more: Any) -> SendTask:
    return SendTask(**{"task_id": "s", "keys": ["a"], "gpu_block_ids": [1], "transfer_id": "t"} | more)


def receive(**more: Any) -> ReceiveTask:
    usual: dict[str, Any] = {"task_id": "c", "keys": ["a"], "gpu_block_ids": [1], "transfer_id": "t", "peer": "h:1"}
    return ReceiveTask(**usual | more)


def swap_out(gpu: list[int], cpu: list[int]) -> SwapOutTask:
    return SwapOutTask(task_id="o", gpu_block_ids=gpu, cpu_block_ids=cpu)


def swap_in(gpu: list[int], cpu: list[int]) -> SwapInTask:
    return SwapInTask(task_id="i", gpu_block_ids=gpu, cpu_block_ids=cpu)


@pytest.mark.parametrize("kind", TASK_TYPES, ids=tag_of)
def test_each_kind_of_task_is_checked_counted_and_hashed(kind: type[Task]) -> None:
    """Whatever its fields say: a kind that admission does not know has none of those that it reads."""
    task = least(kind)
    for shape in (LIMITS, TOKENS, replace(LIMITS, storage=False, direct=False, host_blocks=0)):
        with contextlib.suppress(RequestError):
            check_task(task, shape)
    assert argument_bytes(task) >= 1850
    assert content_hash(task) == content_hash(least(kind))
    field = "gpu_block_ids" if "gpu_block_ids" in kind.__struct_fields__ else "keys"
    other = msgspec.structs.replace(task, **{field: [1] if field == "gpu_block_ids" else ["other"]})
    assert content_hash(other) != content_hash(task)


def refused(task: Task, bounds: Limits = LIMITS) -> str:
    """Code and message of the refusal."""
    with pytest.raises(RequestError) as refusal:
        check_task(task, bounds)
    return f"{refusal.value.reason}: {refusal.value}"


# --- what may be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    [
        write(),
        write(ids=[3, 3]),
        write("abcdefgh"),
        read(),
        read(ids=[1, 2, 3]),
        read("aa"),
        send(),
        receive(),
        receive(peer="10.0.0.1:65535"),
        receive(peer="[::1]:1"),
        swap_out([1, 1], [2, 3]),
        swap_out([7], [5]),
        swap_in([1, 2], [3, 3]),
        swap_in([7], [5]),
        write(task_id="x"),
        write(task_id="x" * 1024),
        write(timeout=DAY),
        write(timeout=1e-9),
        send(transfer_id="t" * 1024),
        read(start_read_block_idx=5),
        read(prefix=False),
    ],
    ids=repr,
)
def test_a_task_at_the_edge_of_what_may_be_asked_is_admitted(task: Task) -> None:
    check_task(task, LIMITS)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (write(task_id=""), "bad_value: task_id must have 1 to 1024 characters, not 0"),
        (write(task_id="x" * 1025), "bad_value: task_id must have 1 to 1024 characters, not 1025"),
        (write(timeout=0.0), "bad_value: timeout must be above 0 and at most 86400 seconds, not 0.0"),
        (write(timeout=-1.0), "bad_value: timeout must be above 0 and at most 86400 seconds, not -1.0"),
        (write(timeout=86400.5), "bad_value: timeout must be above 0 and at most 86400 seconds, not 86400.5"),
        (write(timeout=float("nan")), "bad_value: timeout must be above 0 and at most 86400 seconds, not nan"),
        (write(ids=[1]), "length_mismatch: keys has 2 entries, gpu_block_ids 1"),
        (write(ids=[]), "length_mismatch: keys has 2 entries, gpu_block_ids 0"),
        (write(ids=[1, 2, 3]), "length_mismatch: keys has 2 entries, gpu_block_ids 3"),
        (write("abcdefghi", [1] * 9), "too_many_blocks: 9 blocks, but the device has only 8"),
        (write(ids=[0, 8]), "id_out_of_range: gpu_block_ids: block 8 is out of range (0 … 7)"),
        (write("abcb"), "duplicate_key: keys names one block twice: 'b'"),
        (write("ab", start_write_block_idx=-1), "bad_value: start_write_block_idx must not be negative, is -1"),
        (read(ids=[1]), "length_mismatch: keys has 2 entries, gpu_block_ids only 1"),
        (read(ids=[0, 8]), "id_out_of_range: gpu_block_ids: block 8 is out of range (0 … 7)"),
        (read(ids=[3, 3]), "duplicate_id: gpu_block_ids: block 3 occurs twice"),
        (read(start_read_block_idx=-1), "bad_value: start_read_block_idx must not be negative, is -1"),
        (swap_out([1, 2], [3]), "length_mismatch: gpu_block_ids has 2 ids, cpu_block_ids 1"),
        (swap_in([1], [3, 4]), "length_mismatch: gpu_block_ids has 1 ids, cpu_block_ids 2"),
        (swap_out([8], [1]), "id_out_of_range: gpu_block_ids: block 8 is out of range (0 … 7)"),
        (swap_out([1], [6]), "id_out_of_range: cpu_block_ids: block 6 is out of range (0 … 5)"),
        (swap_out([1, 2], [3, 3]), "duplicate_id: cpu_block_ids: block 3 occurs twice"),
        (swap_in([2, 2], [3, 4]), "duplicate_id: gpu_block_ids: block 2 occurs twice"),
        (
            receive(prefix=False),
            "prefix_only: prefix = false is impossible here: a direct transfer moves leading blocks only",
        ),
        (send(transfer_id=""), "bad_value: transfer_id must have 1 to 1024 characters"),
        (receive(transfer_id="t" * 1025), "bad_value: transfer_id must have 1 to 1024 characters"),
        *(
            (receive(peer=peer), f"bad_value: peer must be host:port, not {peer!r}")
            for peer in (
                "",
                "host",
                ":1",
                "host:",
                "host:x",
                "host:-1",
                "host:0",
                "host:65536",
                "host:70000",
                "host:²",
                "host:١",
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_task_is_refused_with_a_code_and_the_value_that_is_wrong(task: Task, told: str) -> None:
    assert refused(task) == told


def test_an_endless_timeout_is_refused() -> None:
    assert refused(write(timeout=float("inf"))).startswith("bad_value: timeout")


@pytest.mark.parametrize(
    "chains",
    [[(1, 0, "")], [(0, 0, ""), (0, 1, "a")], [(0, 0, ""), (2, 1, "a")], [(0, -1, "")], [(0, 0, ""), (1, -1, "")]],
    ids=str,
)
def test_chains_that_cannot_be_are_refused(chains: list[tuple[int, int, str]]) -> None:
    for task in (write(chains=chains), read(chains=chains)):
        assert refused(task).startswith("bad_value: chains must begin at ascending positions of keys, the first at 0")
    check_task(write(chains=[(0, 0, ""), (1, 7, "x" * 1024)]), LIMITS)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ((-1, 5), "after names timeline -1; a rank has 0 to 15"),
        ((16, 5), "after names timeline 16; a rank has 0 to 15"),
        ((99, 5), "after names timeline 99; a rank has 0 to 15"),
        ((0, -1), "after names the number -1, which is not from 1 to 2^63 - 2"),
        ((0, 0), "after names the number 0, which is not from 1 to 2^63 - 2"),
        ((0, 2**63 - 1), f"after names the number {2**63 - 1}, which is not from 1 to 2^63 - 2"),
        ((0, 2**63), f"after names the number {2**63}, which is not from 1 to 2^63 - 2"),
    ],
)
def test_a_timeline_or_number_that_cannot_be_is_refused(after: tuple[int, int], told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)) as raised:
        check_task(write(after=after), LIMITS)
    assert raised.value.reason == "bad_value"


@pytest.mark.parametrize("after", [(0, 1), (15, 2**63 - 2)])
def test_the_first_and_last_timeline_and_number_are_good(after: tuple[int, int]) -> None:
    desk = Desk(LIMITS)
    desk.submit(write(after=after))
    assert desk.started == ["w"]


def test_an_error_quotes_at_most_80_characters() -> None:
    long = "p" * 100
    assert refused(receive(peer=long)) == f"bad_value: peer must be host:port, not {'p' * 80!r}"
    twice = WriteStorageTask(task_id="w", keys=[long, long], gpu_block_ids=[1, 2])
    assert refused(twice) == f"duplicate_key: keys names one block twice: {'p' * 80!r}"


def test_a_port_of_thousands_of_digits_is_refused_like_any_other() -> None:
    assert refused(receive(peer="host:" + "9" * 5000)).startswith("bad_value: peer must be host:port")


def test_bounds_are_given_by_name_and_never_change() -> None:
    with pytest.raises(AttributeError):
        LIMITS.ranks = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        Limits(2)  # type: ignore[call-arg]


def test_a_tier_that_this_daemon_does_not_have_is_named() -> None:
    bare = replace(LIMITS, storage=False, direct=False, host_blocks=0)
    storage = 'no_storage_tier: this daemon has no storage tier (storage.backend = "none")'
    direct = 'no_direct_mode: this daemon makes no direct transfers (pd.mode = "storage")'
    host = "no_host_tier: this daemon has no host tier (cache.host_blocks = 0)"
    assert [refused(task, bare) for task in (write(), read())] == [storage, storage]
    assert [refused(task, bare) for task in (send(), receive())] == [direct, direct]
    assert [refused(swap([1], [1]), bare) for swap in (swap_out, swap_in)] == [host, host]


def test_a_direct_transfer_needs_no_storage() -> None:
    check_task(send(), replace(LIMITS, storage=False))
    check_task(receive(), replace(LIMITS, storage=False))


# --- token-indexed storage ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [write, read])
def test_a_token_indexed_storage_is_given_the_path_up_to_the_end_of_the_last_block(make: Callable[..., Task]) -> None:
    start = "start_write_block_idx" if make is write else "start_read_block_idx"
    check_task(make(token_ids=TokenIds(range(16)), **{start: 2}), TOKENS)
    assert refused(make(token_ids=TokenIds(range(15)), **{start: 2}), TOKENS) == (
        "token_ids_too_short: 15 token_ids, blocks 2 to 4 need 16: give the whole path from its first token"
    )
    assert refused(make(), TOKENS) == "token_ids_required: token_ids are needed: storage is token-indexed"


def test_a_direct_transfer_needs_no_path_where_storage_is_token_indexed() -> None:
    check_task(send(), TOKENS)
    check_task(receive(), TOKENS)


def test_a_flush_may_name_no_device_blocks_and_more_than_there_are() -> None:
    path = TokenIds(range(36))
    check_task(write("abcdefghi", [], token_ids=path), FLUSH)
    check_task(write("abcdefghi", [1] * 9, token_ids=path), FLUSH)
    assert refused(write("ab", [1], token_ids=path), FLUSH).startswith("length_mismatch")


@pytest.mark.parametrize("exists", [True, False, None])
@pytest.mark.parametrize("ids", [[], [1, 2]])
def test_an_eviction_that_names_no_blocks_withdraws_the_rest_of_its_path(exists: bool | None, ids: list[int]) -> None:
    assert withdraws_the_rest(write("ab", ids, flush_cache_exists=exists)) is (exists is False and not ids)


# --- what an admitted task counts for -------------------------------------------------------------


def under_way(task: Task, limits: Limits) -> int:
    dispatcher = Dispatcher(limits)
    dispatcher.submit(0.0, b"client", 1, task)
    assert len(dispatcher.records) == 1
    return dispatcher.lanes.loads[task.lane].nbytes


def test_a_task_moves_its_blocks_on_every_rank_and_only_a_write_of_a_daemon_that_only_flushes_moves_nothing() -> None:
    path = TokenIds(range(36))
    assert under_way(write("abc"), LIMITS) == 3 * 100 * 2
    assert under_way(read("abc", [1, 2, 3, 4]), LIMITS) == 3 * 100 * 2
    assert under_way(swap_out([1, 2], [1, 2]), LIMITS) == 2 * 100 * 2
    assert under_way(write("abc", token_ids=path), FLUSH) == 0
    assert under_way(write("abc", token_ids=path), TOKENS) == 3 * 100 * 2
    assert under_way(read("abc", token_ids=path), FLUSH) == 3 * 100 * 2
    assert under_way(send(), FLUSH) > 0
    assert under_way(swap_out([1], [1]), FLUSH) > 0


def test_arguments_count_1850_bytes_a_task_190_a_key_150_an_id_and_the_length_of_texts_and_token_ids() -> None:
    assert argument_bytes(write("", [])) == 1850
    assert argument_bytes(write("abc")) == 1850 + 3 * 191 + 3 * 150
    assert argument_bytes(read("abc", [1, 2, 3, 4])) == 1850 + 3 * 191 + 4 * 150
    assert argument_bytes(write("", [], token_ids=TokenIds([1, 2, 3]))) == 1850 + 3 * 4
    assert argument_bytes(swap_out([1, 2], [3, 4])) == 1850 + 4 * 150
    assert argument_bytes(write("", [], salt="x" * 7, traceparent="t" * 55)) == 1850 + 7 + 55


def test_a_task_has_the_blocks_that_it_names_to_itself() -> None:
    for task in (write(), read(), send(), receive(), swap_in([1], [2]), swap_out([1], [2])):
        assert footprint_of(task, LIMITS) == task.footprint()
    assert footprint_of(read(), FLUSH) == read().footprint()


def test_a_flush_keeps_its_order_with_flushes_of_the_same_keys_and_of_the_same_tree() -> None:
    path = TokenIds([7, 8, 9, 10, 11, 12, 13, 14])
    some = footprint_of(write("ab", token_ids=path), FLUSH)
    assert some == touching(storage_writes=["index entry of a", "index entry of b"], paths_reads=["[7, 8, 9, 10]"])
    rest = footprint_of(write("a", [], token_ids=path, flush_cache_exists=False), FLUSH)
    assert rest == touching(storage_writes=["index entry of a"], paths_writes=["[7, 8, 9, 10]"])


def test_flushes_without_token_ids_are_of_one_tree() -> None:
    assert footprint_of(write("a"), FLUSH).reads == footprint_of(write("b"), FLUSH).reads != {}


# --- is it the same request? ----------------------------------------------------------------------


def test_the_content_hash_ignores_id_and_timeout() -> None:
    makers: list[Callable[..., Task]] = [write, read, send, receive]
    for make in makers:
        assert content_hash(make()) == content_hash(make(task_id="other", timeout=1.0))
    other = SwapInTask(task_id="other", gpu_block_ids=[1], cpu_block_ids=[2], timeout=1.0)
    assert content_hash(swap_in([1], [2])) == content_hash(other)
    assert content_hash(write()) == content_hash(write(shared=False))


def test_token_indexed_storage_has_no_sparse_reads() -> None:
    task = read(prefix=False, token_ids=TokenIds(range(8)))
    why = "prefix_only: prefix = false is impossible here: token-indexed storage finds leading blocks only"
    assert refused(task, TOKENS) == why
    check_task(task, LIMITS)


def test_requests_that_differ_in_anything_are_different() -> None:
    path = TokenIds([1, 2, 3])
    asked: list[Task] = [
        write(), write("ac"), write(ids=[1, 2]), write(token_ids=path), write(start_write_block_idx=1),
        write(flush_cache_exists=True), write(flush_cache_exists=False), write(shared=True),
        read(), read("ac"), read(ids=[1, 2]), read(token_ids=path), read(start_read_block_idx=1), read(prefix=False),
        send(), send(transfer_id="u"), send(start_write_block_idx=1),
        receive(), receive(transfer_id="u"), receive(start_read_block_idx=1), receive(peer="other:1"),
        swap_out([1], [2]), swap_out([2], [2]), swap_out([1], [1]), swap_in([1], [2]),
    ]  # fmt: skip
    assert len({content_hash(task) for task in asked}) == len(asked)


HOST: dict[str, Any] = {"gpu_block_ids": [], "cpu_block_ids": [4, 5]}


def test_host_blocks_are_checked_and_claimed_as_device_blocks_are() -> None:
    written, loaded = write(**HOST), read(**HOST)
    check_task(written, LIMITS)
    check_task(loaded, LIMITS)
    assert footprint_of(written, LIMITS) == touching(host_reads=[4, 5], storage_writes=["a", "b"])
    assert footprint_of(loaded, LIMITS) == touching(host_writes=[4, 5], storage_reads=["a", "b"])
    assert content_hash(written) != content_hash(write(ids=[4, 5])), "it is another request"
    assert argument_bytes(write(**HOST)) == argument_bytes(write(ids=[4, 5]))


@pytest.mark.parametrize(
    ("task", "bounds", "code"),
    [
        (write(**HOST), replace(LIMITS, host_blocks=0), "no_host_tier"),
        (write(cpu_block_ids=[4, 5]), LIMITS, "bad_value"),
        (send(cpu_block_ids=[1]), LIMITS, "bad_value"),
        (read(**HOST, after=(0, 1)), LIMITS, "bad_value"),
        (read(**HOST, token_ids=TokenIds(range(8))), TOKENS, "bad_value"),
        (read(gpu_block_ids=[], cpu_block_ids=[5, 6]), LIMITS, "id_out_of_range"),
        (read(gpu_block_ids=[], cpu_block_ids=[5]), LIMITS, "length_mismatch"),
        (write("abcdefg", gpu_block_ids=[], cpu_block_ids=[0] * 7), LIMITS, "too_many_blocks"),
        (write(salt="x", token_ids=TokenIds(range(8))), TOKENS, "no_salts"),
        (write(salt="x" * 1025, token_ids=TokenIds(range(8))), replace(TOKENS, salts=True), "bad_value"),
    ],
)
def test_host_blocks_and_salts_that_cannot_be_are_refused(task: Task, bounds: Limits, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_task(task, bounds)
    assert refused.value.reason == code


def test_a_salt_that_storage_keeps_apart_is_admitted() -> None:
    check_task(write(salt="x" * 1024, token_ids=TokenIds(range(8))), replace(TOKENS, salts=True))
    check_task(write(salt="x"), LIMITS)  # the keys cover it
    check_task(send(salt="x"), TOKENS)


@pytest.mark.parametrize(("later", "known"), [(2.9, True), (3.0, False), (3.1, False)])
def test_a_result_is_recalled_until_it_expires(later: float, known: bool) -> None:
    results = ResultCache(ttl=3.0, most=8, most_bytes=2**20)
    results.keep(TaskResult(task_id="a", status=Status.OK), content=1, memory_epoch=1, now=10.0)
    assert (results.recall("a", 10.0 + later) is not None) is known
