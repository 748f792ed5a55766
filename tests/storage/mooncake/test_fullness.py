"""Why a pool has no room: in words, from two looks; and what a real pool says when it is small, leased or pinned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.harness import Harness, Open, mooncake_config, pool_storage
from tests.support.simulation.pool import SIM_MASTER, SimPool
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.config import MooncakeStorageSection
from transferd.errors import StorageFull, StorageUnavailable
from transferd.storage.base import STORED
from transferd.storage.mooncake import store
from transferd.storage.mooncake.fullness import PoolState, why_full
from transferd.storage.mooncake.master_pages import LentMemory

MIB = 1024**2
MEMORY = [
    LentMemory("a", "10.0.0.1:1", 16 * MIB, 12 * MIB, True),
    LentMemory("b", "10.0.0.2:1", 16 * MIB, 14 * MIB, True),
]


@pytest.mark.parametrize(
    ("nbytes", "before", "after", "why"),
    [
        (MIB, None, None, ""),
        (MIB, None, PoolState([], 0), "no node lends memory now"),
        (17 * MIB, None, PoolState(MEMORY, 0), "the largest segment has 16.0 MiB"),
        (MIB, None, PoolState(MEMORY, 0), "26.0 MiB of 32.0 MiB are in use"),
        (MIB, PoolState(MEMORY, 5), PoolState(MEMORY, 5), "nothing is evicted: what is there is leased by readers"),
        (MIB, PoolState(MEMORY, 5), PoolState(MEMORY, 6), "what is evicted makes room for others first"),
    ],
)
def test_why_says_which_it_is(nbytes: int, before: PoolState | None, after: PoolState | None, why: str) -> None:
    said = why_full(nbytes, before, after)
    assert why in said
    assert bool(said) is bool(why)


async def test_pages_that_do_not_answer_keep_a_put_waiting_once(
    monkeypatch: pytest.MonkeyPatch, open_storage: Open
) -> None:
    asked: list[str] = []

    def unanswered(address: str) -> PoolState:
        asked.append(address)
        raise StorageUnavailable("nobody answers")

    monkeypatch.setattr(store, "read_state", unanswered)
    monkeypatch.setattr(store, "ROOM_PAUSES_S", (0.001, 0.001))
    section = MooncakeStorageSection(master_server_addr=SIM_MASTER, master_pages="10.0.0.1:9003")
    harness = await open_storage(pool_storage(section, set_up=SimPool(capacity=1).set_up))
    for _ in range(2):
        (outcome,) = await harness.put(("a", b"larger"))
        assert "NO_AVAILABLE_HANDLE" in str(outcome.error), "why is not known"
    assert asked == ["10.0.0.1:9003"]


@pytest.mark.one_loop
@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
async def test_a_real_pool_says_whether_it_is_small_or_full_of_what_is_leased(
    tmp_path: Path, open_storage: Open
) -> None:
    with Master(tmp_path / "master.log", lease_ttl="60s") as master:
        pages = f"127.0.0.1:{master.metrics_port}"
        section = mooncake_config(master.address, timeout=10.0, global_segment_size=16 * MIB, master_pages=pages)
        harness = await open_storage(pool_storage(section))
        assert "the largest segment has 16.0 MiB" in await refused(harness, "too large", 17 * MIB)
        said = ""
        for number in range(20):
            said = said or await refused(harness, f"k{number}", MIB)  # each is leased as soon as it is stored
        assert "nothing is evicted: what is there is leased by readers, or pinned" in said


async def refused(harness: Harness, name: str, nbytes: int) -> str:
    """Why an object was not stored; "" if it was."""
    harness.reuse_memory()
    (outcome,) = await harness.put((name, bytes(nbytes)))
    if outcome == STORED:
        return ""
    assert isinstance(outcome.error, StorageFull)
    return str(outcome.error)
