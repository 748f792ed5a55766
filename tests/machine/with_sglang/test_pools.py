"""TransferdHiCache on SGLang's real host pools, by bytes: every layout, several ranks, several pools, lost daemons."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from tests.machine.with_sglang import pools
from tests.machine.with_sglang.pools import KEYS, LOADED, STORED
from tests.support.waits import wait_until

pytestmark = pytest.mark.usefixtures("place")

Make = Callable[[str], Any]

LAYOUTS = [
    *[pytest.param(pools.mha, layout, False, id=f"mha-{layout}") for layout in pools.MHA_LAYOUTS],
    *[pytest.param(pools.mla, layout, True, id=f"mla-{layout}") for layout in pools.MLA_LAYOUTS],
]


def daemon_of(backend: Any) -> int:
    process = backend._rank.pools["kv"].link._companion.started.process
    assert process is not None
    return int(process.pid)


@pytest.mark.parametrize(("make", "layout", "is_mla"), LAYOUTS)
def test_a_server_gets_the_bytes_that_an_earlier_one_stored(make: Make, layout: str, is_mla: bool) -> None:
    first, second = make(layout), make(layout)
    pools.fill(first, STORED, seed=5)
    one = pools.backend(first, pools.config(is_mla=is_mla))
    assert one.batch_exists(KEYS) == 0
    assert one.batch_set_v1(KEYS, pools.indices(STORED)) == [True] * len(KEYS)
    one.close()  # its daemon ends with it
    other = pools.backend(second, pools.config(is_mla=is_mla))
    pools.check_loads(other, second, first)
    other.close()


def test_ranks_have_pages_of_their_own_unless_the_cache_is_the_same_on_all() -> None:
    halves = [pools.mha("page_first") for _ in range(2)]
    ranks = [pools.backend(half, pools.config(rank=rank, ranks=2)) for rank, half in enumerate(halves)]
    for rank, half in enumerate(halves):
        pools.fill(half, STORED, seed=rank)
    assert all(ranks[0].batch_set_v1(KEYS, pools.indices(STORED)))
    assert all(ranks[1].batch_set_v1(KEYS[:13], pools.indices(STORED[:13])))
    assert [rank.batch_exists(KEYS) for rank in ranks] == [20, 13]  # SGLang takes the least
    for rank, half in zip(ranks, halves, strict=True):
        assert rank.batch_get_v1(KEYS[:1], pools.indices([4])) == [True]
        assert pools.read(half, 4) == pools.read(half, STORED[0])
    assert pools.read(halves[0], 4) != pools.read(halves[1], 4)
    whole = [pools.mla("page_first") for _ in range(2)]
    said = [pools.config(rank=rank, ranks=2, is_mla=True, name="whole") for rank in range(2)]
    same = [pools.backend(one, config) for one, config in zip(whole, said, strict=True)]
    pools.fill(whole[0], STORED, seed=9)
    assert all(same[0].batch_set_v1(KEYS, pools.indices(STORED)))
    assert same[1].batch_exists(KEYS) == 20
    assert all(same[1].batch_get_v1(KEYS, pools.indices(LOADED)))
    assert [pools.read(whole[1], page) for page in LOADED] == [pools.read(whole[0], page) for page in STORED]
    for backend in reversed([*ranks, *same]):  # the first one's daemon serves all
        backend.close()


def transfer(name: PoolName, keys: list[str], pages: list[int], policy: PoolHitPolicy) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=pools.indices(pages), hit_policy=policy)


def test_several_pools_have_answers_of_their_own() -> None:
    full, window = pools.mha("page_first"), pools.mha("layer_first", layers=2)
    backend = pools.backend(full, pools.config(), swa=window)
    pools.fill(full, STORED, seed=1)
    pools.fill(window, STORED, seed=2)
    assert all(backend.batch_set_v1(KEYS, pools.indices(STORED)))
    trailing = PoolHitPolicy.TRAILING_PAGES
    kept = [4, 5, 6, 11, 12]  # of the sliding window
    stored = transfer(PoolName.SWA, [KEYS[i] for i in kept], [STORED[i] for i in kept], trailing)
    assert backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * len(kept)}
    asked = PoolTransfer(name=PoolName.SWA, keys=KEYS[:2], hit_policy=trailing)  # a window of two pages
    found = backend.batch_exists_v2([*KEYS, "d" * 64], [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (13, [6, 7, 13])
    assert found.extra_pool_hit_pages == {PoolName.KV: 20, PoolName.SWA: 13}
    every = PoolTransfer(name=PoolName.SWA, keys=KEYS, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    loaded = transfer(PoolName.SWA, [KEYS[11], KEYS[13], KEYS[12]], [10, 15, 16], trailing)
    assert backend.batch_get_v2([loaded]) == {PoolName.SWA: [True, False, True]}
    assert pools.read(window, 10) == pools.read(window, STORED[11])
    assert pools.read(window, 16) == pools.read(window, STORED[12])
    assert pools.read(full, 10) == bytes([pools.STALE]) * len(pools.read(full, 10)), "another pool's page"
    backend.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_deepseek_v4_has_a_main_pool_without_memory_and_the_pools_beside_it_decide(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = [""]
    monkeypatch.setattr("transferd.adapters.sglang.weights.of_sglang", lambda: (version[0], 0))
    made = pools.deepseek_v4(layout)
    main, beside = made["kv"], {name: pool for name, pool in made.items() if name != "kv"}
    backend = pools.backend(main, pools.config(is_mla=True), **made)
    assert backend._rank.pools.keys() == {"deepseek_v4", "deepseek_v4_state", "swa"}, "not one for each pool"
    every = [PoolTransfer(name=name, keys=KEYS, host_indices=pools.indices(STORED)) for name in beside]
    assert (backend.batch_exists(KEYS), backend.batch_exists_v2(KEYS, []).kv_hit_pages) == (0, 0)
    assert backend.batch_exists_v2(KEYS, every).kv_hit_pages == 0
    before = {name: pools.filled(pool, STORED, seed) for seed, (name, pool) in enumerate(beside.items())}
    assert backend.batch_set_v1(KEYS, pools.indices(STORED)) == [True] * 20
    assert backend.batch_set_v2(every) == {name: [True] * 20 for name in beside}
    found = backend.batch_exists_v2([*KEYS, "d" * 64], every)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (20, dict.fromkeys(beside, 20))
    asked = [PoolTransfer(name=name, keys=KEYS, host_indices=pools.indices(LOADED)) for name in beside]
    assert backend.batch_get_v1(KEYS, pools.indices(LOADED)) == [True] * 20
    assert backend.batch_get_v2(asked) == {name: [True] * 20 for name in beside}
    for name, pool in beside.items():
        assert [bytes(piece) for piece in pools.pieces(pool, LOADED)] == before[name]
        assert all((piece == pools.STALE).all() for piece in pools.pieces(pool, [4, 8, 10]))
    version[0] = "step-2"
    assert not any(any(one) for one in backend.batch_set_v2(every).values()), "KV of the old weights"
    for pool in made.values():
        pool.clear()  # as SGLang's flush does
    assert backend.batch_set_v2(every) == {name: [True] * 20 for name in beside}
    backend.close()


def test_a_killed_daemon_costs_hits_and_the_next_one_is_used() -> None:
    pool = pools.mha("page_first")
    pools.fill(pool, STORED, seed=3)
    backend = pools.backend(pool, pools.config())
    stored = [pools.read(pool, page) for page in STORED]
    assert all(backend.batch_set_v1(KEYS, pools.indices(STORED)))
    os.kill(killed := daemon_of(backend), signal.SIGKILL)
    assert backend.batch_get_v1(KEYS, pools.indices(LOADED)) in ([False] * 20, [True] * 20)
    link = backend._rank.pools["kv"].link
    wait_until(lambda: link.ready and daemon_of(backend) != killed, "no new daemon", within=60)
    assert backend.batch_exists(KEYS) == 20
    assert all(backend.batch_get_v1(KEYS, pools.indices(LOADED)))
    assert [pools.read(pool, page) for page in LOADED] == stored
    backend.close()


def test_damaged_objects_are_misses(place: Path) -> None:
    pool = pools.mha("page_first")
    pools.fill(pool, STORED, seed=4)
    stored = [pools.read(pool, page) for page in STORED]
    backend = pools.backend(pool, pools.config())
    assert all(backend.batch_set_v1(KEYS, pools.indices(STORED)))
    blocks = (place / "cache" / "transferd" / "sglang" / "blocks").rglob("*")
    files = sorted(one for one in blocks if one.is_file() and one.stat().st_size > len(stored[0]))
    assert len(files) == 20
    for file in files[:5]:
        damaged = bytearray(file.read_bytes())
        damaged[100] ^= 0x40
        file.write_bytes(damaged)
    got = backend.batch_get_v1(KEYS, pools.indices(LOADED))
    assert got.count(False) == 5
    for there, page, content in zip(got, LOADED, stored, strict=True):
        assert not there or pools.read(pool, page) == content
    backend.close()


def test_clear_removes_what_this_model_has_stored_and_nothing_else() -> None:
    pool, others = pools.mha("page_first"), pools.mha("page_first")
    backend = pools.backend(pool, pools.config())
    other = pools.backend(others, pools.config(model="another", name="another"))
    for one in (backend, other):
        assert all(one.batch_set_v1(KEYS, pools.indices(STORED)))
    backend.clear()
    assert (backend.batch_exists(KEYS), other.batch_exists(KEYS)) == (0, 20)
    assert all(backend.batch_set_v1(KEYS, pools.indices(STORED)))
    assert backend.batch_exists(KEYS) == 20
    other.close()
    backend.close()


def test_new_weights_find_nothing_of_the_old_ones_and_pages_of_old_kv_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = [""]
    monkeypatch.setattr("transferd.adapters.sglang.weights.of_sglang", lambda: (version[0], 0))
    pool = pools.mha("page_first")
    backend = pools.backend(pool, pools.config())
    assert all(backend.batch_set_v1(KEYS, pools.indices(STORED)))
    version[0] = "step-2"
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS[:3], pools.indices(STORED[:3])) == [False] * 3, "SGLang has not emptied its pools"
    pool.clear()  # as SGLang's flush does
    assert all(backend.batch_set_v1(KEYS[:3], pools.indices(STORED[:3])))
    assert backend.batch_exists(KEYS) == 3
    version[0] = ""
    assert backend.batch_exists(KEYS) == 20
    backend.close()


@pytest.mark.parametrize(("make", "layout", "is_mla"), LAYOUTS)
def test_private_memory_is_copied(make: Any, layout: str, is_mla: bool) -> None:
    first, second = make(layout), make(layout, allocator="default")
    pools.fill(first, STORED, seed=6)
    one = pools.backend(first, pools.config(is_mla=is_mla))
    assert all(one.batch_set_v1(KEYS, pools.indices(STORED)))
    other = pools.backend(second, pools.config(is_mla=is_mla, buffer="64KiB"))
    assert other.batch_get_v1(KEYS, pools.indices(LOADED)) == [True] * 20
    assert [pools.read(second, page) for page in LOADED] == [pools.read(first, page) for page in STORED]
    untouched = bytes([pools.STALE]) * len(pools.read(second, 0))
    assert all(pools.read(second, page) == untouched for page in range(0, 40, 2))
    other.close()
    one.close()


def test_the_figures_for_sglangs_metrics_are_given_once() -> None:
    pool = pools.mha("page_first")
    backend = pools.backend(pool, pools.config())
    backend.batch_set_v1(KEYS, pools.indices(STORED))
    backend.batch_get_v1(KEYS[:7], pools.indices(LOADED[:7]))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([20], [7])
    assert all(speed > 0 for speed in (*stats.backup_bandwidth, *stats.prefetch_bandwidth))
    assert not backend.get_stats().backup_pgs
    backend.close()
