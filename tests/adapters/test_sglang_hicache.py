"""TransferdHiCache over a real daemon that it starts, without SGLang: its interface, its memory, its settings."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fake_sglang as sglang
from tests.support.page_cache import forget, tells_what_it_has
from tests.support.waits import wait_until
from transferd.adapters.sglang import identity, pools
from transferd.adapters.sglang.settings import settings
from transferd.errors import ConfigError, TierError

pytestmark = pytest.mark.one_loop

EXTRA = {
    "backend_name": "transferd",
    "module_path": "transferd.adapters.sglang",
    "class_name": "TransferdHiCache",
    "interface_v1": 1,
    "allocator": "shm",
    "weights": "tiny",
}
TOGETHER = ("deepseek_v4_c4", "deepseek_v4_c128", "deepseek_v4_c4_state", "deepseek_v4_c128_state")
KEYS = [f"{number:064x}" for number in range(8)]
STORED, LOADED = [3, 0, 23, 7, 12, 5, 9, 1], [2, 4, 6, 8, 10, 14, 16, 18]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes backends as SGLang does, and closes them."""
    place = Path(tempfile.mkdtemp(prefix="ts."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    made: list[Any] = []
    with sglang.installed():
        from transferd.adapters.sglang import TransferdHiCache

        def backend(*pools_of_it: sglang.HostPool, extra: dict[str, Any] | None = None, **config: Any) -> Any:
            beside = {name: config.pop(name) for name in TOGETHER if name in config}
            said = sglang.HiCacheStorageConfig(extra_config=EXTRA | (extra or {}), **config)
            one = TransferdHiCache(said, {})
            made.append(one)
            one.register_mem_pool_host(pools_of_it[0])
            one.register_mem_host_pool_v2(pools_of_it[0], "kv")  # SGLang names the main pool once more
            for number, pool in enumerate(pools_of_it[1:]):
                one.register_mem_host_pool_v2(pool, ("swa", "mamba")[number])
            for name, pool in beside.items():
                one.register_mem_host_pool_v2(pool, name)
            one.on_host_pools_registered()
            return one

        yield backend
        for one in reversed(made):  # the first one's daemon serves all
            one.close()
    shutil.rmtree(place, ignore_errors=True)


def filled(seed: int, *, private: bool = False) -> sglang.HostPool:
    pool = sglang.HostPool(private=private)
    pool.bytes[:, STORED] = np.random.default_rng(seed).integers(0, 256, (2, len(STORED), sglang.PIECE), dtype=np.uint8)
    return pool


def test_each_page_has_an_answer_and_its_bytes_and_nothing_else_is_touched(make: Callable[..., Any]) -> None:
    pool = filled(1)
    backend = make(pool)
    before = pool.bytes.copy()
    assert backend.batch_set_v1(KEYS, sglang.indices(STORED)) == [True] * 8
    assert (backend.batch_exists([*KEYS, "x"]), backend.exists(KEYS[3]), backend.exists("x")) == (8, True, False)
    wanted = [*KEYS[:3], "x", *KEYS[4:]]
    assert backend.batch_get_v1(wanted, sglang.indices(LOADED)) == [True, True, True, False, True, True, True, True]
    before[:, [page for i, page in enumerate(LOADED) if i != 3]] = before[
        :, [p for i, p in enumerate(STORED) if i != 3]
    ]
    assert np.array_equal(pool.bytes, before)
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [7])
    backend.clear()
    assert backend.batch_exists(KEYS) == 0


def test_only_pages_that_every_pool_can_restore_count(make: Callable[..., Any]) -> None:
    backend = make(filled(1), filled(2))
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    kept = [1, 2, 5, 6]
    trailing = sglang.PoolHitPolicy.TRAILING_PAGES
    window = sglang.PoolTransfer("swa", sglang.indices([STORED[i] for i in kept]), [KEYS[i] for i in kept], trailing)
    assert backend.batch_set_v2([window]) == {"swa": [True] * 4}
    two = sglang.PoolTransfer("swa", keys=KEYS[:2], hit_policy=trailing)
    found = backend.batch_exists_v2(KEYS, [two])
    assert (found.kv_hit_pages, found.restorable_prefix_pages, found.extra_pool_hit_pages) == (
        7,
        [3, 7],
        {"kv": 8, "swa": 7},
    )
    group = sglang.PoolTransfer("swa", keys=KEYS, hit_policy=sglang.PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(KEYS, [group]).kv_hit_pages == 8, "does not decide"


def test_a_main_pool_without_memory_has_every_page_and_those_beside_it_decide(make: Callable[..., Any]) -> None:
    main = sglang.HostPool()
    main.kv_buffer = None
    backend = make(main, filled(2))
    beside = sglang.PoolTransfer("swa", sglang.indices(STORED), KEYS)
    assert (backend.batch_exists(KEYS), backend.batch_exists_v2(KEYS).kv_hit_pages) == (0, 0), "nothing decides"
    assert backend.batch_exists_v2(KEYS, [beside]).kv_hit_pages == 0
    assert backend.batch_set_v1(KEYS, sglang.indices(STORED)) == [True] * 8
    assert backend.batch_set_v2([beside]) == {"swa": [True] * 8}
    found = backend.batch_exists_v2([*KEYS, "x"], [beside])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (8, {"swa": 8})
    backend.clear()
    assert backend.batch_exists_v2(KEYS, [beside]).kv_hit_pages == 0


def test_pools_that_sglang_moves_together_are_one_engine(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    version = [("", 0)]
    monkeypatch.setattr("transferd.adapters.sglang.weights.of_sglang", lambda: version[0])
    main, beside = sglang.HostPool(), {name: filled(seed) for seed, name in enumerate(TOGETHER)}
    main.kv_buffer = None
    backend = make(main, **beside)
    assert {name: len(pool.pages.sizes) for name, pool in backend._rank.pools.items()} == {
        "deepseek_v4": 4,
        "deepseek_v4_state": 4,
    }

    def every(pages: list[int], keys: list[str] = KEYS) -> list[sglang.PoolTransfer]:
        return [sglang.PoolTransfer(name, sglang.indices(pages), keys) for name in beside]

    stored = {name: pool.bytes[:, STORED].copy() for name, pool in beside.items()}
    assert backend.batch_set_v2(every(STORED)) == {name: [True] * 8 for name in beside}
    found = backend.batch_exists_v2([*KEYS, "x"], every(STORED))
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (8, dict.fromkeys(beside, 8))
    assert backend.batch_get_v2(every(LOADED)) == {name: [True] * 8 for name in beside}
    assert all(np.array_equal(pool.bytes[:, LOADED], stored[name]) for name, pool in beside.items())
    before = {name: pool.bytes.copy() for name, pool in beside.items()}
    assert backend.batch_get_v2(every(STORED)[:3]) == {TOGETHER[0]: [True] * 8, TOGETHER[1]: [True] * 8} | {
        TOGETHER[2]: [False] * 8
    }, "the third one without its companion"
    odd = every(LOADED)
    odd[0].host_indices = sglang.indices(STORED)
    assert not any(backend.batch_get_v2(odd)[TOGETHER[0]])
    assert "SGLang moves some pools of" in caplog.text
    assert all(np.array_equal(beside[name].bytes, before[name]) for name in TOGETHER[2:])
    version[0] = "step-2", 0
    for pool in [*beside.values()][1:]:
        pool.clear()
    assert not any(any(one) for one in backend.batch_set_v2(every(STORED)).values()), "one has KV of the old weights"
    beside[TOGETHER[0]].clear()
    assert all(all(one) for one in backend.batch_set_v2(every(STORED)).values())


def test_a_pool_may_lie_in_several_memories(make: Callable[..., Any]) -> None:
    pool = sglang.HostPool(split=True)
    for seed, half in enumerate(pool.halves):
        half[STORED] = np.random.default_rng(seed).integers(0, 256, (len(STORED), sglang.PIECE), dtype=np.uint8)
    backend = make(pool)
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    assert all(backend.batch_get_v1(KEYS, sglang.indices(LOADED)))
    assert all(np.array_equal(half[LOADED], half[STORED]) for half in pool.halves)


def test_ranks_and_pools_have_pages_of_their_own(make: Callable[..., Any]) -> None:
    first = make(filled(1), filled(2), tp_size=2)
    second = make(filled(3), tp_size=2, tp_rank=1)
    assert all(first.batch_set_v1(KEYS, sglang.indices(STORED)))
    assert (first.batch_exists(KEYS), second.batch_exists(KEYS)) == (8, 0)
    every = sglang.PoolTransfer("swa", keys=KEYS)
    assert first.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0


def test_new_weights_find_nothing_and_store_nothing_of_the_old_kv(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = [("", 0)]
    monkeypatch.setattr("transferd.adapters.sglang.weights.of_sglang", lambda: version[0])
    pool = filled(1)
    backend = make(pool, extra={"generation": "base"})
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    version[0] = "step-2", 0
    assert backend.batch_exists(KEYS) == 0
    assert not any(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    pool.clear()
    assert all(backend.batch_set_v1(KEYS[:2], sglang.indices(STORED[:2])))
    version[0] = "step-2", 1
    assert backend.batch_exists(KEYS) == 0, "an update from disk that named no version"
    assert not any(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    pool.clear()
    assert all(backend.batch_set_v1(KEYS[:2], sglang.indices(STORED[:2])))
    version[0] = "step-3", 2
    assert backend.batch_exists(KEYS) == 0
    version[0] = "", 2
    assert backend.batch_exists(KEYS) == 8


def test_pages_of_private_memory_are_copied_and_shared_with_servers_whose_memory_is_not(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = make(filled(1))
    assert all(first.batch_set_v1(KEYS, sglang.indices(STORED)))
    pool = sglang.HostPool(private=True)
    with caplog.at_level(logging.WARNING, "sglang.transferd"):
        second = make(pool, extra={"buffer": "32KiB"})  # four slots
    assert '"allocator": "shm"' in caplog.text
    assert second.batch_exists([*KEYS, "x"]) == 8
    wanted = [*KEYS[:3], "x", *KEYS[4:]]
    assert second.batch_get_v1(wanted, sglang.indices(LOADED)) == [True] * 3 + [False] + [True] * 4
    expected = np.full_like(pool.bytes, sglang.STALE)
    kept = [i for i in range(8) if i != 3]
    expected[:, [LOADED[i] for i in kept]] = first._rank.pools["kv"].host.bytes[:, [STORED[i] for i in kept]]
    assert np.array_equal(pool.bytes, expected)
    more = [f"{number:064x}" for number in range(100, 108)]
    assert second.batch_set_v1(more, sglang.indices(LOADED)) == [True] * 8
    other = first._rank.pools["kv"].host
    assert first.batch_get_v1(more, sglang.indices(STORED)) == [True] * 8
    assert np.array_equal(other.bytes[:, STORED], pool.bytes[:, LOADED])


@pytest.mark.parametrize("private", [False, True])
def test_what_a_look_up_has_found_is_loaded_without_the_daemon(make: Callable[..., Any], private: bool) -> None:
    """A damaged or lost file costs its own page, which the daemon then finds and counts."""
    if not tells_what_it_has(Path(os.environ["XDG_CACHE_HOME"]).parent):
        pytest.skip("the file system cannot say what the page cache has")
    backend = make(pool := filled(1, private=private))
    kv = backend._rank.pools["kv"]
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    assert backend.batch_exists([*KEYS, "x"]) == 8
    before, files = pool.bytes.copy(), {page: _file_of(pool, page) for page in STORED}
    daemon = kv.link._companion.started.process.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        assert backend.batch_get_v1(KEYS, sglang.indices(LOADED)) == [True] * 8
    finally:
        os.kill(daemon, signal.SIGCONT)
    before[:, LOADED] = before[:, STORED]
    assert np.array_equal(pool.bytes, before)
    content = bytearray(files[STORED[2]].read_bytes())
    content[sglang.PIECE + 7] ^= 1
    files[STORED[2]].write_bytes(content)
    files[STORED[5]].unlink()
    forget(files[STORED[6]])  # the daemon reads it from the disk
    pool.bytes[:, LOADED] = 0
    assert backend.batch_get_v1(KEYS, sglang.indices(LOADED)) == [i not in (2, 5) for i in range(8)]
    whole = [i for i in range(8) if i not in (2, 5)]
    assert np.array_equal(pool.bytes[:, [LOADED[i] for i in whole]], pool.bytes[:, [STORED[i] for i in whole]])
    wait_until(lambda: kv.link.stats()["storage"]["corrupt"] == 1, "the daemon has not noticed")
    assert [kv.exists([key])[0] for key in KEYS] == [i not in (2, 5) for i in range(8)]


def test_new_weights_end_what_was_found_under_the_old_ones(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = [("", 0)]
    monkeypatch.setattr("transferd.adapters.sglang.weights.of_sglang", lambda: version[0])
    backend = make(pool := filled(1))
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    before = pool.bytes.copy()
    assert backend.batch_exists(KEYS) == 8
    version[0] = "step-2", 0
    assert backend.batch_get_v1(KEYS, sglang.indices(LOADED)) == [False] * 8
    version[0] = "", 0
    kv = backend._rank.pools["kv"]
    lease = kv.link.lease

    def changed_meanwhile(keys: list[str], ttl: float) -> Any:
        answer = lease(keys, ttl)
        assert answer.result().there == [True] * 8
        version[0] = "step-2", 0
        backend._rank._weights.follow([kv])
        return answer

    monkeypatch.setattr(kv.link, "lease", changed_meanwhile)
    assert backend.batch_exists(KEYS) == 8, "of the old weights"
    assert backend.batch_get_v1(KEYS, sglang.indices(LOADED)) == [False] * 8
    assert np.array_equal(pool.bytes, before)


def _file_of(pool: sglang.HostPool, page: int) -> Path:
    """The file that has this page's bytes."""
    content = pool.bytes[:, page].tobytes()
    files = (one for one in Path(os.environ["XDG_CACHE_HOME"]).rglob("*@0") if "objects" in one.parts)
    return next(one for one in files if one.read_bytes().startswith(content))


def test_odd_pools_are_one_line_each(make: Callable[..., Any]) -> None:
    silent = sglang.HostPool()
    silent.get_page_buffer_meta = lambda _: ([], None)  # type: ignore[assignment, return-value]
    with pytest.raises(ConfigError, match="host pool kv"):
        make(silent)
    odd = sglang.HostPool()
    odd.get_page_buffer_meta = lambda indices: ([int(indices[0]) ** 2], [8])  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="equal distances"):
        make(odd)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"interface_v1": 0}, r"interface_v1: must be 1"),
        ({"endpont": "x"}, "endpont"),
        ({"load_timeout": 0}, "load_timeout"),
        ({"buffer": "0"}, "buffer: must be above 0"),
        ({"capacity": "much"}, "capacity"),
        ({"name": "my server"}, r"name: .*at most 64 letters.*'my server'"),
        ({"name": "n" * 65}, "name: .*at most 64 letters"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(EXTRA | given)


@pytest.mark.parametrize("wrong", [sglang.indices([1])[:-1], sglang.indices([1]) + 1, sglang.indices([1, 2])])
def test_indices_that_are_no_whole_pages_are_refused(wrong: Any) -> None:
    with pytest.raises(TierError, match="not whole pages"):
        pools.pages_of("kv", sglang.HostPool()).numbers(wrong, 1)


def test_a_long_name_serves_every_pool_and_no_model_is_refused_at_once(make: Callable[..., Any]) -> None:
    backend = make(filled(1), filled(2), extra={"name": "n" * 64})
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))
    assert {pool.facts.name[-22:] for pool in backend._rank.pools.values()} == {
        "nnn-dp0-pp0-cp0-tp0-kv",
        "nn-dp0-pp0-cp0-tp0-swa",
    }
    with pytest.raises(ConfigError, match="--served-model-name"):
        make(filled(1), model_name=None)


def test_indices_that_are_no_whole_pages_cost_the_pages_and_raise_nothing_into_sglang(make: Callable[..., Any]) -> None:
    backend = make(filled(1))
    assert backend.batch_set_v1(KEYS, sglang.indices(STORED)[:-1]) == [False] * 8
    assert all(backend.batch_set_v1(KEYS, sglang.indices(STORED)))


@pytest.mark.parametrize(
    "differing",
    [{"tp_rank": 1}, {"tp_size": 4}, {"pp_rank": 1, "pp_size": 2}, {"attn_cp_size": 2}, {}],
    ids=["rank", "ranks", "stage", "context", "pool"],
)
def test_pages_of_another_shape_have_another_identity(differing: dict[str, Any]) -> None:
    pool, chosen = sglang.HostPool(), settings(EXTRA)
    pages = pools.pages_of("kv", pool)

    def of(name: str, **config: Any) -> Any:
        said = sglang.HiCacheStorageConfig(**{"tp_size": 2} | config)
        return identity.facts(said, name, pool, pages, chosen, None, "life")

    assert of("kv") == of("kv")
    assert of("kv") != of("kv" if differing else "swa", **differing)


def test_without_sglangs_arguments_nothing_is_shared_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pool = sglang.HostPool()
    chosen = settings({key: one for key, one in EXTRA.items() if key != "weights"})
    with caplog.at_level(logging.WARNING, "sglang.transferd"):
        made = [
            identity.facts(sglang.HiCacheStorageConfig(), "kv", pool, pools.pages_of("kv", pool), chosen, None, life)
            for life in ("one", "two")
        ]
    assert made[0] != made[1]
    assert 'set "weights"' in caplog.messages[0]
