"""The SDK adapter against a strict double: slices, time limits, errors, names, and calls that hang."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.storage.token_harness import BLOCK, KINDS, TokenWorld, token_world, tree
from tests.support.attention_store_sdk import AttentionStoreDouble, AttentionStoreSDKError, Held, installed
from tests.support.waits import until
from transferd.config import from_tree
from transferd.errors import (
    ConfigError,
    MemoryLost,
    RequestError,
    StillRunning,
    StorageError,
    StorageUnavailable,
    TierError,
)
from transferd.runtime.compat import timeout
from transferd.storage.attention_store import sdk as adapter
from transferd.storage.attention_store import sdk as serial_executor
from transferd.storage.attention_store.own_blocks import OwnBlocks
from transferd.storage.attention_store.sdk import PACKAGE, SdkTokenStorage, load_library
from transferd.storage.registry import create_storages
from transferd.tasks import Stop, TokenIds

SDK = next(kind for kind in KINDS if kind.name == "sdk-cuda")
PATH = list(range(100, 100 + 20 * BLOCK))
WAIT_S = 20.0  # a bound, never waited out


def calls(world: TokenWorld, name: str, shard: int = 0) -> list[float | None]:
    """The time limits of one kind of call, in order."""
    assert world.double is not None
    return [timeout for each, at, timeout in world.double.calls if (each, at) == (name, shard)]


def session(world: TokenWorld) -> Any:
    assert world.double is not None
    return world.double.sessions[0]


async def test_a_write_is_cut_into_slices_each_with_the_tokens_up_to_its_end(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, slice_blocks=4, slice_timeout=3.0) as world:
        world.ranks[0].fill(list(range(10)), seed=1)
        outcome = await world.run(world.ranks[0], world.write_job(PATH, 2, list(range(10))))
        assert list(outcome.moved) == list(range(10))
        assert calls(world, "write") == [3.0, 3.0, 3.0]
        assert world.double is not None
        assert world.double.paths == [6 * BLOCK, 10 * BLOCK, 12 * BLOCK]
        await world.run(world.ranks[1], world.write_job(PATH, 2, list(range(10))))
        assert await world.match(PATH, 2) == 10


async def test_a_slice_never_gets_more_time_than_the_transfer_has(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, slice_timeout=1000.0, total_timeout=50.0) as world:
        await world.write(PATH[:BLOCK], 0, [0])
        [limit] = calls(world, "write")
        assert limit is not None
        assert 0 < limit <= 50.0
        await world.run(world.ranks[0], world.read_job(PATH[:BLOCK], 0, [1], timeout=7.0))
        [limit] = calls(world, "read")
        assert limit is not None
        assert 0 < limit <= 7.0


async def test_a_transfer_whose_time_is_used_up_ends_with_what_it_has(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, slice_blocks=1, total_timeout=1e-9) as world:
        outcome = (await world.write(PATH[: 2 * BLOCK], 0, [0, 1]))[0]
        assert list(outcome.moved) == []
        assert outcome.error is not None
        assert outcome.error.code == "expired"
        assert calls(world, "write") == []


async def test_a_write_ends_at_the_first_slice_that_is_not_taken_whole(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, slice_blocks=4) as world:
        assert world.double is not None
        world.double.most = 3
        outcome = (await world.write(PATH[: 8 * BLOCK], 0, list(range(8))))[0]
        assert list(outcome.moved) == [0, 1, 2]
        assert outcome.error is not None
        assert outcome.error.message == "AttentionStore stored only 3 of 8 blocks"
        assert len(calls(world, "write")) == 1


@pytest.mark.parametrize("call", ["read", "write"])
async def test_an_sdk_error_is_reported_with_what_was_done_before_it(tmp_path: Path, call: str) -> None:
    async with token_world(SDK, tmp_path, slice_blocks=2) as world:
        assert world.double is not None
        await world.write(PATH[: 6 * BLOCK], 0, list(range(6)))
        seen = 0

        def fail_second(name: str) -> None:
            nonlocal seen
            seen += name == call
            if name == call and seen == 2:
                raise AttentionStoreSDKError("the master is gone")

        world.double.before = fail_second
        transfer = world.read_job if call == "read" else world.write_job
        outcome = await world.run(world.ranks[0], transfer(PATH[: 6 * BLOCK], 0, list(range(6))))
        assert list(outcome.moved) == [0, 1]
        assert outcome.error is not None
        assert (outcome.error.code, outcome.error.message) == (
            "storage_error",
            f"AttentionStore, {call}: the master is gone",
        )
        assert world.storage.statistics()["errors"] == 1


async def test_an_unknown_exception_of_the_library_is_a_storage_error_that_names_it(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path) as world:
        assert world.double is not None

        def fail(name: str) -> None:
            raise RuntimeError("a bug of theirs")

        world.double.before = fail
        with pytest.raises(StorageError, match="AttentionStore, match: RuntimeError: a bug of theirs"):
            await world.match(PATH)
        with pytest.raises(StorageError, match="flush_token_index: RuntimeError"):
            await world.storage.flush_token_index(TokenIds(PATH), 0, resident=True)
        assert world.storage.statistics()["flush_errors"] == 1


async def test_an_impossible_count_is_an_error_and_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with token_world(SDK, tmp_path) as world:
        for count in (3, -1):
            monkeypatch.setattr(session(world), "read", lambda *_, count=count, **__: count)
            outcome = await world.run(world.ranks[0], world.read_job(PATH[: 2 * BLOCK], 0, [0, 1]))
            assert list(outcome.moved) == []
            assert outcome.error is not None
            assert f"reports {count} blocks for a slice of 2" in outcome.error.message


async def test_the_index_is_updated_after_reads_and_writes_once_for_the_node(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path) as world:
        await world.write(PATH[: 4 * BLOCK], 0, [0, 1, 2, 3])
        await until(lambda: len(calls(world, "flush_token_index")) == 1)
        assert world.on_device(PATH[: 4 * BLOCK]) == [False] * 4
        await world.read(PATH[: 3 * BLOCK], 1, [5, 6])
        await until(lambda: world.on_device(PATH[: 4 * BLOCK]) == [False, True, True, False])
        await world.write(PATH[: 2 * BLOCK], 1, [5])
        await until(lambda: world.on_device(PATH[: 4 * BLOCK]) == [False, False, True, False])
        assert calls(world, "flush_token_index", shard=1) == []


async def test_a_failed_update_of_the_index_after_a_read_fails_no_task(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path) as world:
        assert world.double is not None
        await world.write(PATH[:BLOCK], 0, [0])
        await until(lambda: len(calls(world, "flush_token_index")) == 1)
        assert isinstance(world.storage, SdkTokenStorage)
        await world.storage._background.settled()  # so that only the update after the read fails

        def fail(name: str) -> None:
            if name == "flush_token_index":
                raise AttentionStoreSDKError("no index today")

        world.double.before = fail
        outcome = await world.run(world.ranks[0], world.read_job(PATH[:BLOCK], 0, [1]))
        assert (list(outcome.moved), outcome.error) == ([0], None)
        await until(lambda: world.storage.statistics()["flush_errors"] == 1)


async def test_a_flush_that_hangs_delays_no_transfer_and_no_question_and_is_named_at_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "CLOSE_WAIT_S", 0.01)
    double = AttentionStoreDouble()
    held = Held(double, "flush_token_index")
    try:
        with pytest.raises(StillRunning, match=r"transferd-as-0-index-0: flush, "):
            await _use_beside(held, tmp_path, double)
    finally:
        held.go.set()


async def _use_beside(held: Held, path: Path, double: AttentionStoreDouble) -> None:
    async with token_world(SDK, path, double=double) as world:
        outcome = (await world.write(PATH[: 2 * BLOCK], 0, [0, 1]))[0]
        assert list(outcome.moved) == [0, 1]
        await until(held.begun.is_set)
        outcome = (await world.read(PATH[: 2 * BLOCK], 0, [2, 3]))[0]
        assert list(outcome.moved) == [0, 1]
        async with timeout(WAIT_S / 2):
            assert await world.match(PATH) == 2


async def test_flushes_behind_a_hung_one_are_bounded_and_further_ones_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "CLOSE_WAIT_S", 0.01)
    monkeypatch.setattr(serial_executor, "MOST_WAITING", 3)
    double = AttentionStoreDouble()
    held = Held(double, "flush_token_index")
    try:
        async with token_world(SDK, tmp_path, double=double) as world:
            await world.write(PATH[:BLOCK], 0, [0])
            await until(held.begun.is_set)
            for _ in range(5):
                assert list((await world.read(PATH[:BLOCK], 0, [1]))[0].moved) == [0]
            await until(lambda: world.storage.statistics()["flush_errors"] == 2)
            with pytest.raises(StorageUnavailable, match="a call hangs and 3 more wait behind it"):
                await world.storage.flush_token_index(TokenIds(PATH), 0, resident=True)
            held.go.set()
    finally:
        held.go.set()


async def test_a_stop_waits_for_the_call_under_way_and_begins_no_other(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, slice_blocks=2) as world:
        assert world.double is not None
        held = Held(world.double, "write")
        job = world.write_job(PATH[: 6 * BLOCK], 0, list(range(6)))
        writing = asyncio.ensure_future(world.run(world.ranks[0], job))
        await until(held.begun.is_set)
        job.stop.set(Stop.CANCELLED)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done()  # the SDK may still be reading device blocks
        held.go.set()
        outcome = await writing
        assert (list(outcome.moved), outcome.stop, outcome.error) == ([0, 1], Stop.CANCELLED, None)
        assert len(calls(world, "write")) == 1


async def test_a_stop_takes_back_a_call_whose_turn_has_not_come(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path) as world:
        assert world.double is not None
        held = Held(world.double, "write")
        first = asyncio.ensure_future(world.run(world.ranks[0], world.write_job(PATH[:BLOCK], 0, [0])))
        await until(held.begun.is_set)
        job = world.write_job(PATH[: 2 * BLOCK], 0, [1, 2])
        second = asyncio.ensure_future(world.run(world.ranks[0], job))
        await asyncio.sleep(0)
        job.stop.set(Stop.EXPIRED)
        outcome = await second
        assert (list(outcome.moved), outcome.stop) == ([], Stop.EXPIRED)
        held.go.set()
        assert list((await first).moved) == [0]
        assert len(calls(world, "write")) == 1


async def test_loads_do_not_wait_for_stores(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path) as world:
        assert world.double is not None
        await world.write(PATH[:BLOCK], 0, [0])
        held = Held(world.double, "write")
        writing = asyncio.ensure_future(world.run(world.ranks[0], world.write_job(PATH[:BLOCK], 0, [0])))
        await until(held.begun.is_set)
        assert list((await world.run(world.ranks[0], world.read_job(PATH[:BLOCK], 0, [1]))).moved) == [0]
        assert await world.match(PATH) == 1
        held.go.set()
        await writing


async def test_the_start_waits_until_the_sdk_has_found_the_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "READY_PAUSE_S", 0.001)
    double = AttentionStoreDouble(not_ready=5)
    async with token_world(SDK, tmp_path, double=double) as world:
        assert await world.match(PATH) == 0
    assert [name for name, _, _ in double.calls].count("match") >= 7


async def test_a_start_gives_up_on_an_sdk_that_never_becomes_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "READY_PAUSE_S", 0.001)
    with pytest.raises(StorageUnavailable, match=r"was not ready within 0\.01 s: .*cuda memory not ready"):
        async with token_world(SDK, tmp_path, double=AttentionStoreDouble(not_ready=10**9), ready_timeout=0.01):
            pass


async def test_a_start_that_fails_otherwise_fails_at_once(tmp_path: Path) -> None:
    double = AttentionStoreDouble()

    def fail(name: str) -> None:
        raise AttentionStoreSDKError("wrong licence")

    double.before = fail
    with pytest.raises(StorageError, match="wrong licence"):
        async with token_world(SDK, tmp_path, double=double):
            pass


async def test_sessions_are_named_and_shaped_as_fastdeploy_does_it(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, dp_id=2, pod_name="pod-7_mixed_2", model_version="v3") as world:
        assert world.double is not None
        layout = world.ranks[0].context.layout
        for rank, each in enumerate(world.double.sessions):
            assert each.names == ("demo", "pod-7_mixed_2", "v3")
            assert (each.shard, each.layers, each.block_token_size) == (rank, 3, BLOCK)
            assert (each.key_bytes, each.value_bytes) == tuple(plane.nbytes for plane in layout.planes)
            assert (each.device_id, each.dp_id) == (rank, 2)


async def test_another_generation_is_refused_because_the_sdk_could_not_keep_it_apart(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path) as world:
        world.storage.check_generation("RL-1")
        with pytest.raises(RequestError, match="AS_MODEL_VERSION") as refusal:
            world.storage.check_generation("RL-2")
        assert refusal.value.reason == "fixed_generation"


# --- configuration --------------------------------------------------------------------------------


def test_without_the_sdk_the_driver_is_one_line_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention_store\.driver: needs the Python package attentionstore_sdk"):
        create_storages(from_tree(tree(tmp_path, driver="sdk")))


def test_an_sdk_of_another_version_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(AttentionStoreDouble()) as double:
        monkeypatch.delattr(sys.modules[f"{PACKAGE}.sdk"], "Tokens")
        with pytest.raises(ConfigError, match=r"unsupported version: .*Tokens"):
            load_library()
        assert double.sessions == []


@pytest.mark.parametrize("cache", [{"attention": "mla"}, {"attention": "dsa"}, {"dtype": "block_wise_fp8"}])
def test_a_layout_that_the_sdk_cannot_store_is_refused_at_start(tmp_path: Path, cache: dict[str, str]) -> None:
    sections = tree(tmp_path, driver="sdk")
    sections["cache"] |= cache
    with (
        installed(AttentionStoreDouble()),
        pytest.raises(ConfigError, match="stores only the planes key and value"),
    ):
        create_storages(from_tree(sections))


@pytest.mark.parametrize("cache", [{"attention": "mla"}, {"attention": "dsa"}, {"dtype": "block_wise_fp8"}])
async def test_flush_only_serves_every_layout_since_no_byte_moves(tmp_path: Path, cache: dict[str, str]) -> None:
    """FastDeploy allows it, too."""
    async with token_world(SDK, tmp_path, cache=cache, only_flush=True) as world:
        assert world.double is not None
        planes = {plane.name: plane.nbytes for plane in world.ranks[0].context.layout.planes}
        for each in world.double.sessions:
            assert (each.key_bytes, each.value_bytes) == (planes["key"], planes.get("value", planes["key"]))
        await world.storage.flush_token_index(TokenIds(PATH), 0, resident=True)
        assert all(world.on_device(PATH))
        read = await world.read(PATH, 0, [0, 1])
        assert all("no bytes of this layout move" in str(each.error) for each in read)


@pytest.mark.parametrize("error", [MemoryLost("truncated"), TierError("process_vm_readv is refused")])
async def test_blocks_that_cannot_be_copied_are_part_of_the_outcome_with_what_was_done_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TierError
) -> None:
    shared = next(kind for kind in KINDS if kind.shared)
    async with token_world(shared, tmp_path, slice_blocks=2) as world:
        rank, copied = world.ranks[0], 0
        real = OwnBlocks.copy_out

        def copy_out(own: OwnBlocks) -> None:
            nonlocal copied
            copied += 1
            if copied == 2:
                raise error
            real(own)

        monkeypatch.setattr(OwnBlocks, "copy_out", copy_out)
        outcome = await world.run(rank, world.write_job(PATH, 0, list(range(6))))
        assert outcome.error is not None
        assert (list(outcome.moved), outcome.error.code, outcome.lost) == (
            [0, 1],
            error.reason,
            isinstance(error, MemoryLost),
        )
        assert copied == 2
