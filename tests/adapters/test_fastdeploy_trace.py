"""FastDeploy's order of calls over the adapter: 4 ranks, real conversations, every byte; then every rank fails once.

The trace is not part of the repository: it is looked for beside it, or where TRANSFERD_TEST_TRACE says.
TRANSFERD_TEST_REQUESTS says how many of its requests are played.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.adapters.prefix_cache_manager import PrefixCacheManager
from tests.support.sabotage import FILE_VARIABLE, Operation, Saboteur
from transferd.adapters.fastdeploy import EngineCacheQueue
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.trace import generated_workload, read_trace
from transferd.client.launch import running
from transferd.tasks import Status

RANKS = 4
BESIDE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
TRACE = Path(os.environ.get("TRANSFERD_TEST_TRACE", BESIDE))
REQUESTS = int(os.environ.get("TRANSFERD_TEST_REQUESTS", "1000"))
SABOTAGED = "tests.support.sabotage:SabotagedStorage"
BLOCK_TOKENS = 8
SETTINGS: dict[str, Any] = {
    "cache": {
        "ranks": RANKS,
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "block_size": BLOCK_TOKENS,
        "device": "tests.support.sabotage:SabotagedDevice",
    },
    "host": {"staging": "512KiB"},
}
small_pools = pytest.mark.parametrize("blocks", [(32, 96)], indirect=True, ids=["small pools"])
KEYED = {"backend": SABOTAGED, "memory": {"capacity": "1GiB"}}
SEED = 20


@pytest.fixture
def saboteur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    order = tmp_path / "order"
    monkeypatch.setenv(FILE_VARIABLE, str(order))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    return Saboteur(order)


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """[storage] of the daemon."""
    return dict(getattr(request, "param", KEYED))


@pytest.fixture
def blocks(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Device and host blocks. The longest request of the trace has 239."""
    device, host = getattr(request, "param", (288, 2048))
    return device, host


@pytest.fixture
def queue(
    tmp_path: Path, saboteur: Saboteur, storage: dict[str, Any], blocks: tuple[int, int]
) -> Iterator[EngineCacheQueue]:
    cache = SETTINGS["cache"] | {"device_blocks": blocks[0], "host_blocks": blocks[1]}
    with running(SETTINGS | {"cache": cache, "storage": storage}, tmp_path) as daemon:
        made = EngineCacheQueue(daemon.endpoint, num_client=RANKS, client_id=0)
        yield made
        made.close()


@pytest.fixture
def manager(queue: EngineCacheQueue, storage: dict[str, Any], blocks: tuple[int, int]) -> Iterator[PrefixCacheManager]:
    data = KvData([queue.client.attach(rank) for rank in range(RANKS)])
    by_tokens = storage.get("attention_store", {})
    playing = PrefixCacheManager(
        queue,
        data,
        *blocks,
        block_tokens=BLOCK_TOKENS if by_tokens else 0,
        only_flush=by_tokens.get("only_flush", False),
    )
    yield playing
    playing.close()


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no {TRACE.name} beside the repository")
@pytest.mark.timeout(600)
def test_a_trace_of_conversations_goes_through_every_tier_and_every_byte_is_right(manager: PrefixCacheManager) -> None:
    for request in read_trace(TRACE, REQUESTS):
        manager.request(request.hash_ids)
    manager.verify_all()
    counts = manager.counts
    print(dict(counts), {f"{kind} {status}": count for (kind, status), count in manager.statuses.items()})
    assert counts["requests"] == REQUESTS
    for what in ("device hits", "host hits", "storage hits", "computed", "written", "swapped out", "flushes"):
        assert counts[what] > 0, what
    assert not manager.failures
    flushed(manager, Status.REJECTED)  # there is no token index to tell


@pytest.mark.parametrize(
    "storage",
    [{"backend": "attention_store", "attention_store": {"data": SABOTAGED, "only_flush": False}}],
    indirect=True,
    ids=["token-indexed"],
)
@small_pools
def test_blocks_are_found_by_their_tokens_and_every_byte_is_right(manager: PrefixCacheManager) -> None:
    for request in generated_workload(SEED, 250):
        manager.request(request.hash_ids)
    manager.verify_all()
    for what in ("device hits", "host hits", "storage hits", "written", "swapped out"):
        assert manager.counts[what] > 0, what
    assert not manager.failures


@pytest.mark.parametrize(
    "storage",
    [{"backend": "attention_store", "attention_store": {"data": "none", "only_flush": True}}],
    indirect=True,
    ids=["flush-only"],
)
@small_pools
def test_with_flush_only_the_index_says_what_this_node_has_and_nothing_is_moved(
    manager: PrefixCacheManager, queue: EngineCacheQueue
) -> None:
    workload = generated_workload(SEED, 250)
    for request in workload:
        manager.request(request.hash_ids)
    manager.verify_all()
    assert manager.counts["flushes"] > 0
    assert not manager.failures
    flushed(manager, Status.OK)
    for request in workload[::5]:
        located = queue.client.locate(manager.tokens(request.hash_ids))
        here = manager.on_this_node(request.hash_ids)
        assert {node["any"] for node in located.values()} == ({here} if here else set())
    lanes = queue.client.stats()["ranks"][0]["lanes"]
    assert lanes["write"]["bytes"] == lanes["read"]["bytes"] == 0


def flushed(manager: PrefixCacheManager, status: Status) -> None:
    """Every flush was answered, this way."""
    manager.close()
    assert manager.flushed == {status: manager.counts["flushes"]}


OPERATIONS: list[tuple[Operation, Literal["fail", "stall"], tuple[str, ...]]] = [
    ("copy_out", "fail", ("SWAP2CPU", "GPU2STORAGE")),
    ("copy_in", "fail", ("SWAP2GPU", "STORAGE2GPU")),
    ("exists", "fail", ("STORAGE2GPU", "GPU2STORAGE")),
    ("put", "fail", ("GPU2STORAGE",)),
    ("get", "fail", ("STORAGE2GPU",)),
    ("exists", "stall", ("STORAGE2GPU", "GPU2STORAGE")),
    ("put", "stall", ("GPU2STORAGE",)),
    ("get", "stall", ("STORAGE2GPU",)),
]


@small_pools
@pytest.mark.parametrize(
    "storage",
    [KEYED | {"key_schema": schema} for schema in ("transferd", "fastdeploy")],
    indirect=True,
    ids=["transferd", "fastdeploy"],
)
def test_each_rank_fails_at_each_operation_and_every_call_returns_in_time_with_the_truth(
    manager: PrefixCacheManager, saboteur: Saboteur
) -> None:
    workload = iter(generated_workload(SEED, 400))

    def play(requests: int) -> None:
        for _ in range(requests):
            manager.request(next(workload).hash_ids)

    play(60)  # until every tier is full and blocks come back from each of them
    for number, (operation, how, concerned) in enumerate(OPERATIONS):
        before = manager.failures.copy()
        manager.sound = False
        manager.timeout = 20.0 if how == "fail" else 0.05
        with saboteur.order(operation, number % RANKS, how):
            play(12)
        failed = manager.failures - before
        for event in concerned:
            assert any(kind == event for kind, _ in failed), (
                f"{event} saw nothing of {operation}: {failed} (seed {SEED})"
            )
        ends = {Status.FAILED, Status.PARTIAL} if how == "fail" else {Status.EXPIRED, Status.PARTIAL}
        assert {status for _, status in failed} <= ends
        manager.sound, manager.timeout = True, 20.0
        play(6)  # the failure is over, and so is its effect
        manager.verify_all()
